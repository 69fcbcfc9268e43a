"""Engine torch, as a new user types it: the same nodes, data path, export and teardown.

Slow: the estimator's main job guards the way itself in `make test`. Each of the two runs takes
five to eight minutes on two busy cores.
"""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import time

import pytest
from machine import ROOT, docker, mayfly, networks, nodes, run

import testenv

pytestmark = pytest.mark.slow
STEPS = 1874  # two epochs of batches of 64


@pytest.fixture(scope="module")
def job(platform):
    command = ("make", "-s", "deploy", "CLOUD=local", "ENGINE=torch", "WORKERS=2")
    outcome = run(*command, f"STEPS={STEPS}", "JSON=1")
    print("torch job:", json.dumps(outcome.document))
    return outcome


def objects(bucket, document):
    """The run's manifest, and a function that reads one of its objects."""
    name, _, prefix = document["model_uri"].removeprefix("s3://").partition("/")
    prefix = prefix.rstrip("/").removesuffix("model").rstrip("/")

    def read(path: str) -> bytes:
        return bucket.get_object(Bucket=name, Key=f"{prefix}/{path}")["Body"].read()

    return json.loads(read("manifest.json")), read


def test_it_ends_well_and_learned(job):
    document = job.document
    assert job.code == 0, job.messages[-3000:]
    assert document["ok"] is True
    assert document["leftovers"] == 0
    assert document["global_step"] == STEPS
    assert document["samples_seen"] == document["samples_processed"] == STEPS * 64
    assert document["accuracy"] >= 0.84


def test_the_model_is_whole_in_the_bucket(job, bucket):
    manifest, read = objects(bucket, job.document)
    paths = {entry["path"] for entry in manifest["files"]}
    assert paths >= {"model/model.pt", "model/model.json", f"checkpoints/step={STEPS}.ckpt"}
    for entry in manifest["files"]:
        content = read(entry["path"])
        assert len(content) == entry["size"]
        assert hashlib.sha256(content).hexdigest() == entry["sha256"]
    about = json.loads(read("model/model.json"))
    assert about["pictures"] == 10_000, "the test set is seen once, whatever the number of nodes"
    assert about["accuracy"] == pytest.approx(job.document["accuracy"], abs=1e-4)
    assert io.BytesIO(read("model/model.pt")).read(2) == b"PK", "torch.save writes a zip file"


def test_all_nodes_trained_together_and_over_no_loopback(job, bucket):
    _, read = objects(bucket, job.document)
    logs = [read(f"logs/{task}.log").decode() for task in ("chief-0", "worker-0")]
    assert sorted(line for log in logs for line in log.splitlines() if " of 2, gloo" in line) == [
        "rank 0 of 2, gloo",
        "rank 1 of 2, gloo",
    ]
    assert all(f"evaluated_step={STEPS}" in log for log in logs)


def test_nothing_is_left(job, platform):
    assert nodes(platform) == []
    assert networks(platform) == []


def test_a_killed_worker_is_restarted_and_training_goes_on(platform, clean, tmp_path):
    job_file = tmp_path / "job.yml"
    job_file.write_text(
        "cloud: local\n"
        "nodes: {worker: {count: 2}}\n"
        "trainer: {engine: torch, steps: 5622}\n"  # six epochs; each leaves a checkpoint
    )
    process = start(str(job_file))
    killed = kill_at_step(platform, 1500)
    text, messages = process.communicate(timeout=900)
    document = json.loads(text)
    assert killed, messages[-3000:]
    assert process.returncode == 0, messages[-3000:]
    assert document["global_step"] == 5622
    assert document["samples_processed"] >= document["samples_seen"] == 5622 * 64


def start(job_file: str) -> subprocess.Popen[str]:
    command = [str(ROOT / ".venv/bin/mayfly"), "deploy", job_file, "--json"]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, cwd=ROOT, env=testenv.environment(), stdout=pipe, stderr=pipe, text=True
    )


def kill_at_step(platform, step: int) -> bool:
    """Kill the training process of the second worker once the run has made this step."""
    end = time.monotonic() + 600
    while time.monotonic() < end:
        time.sleep(2)
        status = mayfly("status", "--json").document
        if (status.get("status") or status).get("global_step", 0) < step:
            continue
        for name in nodes(platform):
            line = "pgrep -f 'python -u /opt/mayfly/[p]rograms' | tail -n 1"
            if "worker-0" in docker(platform, "exec", name, "systemctl", "list-units", "mayfly-*"):
                script = f"kill -9 $({line}) && echo killed"
                return "killed" in docker(platform, "exec", name, "sh", "-c", script)
    return False
