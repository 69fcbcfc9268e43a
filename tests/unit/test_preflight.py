"""Checks of buckets and data, against moto (which takes any key: wrong keys are an e2e test)."""

from __future__ import annotations

import json
import re

import boto3
import pytest
from moto import mock_aws

from mayfly import preflight
from mayfly.errors import RunFailed, UserError
from mayfly.run_store import RunStore, preprocess_progress, staging_progress
from mayfly.spec import load_spec
from mayfly.verify import verify_model
from mayfly_train.errors import BadInput

RUN = "s3://bucket/runs/one/"


@pytest.fixture
def client(monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing-only")
    with mock_aws():
        made = boto3.client("s3", region_name="us-east-1")
        made.create_bucket(Bucket="bucket")
        yield made


def put(client, key: str, body: str = "x") -> None:
    client.put_object(Bucket="bucket", Key=key, Body=body.encode())


def put_manifest(client, prefix: str, kind: str, files: dict[str, int], **extra) -> None:
    entries = [{"path": p, "size": n, "sha256": "0" * 64} for p, n in files.items()]
    document = {"version": 1, "kind": kind, "created": "now", "files": entries, **extra}
    put(client, f"{prefix}manifest.json", json.dumps(document))


def test_a_missing_bucket_is_named(client):
    with pytest.raises(BadInput, match="absent"):
        preflight.check_bucket(client, "s3://absent/models/")
    preflight.check_bucket(client, "s3://bucket/models/")


def test_an_empty_prefix_is_refused(client):
    put(client, "dataset-of-another-name/train.tfrecords")
    with pytest.raises(UserError, match="there is no data at s3://bucket/data/ — put it there"):
        preflight.check_dataset(client, "s3://bucket/data/")
    with pytest.raises(UserError, match="mayfly data put DIRECTORY s3://bucket/data/ --cloud gcp`"):
        preflight.check_dataset(client, "s3://bucket/data/", "gcp")


def test_data_without_a_manifest_is_refused(client):
    put(client, "data/train.tfrecords")
    with pytest.raises(UserError, match=r"no manifest\.json"):
        preflight.check_dataset(client, "s3://bucket/data/")


@pytest.mark.parametrize(
    ("listed", "complaint"),
    [({"train": 2}, "train has 1 bytes"), ({"train": 1, "eval": 1}, "eval is missing")],
)
def test_a_manifest_that_does_not_match_is_refused(client, listed, complaint):
    put(client, "data/train")
    put_manifest(client, "data/", "dataset", listed)
    with pytest.raises(BadInput, match=complaint):
        preflight.check_dataset(client, "s3://bucket/data/")


def test_a_model_is_no_data(client):
    put(client, "data/saved_model.pb")
    put_manifest(client, "data/", "model", {"saved_model.pb": 1})
    with pytest.raises(UserError, match="holds a model"):
        preflight.check_dataset(client, "s3://bucket/data/")


def test_an_upload_that_broke_is_unfinished(client):
    names = re.compile(r"train-.*")
    assert preflight.is_unfinished(client, "s3://bucket/data/", names)
    put(client, "data/train-00000-of-00001.tfrecords")
    assert preflight.is_unfinished(client, "s3://bucket/data/", names)
    put_manifest(client, "data/", "dataset", {"train-00000-of-00001.tfrecords": 1})
    assert not preflight.is_unfinished(client, "s3://bucket/data/", names)


def test_other_files_are_somebody_elses_upload(client):
    put(client, "data/train-00000-of-00001.tfrecords")
    put(client, "data/holidays.jpg")
    names = re.compile(r"train-.*")
    assert not preflight.is_unfinished(client, "s3://bucket/data/", names)


def test_whole_data_is_described(client):
    put(client, "data/train")
    put_manifest(client, "data/", "dataset", {"train": 1}, name="Fashion-MNIST")
    found = preflight.check_dataset(client, "s3://bucket/data/")
    assert found.describe() == "Fashion-MNIST: 1 files, 0 MiB"


def test_a_whole_model_is_proven(client):
    put(client, "runs/one/model/saved_model.pb", "12345")
    put_manifest(client, "runs/one/", "model", {"model/saved_model.pb": 5}, accuracy=0.9)
    assert verify_model(client, RUN).extra["accuracy"] == 0.9


def test_a_model_without_manifest_was_not_uploaded(client):
    with pytest.raises(RunFailed, match="was not uploaded"):
        verify_model(client, RUN)


@pytest.mark.parametrize("size", [4, 6])
def test_a_cut_model_is_not_proven(client, size):
    put(client, "runs/one/model/saved_model.pb", "1" * size)
    put_manifest(client, "runs/one/", "model", {"model/saved_model.pb": 5})
    with pytest.raises(RunFailed, match=f"has {size} bytes, the manifest says 5"):
        verify_model(client, RUN)


def test_a_lost_object_is_named(client):
    put_manifest(client, "runs/one/", "model", {"model/saved_model.pb": 5})
    with pytest.raises(RunFailed, match=r"model/saved_model\.pb is missing"):
        verify_model(client, RUN)


def test_the_store_reads_what_a_run_wrote(client):
    store = RunStore(client, RUN)
    assert store.status() is None
    assert store.staging() == []
    put(client, "runs/one/status.json", '{"state": "training", "global_step": 3}')
    put(client, "runs/one/status/staging-0.json", '{"bytes_done": 1048576, "bytes_total": 2097152}')
    put(client, "runs/one/status/staging-1.json", '{"bytes_done": 0, "bytes_total": 2097152}')
    store.write_log("contextualization.log", "hello")
    assert store.status().global_step == 3
    assert staging_progress(store.staging()) == ("1 of 4 MiB into HDFS", 0.25)
    logs = store.logs()
    assert list(logs) == ["contextualization.log"]
    assert store.read_text(logs["contextualization.log"]) == "hello"


def test_a_status_that_is_no_document_counts_as_none(client):
    put(client, "runs/one/status.json", "{half a docu")
    assert RunStore(client, RUN).status() is None


# --- preprocessing ----------------------------------------------------------------------------

IDX = ("train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz", "t10k-images-idx3-ubyte.gz",
       "t10k-labels-idx1-ubyte.gz")  # fmt: skip


def preprocessing(*paths, to="tfrecord", **settings):
    overrides = {"cloud": "local", "data.format": "files", "data.preprocess.to": to, **settings}
    dataset = preflight.Dataset("s3://bucket/data/", len(paths), 1, "", paths)
    preflight.check_preprocess(load_spec(None, overrides, {}), dataset)


def test_files_that_nodes_cannot_preprocess_are_refused_before_anything_is_created(client):
    put_manifest(client, "data/", "dataset", {"data_batch_1.bin": 1})
    put(client, "data/data_batch_1.bin")
    dataset = preflight.check_dataset(client, "s3://bucket/data/")
    assert dataset.paths == ("data_batch_1.bin",)
    with pytest.raises(UserError, match="at s3://bucket/data/: nothing to preprocess: data_batch"):
        preprocessing(*dataset.paths)
    preflight.check_preprocess(load_spec(None, {"cloud": "local"}, {}), dataset)


def test_images_of_a_size_that_the_program_does_not_take_are_refused():
    images = {"data.preprocess.image_size": 64}
    preprocessing("a/1.png", **images, **{"trainer.args.image_size": 64})
    with pytest.raises(UserError, match="image_size is 64 — builtin:cifar10 reads images of 3×32"):
        preprocessing("a/1.png", **images)
    server = {"engine": "tf-server", "trainer.args.image_size": 64}
    with pytest.raises(UserError, match="builtin:cifar10_server reads images of 3×32×32"):
        preprocessing("a/1.png", **images, **server)


def test_grey_images_are_refused_for_a_program_of_three_channels():
    preprocessing(*IDX, **{"trainer.args.channels": 1})
    preprocessing(*IDX, to="tensors", engine="horovod")
    with pytest.raises(UserError, match="holds grey images, and builtin:cifar10 reads 3 channels"):
        preprocessing(*IDX)


def test_the_store_reads_how_far_preprocessing_is(client):
    store = RunStore(client, RUN)
    assert preprocess_progress(store.preprocessing()) == ("", None)
    for node, done in (("n1", 3), ("n2", 4)):
        report = json.dumps({"worker": node, "files_done": done, "files_total": 16})
        put(client, f"runs/one/status/preprocess-{node}.json", report)
    assert preprocess_progress(store.preprocessing()) == ("4 of 16 shards", 0.25)
    assert store.staging() == []
