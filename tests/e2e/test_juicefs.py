"""`store: juicefs` with engine keras-ps: the model's way over a path that all nodes share.

Slow: it needs a node image of its own (TensorFlow 2.21, Redis, JuiceFS) and /dev/fuse.
"""

from __future__ import annotations

import hashlib
import json

import pytest
from machine import ROOT, CanaryWatch, docker, mayfly, networks, nodes, run

import testenv
from mayfly.ledger import Ledger
from mayfly_train import s3

pytestmark = pytest.mark.slow
STEPS = 1874  # two epochs of batches of 64
BUCKET = s3.S3Uri("mayfly", "")
STORE = "-store/"


def in_stores(bucket) -> list[str]:
    """The keys of all objects in the bucket that belong to some run's shared file system."""
    top = {name: name.partition("/")[0] + "/" for name in s3.list_sizes(bucket, BUCKET)}
    return sorted(name for name, first in top.items() if first.endswith(STORE))


@pytest.fixture(scope="module")
def job(platform, bucket):
    assert nodes(platform) == []
    assert in_stores(bucket) == []
    command = ("make", "-s", "deploy", "CLOUD=local", "ENGINE=keras-ps", "WORKERS=2")
    with CanaryWatch(platform) as watch:
        outcome = run(*command, "SET=store=juicefs", f"STEPS={STEPS}", "JSON=1")
    print("juicefs job:", json.dumps(outcome.document))
    return outcome, watch


def test_it_ends_well_and_learned(job):
    outcome, _ = job
    document = outcome.document
    assert outcome.code == 0, outcome.messages[-3000:]
    assert document["ok"] is True
    assert document["leftovers"] == 0
    assert document["global_step"] >= STEPS
    assert document["accuracy"] >= 0.8


def test_the_model_is_whole_in_the_bucket(job, bucket):
    outcome, _ = job
    uri = s3.parse_uri(outcome.document["model_uri"].rstrip("/").removesuffix("model"))
    manifest = s3.read_json(bucket, uri.join("manifest.json"))
    paths = {entry["path"] for entry in manifest["files"]}
    assert "model/saved_model.pb" in paths
    assert any(path.startswith("checkpoints/step=") for path in paths)
    for entry in manifest["files"]:
        content = s3.read_bytes(bucket, uri.join(entry["path"]))
        assert len(content) == entry["size"]
        assert hashlib.sha256(content).hexdigest() == entry["sha256"]


def test_nothing_is_left_on_the_machine_or_in_the_bucket(job, platform, bucket):
    outcome, _ = job
    assert nodes(platform) == []
    assert networks(platform) == []
    assert in_stores(bucket) == []
    ledger = Ledger(testenv.STATE / "ledger.sqlite")
    deleted = [e for e in ledger.journal(outcome.document["run"]) if e.action == "delete"]
    ledger.close()
    assert [entry.outcome for entry in deleted] == ["done"]
    assert int(deleted[0].detail.split()[0]) > 1, "the model was there, not only the marker"


def test_secrets_are_nowhere(job):
    _, watch = job
    assert watch.found == set()
    assert watch.looked_into_nodes > 0


def test_kept_nodes_share_the_files_and_destroy_leaves_no_object(platform, bucket, clean):
    job_file = ROOT / "training/jobs/keras-ps.yml"
    flags = ("--set", "store=juicefs", "--steps", "400", "--keep", "--json")
    kept = mayfly("deploy", str(job_file), "--cloud", "local", *flags)
    name = kept.document["run"]
    try:
        assert kept.document["ok"], kept.messages[-3000:]
        listing = "cd /mnt/mayfly/model && find . -type f | sort && sha256sum export/saved_model.pb"
        seen = {n: docker(platform, "exec", n, "sh", "-ec", listing) for n in nodes(platform)}
        assert len(seen) == 3
        assert len(set(seen.values())) == 1, seen
        assert "./export/saved_model.pb" in next(iter(seen.values()))
        assert in_stores(bucket)
    finally:
        destroyed = mayfly("destroy", name, "--json")
    assert destroyed.document["ok"]
    assert in_stores(bucket) == []
