from __future__ import annotations

import hashlib
import random
from dataclasses import replace

import pytest
from tests.unit.data_fakes import FakeHdfs, make_bucket

from mayfly_train import export, manifest, model_files, s3
from mayfly_train.errors import NodeError
from mayfly_train.export import ExportSettings, HashingStream, export_run
from mayfly_train.hdfs import HdfsFailure
from mayfly_train.verify import verify_s3

MODEL = "/mayfly/r1/model"
URI = s3.S3Uri("bucket", "runs/r1")
FILES = {
    "checkpoint": b'model_checkpoint_path: "hdfs://n:9000/mayfly/r1/model/model.ckpt-14"\n'
    b'all_model_checkpoint_paths: "model.ckpt-7"\n',
    "graph.pbtxt": b"graph",
    "model.ckpt-7.index": b"old index",
    "model.ckpt-7.data-00000-of-00001": b"old data",
    "model.ckpt-14.index": b"index",
    "model.ckpt-14.meta": b"meta",
    "model.ckpt-14.data-00000-of-00001": random.Random(1).randbytes(9000),
    "model.ckpt-140.index": b"another step with the same beginning",
    "events.out.tfevents.1.chief": b"events",
    "eval/events.out.tfevents.2.chief": b"evaluation",
    "export/final/1700000000/saved_model.pb": b"older",
    "export/final/1800000000/saved_model.pb": b"model",
    "export/final/1800000000/variables/variables.index": b"v",
    "export/final/temp-1900000000/saved_model.pb": b"unfinished",
}
EXPECTED = {
    "checkpoints/checkpoint": b'model_checkpoint_path: "model.ckpt-14"\n'
    b'all_model_checkpoint_paths: "model.ckpt-14"\n',
    "checkpoints/graph.pbtxt": FILES["graph.pbtxt"],
    "checkpoints/model.ckpt-14.data-00000-of-00001": FILES["model.ckpt-14.data-00000-of-00001"],
    "checkpoints/model.ckpt-14.index": b"index",
    "checkpoints/model.ckpt-14.meta": b"meta",
    "events/eval/events.out.tfevents.2.chief": b"evaluation",
    "events/events.out.tfevents.1.chief": b"events",
    "model/saved_model.pb": b"model",
    "model/variables/variables.index": b"v",
}


class TimedHdfs(FakeHdfs):
    """A later SavedModel is a newer one."""

    def walk(self, path):
        infos = super().walk(path)
        newer = [info for info in infos if "/1800000000/" in info.path]
        return [
            type(info)(info.path, info.size, 2 if info in newer else 1, False) for info in infos
        ]


@pytest.fixture
def hdfs():
    return TimedHdfs({f"{MODEL}/{name}": data for name, data in FILES.items()})


@pytest.fixture
def settings(client, no_pause):
    make_bucket(client, "bucket", {})
    facts = {"global_step": 14, "accuracy": 0.9, "samples_seen": 112, "samples_processed": 120}
    return ExportSettings(client, "r1", URI, MODEL, facts)


def objects(settings):
    names = s3.list_sizes(settings.client, URI)
    return {n: s3.read_bytes(settings.client, URI.join(n)) for n in names if "status/" not in n}


def order_of_writes(monkeypatch):
    """The keys that are written, in their order."""
    keys = []
    for name, place in (("upload", 1), ("write_bytes", 1)):
        real = getattr(s3, name)

        def recording(*args, real=real, place=place):
            real(*args)
            keys.append(args[place].key)

        monkeypatch.setattr(s3, name, recording)
    return keys


def test_the_model_arrives_and_its_manifest_says_so(settings, hdfs):
    seen = []
    made = export_run(settings, hdfs, lambda done, total: seen.append((done, total)))
    found = objects(settings)
    assert found.pop("manifest.json").decode() == made.to_json()
    assert found == EXPECTED
    assert {e.path: e.sha256 for e in made.files} == {
        name: hashlib.sha256(data).hexdigest() for name, data in EXPECTED.items()
    }
    assert made.extra == {"run": "r1", **settings.facts}
    assert verify_s3(settings.client, URI) == made
    copied = sum(len(d) for n, d in EXPECTED.items() if n != "checkpoints/checkpoint")
    assert seen[-1] == (copied, copied)


