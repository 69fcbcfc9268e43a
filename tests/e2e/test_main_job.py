"""The main job whole, as a new user types it: data in S3 to a verified model, nothing left."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from pathlib import Path

import pytest
from machine import ROOT, CanaryWatch, Outcome, mayfly, networks, nodes, run

import testenv

PHASES = {
    "image",
    "infrastructure",
    "contextualization",
    "staging",
    "training",
    "export",
    "destroy",
}


@pytest.fixture(scope="module")
def job(platform) -> tuple[Outcome, CanaryWatch]:
    with CanaryWatch(platform) as watch:
        outcome = run("make", "-s", "deploy", "CLOUD=local", "WORKERS=2", "JSON=1")
    print("main job:", json.dumps(outcome.document))
    return outcome, watch


def test_it_ends_well_and_says_so(job):
    outcome, _ = job
    document = outcome.document
    assert outcome.code == 0, outcome.messages[-3000:]
    assert document["ok"] is True
    assert document["leftovers"] == 0
    assert set(document["phases"]) == PHASES
    assert all(seconds >= 0 for seconds in document["phases"].values())
    assert document["phases"]["training"] > 0


def test_it_learned(job):
    document = job[0].document
    assert document["accuracy"] >= 0.88
    assert document["samples_seen"] == document["global_step"] * 128
    assert document["samples_processed"] >= document["samples_seen"]


def test_the_model_is_whole_in_the_bucket(job, bucket):
    uri = job[0].document["model_uri"]
    name, _, prefix = uri.removeprefix("s3://").partition("/")
    run_prefix = prefix.rstrip("/").removesuffix("model").rstrip("/")
    body = bucket.get_object(Bucket=name, Key=f"{run_prefix}/manifest.json")["Body"].read()
    manifest = json.loads(body)
    assert any(entry["path"].endswith("saved_model.pb") for entry in manifest["files"])
    for entry in manifest["files"]:
        content = bucket.get_object(Bucket=name, Key=f"{run_prefix}/{entry['path']}")["Body"].read()
        assert len(content) == entry["size"]
        assert hashlib.sha256(content).hexdigest() == entry["sha256"]


def test_nothing_is_left(job, platform):
    assert nodes(platform) == []
    assert networks(platform) == []
    run_id = job[0].document["run"]
    listed = mayfly("ls", "--json").document
    assert next(r for r in listed["runs"] if r["run"] == run_id)["state"] == "destroyed"


def test_no_secret_in_a_process_list_a_journal_or_an_open_file(job):
    watch = job[1]
    assert watch.looked_at_processes > 1000
    assert watch.looked_into_nodes >= 3
    assert watch.found == set()


def test_no_secret_in_a_file_after_the_run(job):
    """State, rendered files and caches; but for the embedded S3 server's own identities."""
    places = [
        testenv.STATE,
        ROOT / "build",
        Path(os.environ.get("MAYFLY_CACHE_DIR", "~/.cache/mayfly")).expanduser(),
    ]
    command = [
        "grep",
        "-rlF",
        "-f",
        "-",
        "--exclude-dir=docker",
        *[str(p) for p in places if p.exists()],
    ]
    found = subprocess.run(
        command, input=testenv.CANARY, capture_output=True, text=True, check=False
    ).stdout
    own = [line for line in found.splitlines() if "/s3/" in line and line.endswith(".json")]
    assert [line for line in found.splitlines() if line not in own] == []
    assert [line for line in own if Path(line).stat().st_mode & 0o077] == []


def test_no_secret_in_what_the_command_printed(job):
    outcome, _ = job
    assert testenv.CANARY not in outcome.messages
    assert testenv.CANARY not in json.dumps(outcome.document)


def test_a_second_start_reuses_everything_and_says_so(job):
    document = mayfly("local", "up", "--json").document
    assert document["reused"]
    assert all(document["reused"].values())


def test_destroying_again_is_said_and_harmless(job):
    again = mayfly("destroy", job[0].document["run"], "--json")
    assert again.code == 0
    assert "already" in again.messages + json.dumps(again.document)
