"""A model directory is read in the same way in HDFS and as a path."""

from __future__ import annotations

import os

import pytest
from tests.unit.data_fakes import make_bucket
from tests.unit.train_fakes import cluster

from mayfly_train import export, hdfs, model_dir, model_files, s3
from mayfly_train.errors import NodeError
from mayfly_train.model_dir import Mounted, open_model_dir
from mayfly_train.verify import verify_s3


def test_an_address_is_read_by_hdfs_and_a_path_by_the_file_system():
    reader, path = open_model_dir(cluster())
    assert isinstance(reader, hdfs.Hdfs)
    assert path == "/mayfly/demo/model"
    reader, path = open_model_dir(cluster(model_dir="/mnt/mayfly/model/"))
    assert isinstance(reader, Mounted)
    assert path == "/mnt/mayfly/model"


def test_what_is_neither_is_refused():
    with pytest.raises(NodeError, match="'s3://b/model'"):
        open_model_dir(cluster(model_dir="s3://b/model"))


@pytest.fixture
def directory(tmp_path):
    for name, content in {
        "checkpoints/step=20.tar": b"older",
        "checkpoints/step=40.tar": b"newer",
        "checkpoints/step=60.tar.ab12.part": b"half",
        "export/saved_model.pb": b"model",
        "export/variables/variables.index": b"index",
        "events.out.tfevents.1.chief": b"events",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    os.utime(tmp_path / "checkpoints/step=20.tar", ns=(0, 5_000_000))
    return tmp_path


def test_a_walk_has_every_file_with_its_size_and_time(directory):
    (directory / "to-nothing").symlink_to("nowhere")
    found = {info.path: info for info in Mounted().walk(str(directory))}
    assert sorted(found) == list(found)
    assert len(found) == 6
    oldest = found[str(directory / "checkpoints/step=20.tar")]
    assert (oldest.size, oldest.modified_ms, oldest.is_directory) == (5, 5, False)


def test_files_are_read_whole_and_in_pieces(directory, monkeypatch):
    monkeypatch.setattr(model_dir, "CHUNK_BYTES", 2)
    path = str(directory / "export/saved_model.pb")
    assert Mounted().read_bytes(path) == b"model"
    assert list(Mounted().read_chunks(path, web=True)) == [b"mo", b"de", b"l"]


def test_a_directory_that_was_never_made_is_empty_and_one_that_fails_says_so(tmp_path):
    assert Mounted().walk(str(tmp_path / "absent")) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(NodeError, match=r"cannot read .*/file: Not a directory — is it mounted"):
        Mounted().walk(str(tmp_path / "file"))
    with pytest.raises(NodeError, match="cannot read .*/none: No such file"):
        list(Mounted().read_chunks(str(tmp_path / "none")))


def test_a_model_is_exported_from_a_path(directory, client):
    make_bucket(client, "bucket", {})
    uri = s3.S3Uri("bucket", "runs/r1")
    settings = export.ExportSettings(client, "r1", uri, str(directory), {"global_step": 40})
    export.export_run(settings, Mounted())
    made = verify_s3(client, uri)
    assert [entry.path for entry in made.files] == [
        "checkpoints/step=40.tar",
        "events/events.out.tfevents.1.chief",
        "model/saved_model.pb",
        "model/variables/variables.index",
    ]
    assert s3.read_bytes(client, uri.join("model/saved_model.pb")) == b"model"


def test_an_empty_path_has_no_model(tmp_path):
    with pytest.raises(NodeError, match="no model and no checkpoint"):
        model_files.find(Mounted(), str(tmp_path))