def test_a_file_that_is_longer_than_it_was_listed_is_whole_and_no_more_than_all(settings, hdfs):
    """Its writer was killed and has never closed it: event files end so."""
    real, seen = hdfs.walk, []
    hdfs.walk = lambda path: [replace(info, size=min(info.size, 5)) for info in real(path)]
    export_run(settings, hdfs, lambda done, total: seen.append((done, total)))
    found = objects(settings)
    assert {name: found[name] for name in EXPECTED} == EXPECTED
    assert all(done <= total for done, total in seen) and seen[-1][0] == seen[-1][1]


def test_the_manifest_is_written_last(settings, hdfs, monkeypatch):
    keys = order_of_writes(monkeypatch)
    export_run(settings, hdfs)
    assert keys[-1] == "runs/r1/manifest.json" and keys.count(keys[-1]) == 1


def test_an_export_that_fails_leaves_no_manifest_and_goes_on_later(settings, hdfs, monkeypatch):
    export_run(settings, hdfs)
    hdfs.files[f"{MODEL}/model.ckpt-14.index"] = b"changed since"
    real = s3.upload

    def refuse(client, uri, stream):
        if uri.key.endswith("ckpt-14.index"):
            raise s3.S3UserError("S3 access denied")
        real(client, uri, stream)

    monkeypatch.setattr(s3, "upload", refuse)
    with pytest.raises(s3.S3UserError, match="access denied"):
        export_run(settings, hdfs)
    assert "manifest.json" not in objects(settings)

    monkeypatch.setattr(s3, "upload", real)
    keys = order_of_writes(monkeypatch)
    made = export_run(settings, hdfs)
    uploaded = [key for key in keys if "/status/" not in key]
    assert uploaded == [
        "runs/r1/checkpoints/model.ckpt-14.index",
        "runs/r1/checkpoints/checkpoint",
        "runs/r1/manifest.json",
    ]
    assert made.by_path()["checkpoints/model.ckpt-14.index"].size == len(b"changed since")


def test_an_object_that_was_lost_since_is_copied_again(settings, hdfs):
    export_run(settings, hdfs)
    s3.delete(settings.client, URI.join("model/saved_model.pb"))
    export_run(settings, hdfs)
    assert objects(settings)["model/saved_model.pb"] == b"model"


def test_a_read_that_breaks_is_repeated_through_webhdfs(settings, hdfs):
    real, ways = hdfs.read_chunks, []

    def breaking(path, web=False):
        ways.append(web)
        for number, chunk in enumerate(real(path)):
            if number == 3 and not web:
                raise HdfsFailure("a DataNode died")
            yield chunk

    hdfs.read_chunks = breaking
    seen = []
    export_run(settings, hdfs, lambda done, total: seen.append((done, total)))
    found = objects(settings)
    assert {name: found[name] for name in EXPECTED} == EXPECTED
    assert True in ways and seen[-1][0] == seen[-1][1]


def test_an_object_that_s3_lost_makes_the_export_fail(settings, hdfs, monkeypatch):
    real = s3.upload

    def lose(client, uri, stream):
        real(client, uri, stream)
        if uri.key.endswith("saved_model.pb"):
            s3.delete(client, uri)

    monkeypatch.setattr(s3, "upload", lose)
    with pytest.raises(NodeError, match="not whole: model/saved_model.pb is missing"):
        export_run(settings, hdfs)
    assert "manifest.json" not in objects(settings)


def test_a_checkpoint_alone_is_a_model_and_nothing_is_none(hdfs):
    only = {n: d for n, d in hdfs.files.items() if "/export/" not in n}
    targets = [file.target for file in model_files.find(FakeHdfs(only), MODEL).files]
    assert targets and not [target for target in targets if target.startswith("model/")]
    with pytest.raises(NodeError, match="no model and no checkpoint"):
        model_files.find(FakeHdfs({f"{MODEL}/events.out.tfevents.1": b"e"}), MODEL)


def test_what_a_program_without_savedmodels_leaves():
    left = {
        f"{MODEL}/export/model.pt": b"w",
        f"{MODEL}/export/labels/names.json": b"n",
        f"{MODEL}/checkpoints/step=1.ckpt": b"1",
        f"{MODEL}/checkpoints/step=2.ckpt": b"2",
        f"{MODEL}/checkpoints/step=3.ckpt.0a1b.part": b"3",
    }
    found = model_files.find(FakeHdfs(left), MODEL)
    targets = sorted(file.target for file in found.files)
    assert targets == ["checkpoints/step=2.ckpt", "model/labels/names.json", "model/model.pt"]
    assert found.checkpoint_state is None


def test_tensorflows_checkpoint_among_those_of_other_programs_is_exported_whole():
    state = b'model_checkpoint_path: "ckpt-158"\nall_model_checkpoint_paths: "ckpt-9"\n'
    files = {
        "checkpoint": state,
        "ckpt-9.index": b"old",
        "ckpt-158.index": b"index",
        "ckpt-158.data-00000-of-00001": b"data",
    }
    hdfs = FakeHdfs({f"{MODEL}/checkpoints/{name}": data for name, data in files.items()})
    found = model_files.find(hdfs, MODEL)
    targets = sorted(file.target for file in found.files)
    assert targets == ["checkpoints/ckpt-158.data-00000-of-00001", "checkpoints/ckpt-158.index"]
    assert found.checkpoint_state == (
        b'model_checkpoint_path: "ckpt-158"\nall_model_checkpoint_paths: "ckpt-158"\n'
    )


def test_a_checkpoint_whose_files_are_gone_is_an_error(hdfs):
    del hdfs.files[f"{MODEL}/model.ckpt-14.index"]
    with pytest.raises(NodeError, match="model.ckpt-14 is named, but its files are not there"):
        model_files.find(hdfs, MODEL)


@pytest.mark.parametrize("size", [1, 6, 7, 8, 100])
def test_a_stream_gives_what_is_asked_until_its_end(size):
    data, counted = bytes(range(100)), []
    pieces = iter([data[start : start + 7] for start in range(0, 100, 7)])
    stream = HashingStream(pieces, counted.append)
    parts = []
    while part := stream.read(size):
        parts.append(part)
    assert [len(part) for part in parts[:-1]] == [size] * (len(parts) - 1)
    assert b"".join(parts) == data and stream.size == sum(counted) == 100
    assert stream.hexdigest() == hashlib.sha256(data).hexdigest()


def test_a_long_file_is_uploaded_in_parts(settings, client):
    data = random.Random(2).randbytes((16 << 20) + 5)
    hdfs = FakeHdfs({f"{MODEL}/export/1/saved_model.pb": data})
    hdfs.read_chunks = lambda path, web=False: iter([data[:3], data[3:]])
    made = export_run(settings, hdfs)
    assert client.head_object(Bucket="bucket", Key="runs/r1/model/saved_model.pb")["ETag"].endswith(
        '-2"'
    )
    assert made.files[0].sha256 == hashlib.sha256(data).hexdigest()


def test_an_address_is_tried_without_a_trace(settings):
    export.check_writable(settings.client, URI)
    assert s3.list_sizes(settings.client, URI) == {}
    with pytest.raises(s3.S3UserError, match="no such bucket"):
        export.check_writable(settings.client, s3.S3Uri("none", "x"))


def test_figures_of_the_run_stand_in_the_manifest(settings, hdfs):
    text = export_run(settings, hdfs).to_json()
    assert manifest.parse(text).extra["accuracy"] == 0.9
