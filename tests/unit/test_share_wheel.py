"""One node's wheel reaches the others through HDFS, whole or not at all."""

from __future__ import annotations

import hashlib
import io
import json
from datetime import datetime
from pathlib import Path

import pytest
from tests.unit.data_fakes import FakeHdfs

from mayfly_train import __main__ as node
from mayfly_train import share_wheel
from mayfly_train.errors import BadInput
from mayfly_train.hdfs import FileInfo, HdfsFailure

STORE = "/mayfly/cache/horovod"
WANTED = {"framework": "torch", "framework_version": "2.13.0+cpu", "python": "3.11"}
NOW_S = 1_800_000_000.0


class Hdfs(FakeHdfs):
    """With directories, and files that were written now."""

    def status(self, path: str) -> FileInfo | None:
        if path in self.files:
            return FileInfo(path, len(self.files[path]), int(NOW_S * 1000), False)
        return None

    def list_directory(self, path: str) -> list[FileInfo]:
        below = [name.removeprefix(f"{path}/") for name in self.files if name.startswith(path)]
        names = {(name.partition("/")[0], "/" in name) for name in below}
        return [FileInfo(f"{path}/{name}", 0, 1, is_dir) for name, is_dir in sorted(names)]


@pytest.fixture
def built(tmp_path: Path) -> Path:
    """A wheel's directory as build_wheel.py of role horovod leaves it."""
    directory = tmp_path / "first" / "0123456789ab"
    directory.mkdir(parents=True)
    wheel = b"wheel" * 1000
    (directory / "horovod-0.28.1+torch.whl").write_bytes(wheel)
    record = {**WANTED, "compiler": "gcc 12.2.0", "wheel": "horovod-0.28.1+torch.whl"}
    record["sha256"] = hashlib.sha256(wheel).hexdigest()
    (directory / "build.json").write_text(json.dumps(record))
    return directory


def test_what_one_publishes_another_fetches(built: Path, tmp_path: Path) -> None:
    hdfs, output = Hdfs(), tmp_path / "second"
    assert share_wheel.fetch(hdfs, STORE, WANTED, output) is None
    assert share_wheel.publish(hdfs, STORE, built)
    assert not share_wheel.publish(hdfs, STORE, built)
    got = share_wheel.fetch(hdfs, STORE, WANTED, output)
    assert got == output / built.name / "horovod-0.28.1+torch.whl"
    for path in built.iterdir():
        assert (output / built.name / path.name).read_bytes() == path.read_bytes()
    assert [path.name for path in output.iterdir()] == [built.name]
    assert share_wheel.fetch(hdfs, STORE, WANTED, output) == got  # in its place


def test_a_wheel_for_another_framework_is_left(built: Path, tmp_path: Path) -> None:
    hdfs = Hdfs({f"{STORE}/failed-tensorflow.txt": b"why"})
    share_wheel.publish(hdfs, STORE, built)
    other = {**WANTED, "framework": "tensorflow"}
    assert share_wheel.fetch(hdfs, STORE, other, tmp_path / "second") is None


def test_a_wheel_without_its_record_is_none_yet(built: Path, tmp_path: Path) -> None:
    path = f"{STORE}/{built.name}"
    hdfs = Hdfs({f"{path}/horovod.whl": b"half"})
    assert share_wheel.fetch(hdfs, STORE, WANTED, tmp_path / "second") is None
    hdfs.files[f"{path}/build.json"] = b"[]"
    assert share_wheel.fetch(hdfs, STORE, WANTED, tmp_path / "second") is None


def test_a_damaged_wheel_is_an_error_and_leaves_nothing(built: Path, tmp_path: Path) -> None:
    hdfs, output = Hdfs(), tmp_path / "second"
    share_wheel.publish(hdfs, STORE, built)
    hdfs.files[f"{STORE}/{built.name}/horovod-0.28.1+torch.whl"] = b"half"
    with pytest.raises(share_wheel.NoWheel, match="damaged — delete"):
        share_wheel.fetch(hdfs, STORE, WANTED, output)
    assert not output.exists()


@pytest.mark.parametrize("name", ["", "../../etc/passwd", "/etc/passwd"])
def test_a_record_that_names_no_wheel_is_refused(built: Path, name: str) -> None:
    (built / "build.json").write_text(json.dumps({"wheel": name}))
    with pytest.raises(BadInput, match="names no wheel"):
        share_wheel.publish(Hdfs(), STORE, built)


@pytest.fixture
def hdfs(monkeypatch: pytest.MonkeyPatch) -> Hdfs:
    made = Hdfs()
    monkeypatch.setattr(share_wheel, "Hdfs", lambda rpc, http: made)
    return made


def call(*words: str) -> int:
    common = ["share-wheel", "--namenode-http=http://n:9870", f"hdfs://n:9000{STORE}"]
    return node.main([*common, *words])


def fetch(output: Path, since_s: float) -> int:
    local = str(datetime.fromtimestamp(since_s))  # as Ansible tells when a command has begun
    return call("fetch", f"--since={local}", f"--match={json.dumps(WANTED)}", "torch", str(output))


def test_the_command_publishes_and_fetches(hdfs, built, tmp_path, capsys):
    assert fetch(tmp_path, NOW_S) == 3
    assert "no wheel in hdfs://n:9000/mayfly/cache/horovod yet" in capsys.readouterr().err
    assert call("publish", str(built)) == 0
    assert call("publish", str(built)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["changed"] for line in lines] == [True, False]
    assert fetch(tmp_path, NOW_S) == 0
    assert Path(json.loads(capsys.readouterr().out)["wheel"]).is_file()


def test_a_failure_ends_the_waiting_unless_it_is_an_old_one(
    hdfs, built, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr("sys.stdin", io.StringIO("no C++ compiler — apt-get install g++\n"))
    assert call("fail", "torch") == 0
    assert fetch(tmp_path, NOW_S + 2) == 1
    assert "could not: no C++ compiler" in capsys.readouterr().err
    assert fetch(tmp_path, NOW_S + 10) == 3
    assert call("publish", str(built)) == 0
    assert fetch(tmp_path, NOW_S) == 0


def test_hdfs_out_of_reach_is_waited_for(hdfs, tmp_path, capsys, monkeypatch):
    def fails(path: str) -> list[FileInfo]:
        raise HdfsFailure("cannot reach HDFS at http://n:9870 — is it running?")

    monkeypatch.setattr(hdfs, "list_directory", fails)
    assert fetch(tmp_path, NOW_S) == 3
    assert "cannot reach HDFS" in capsys.readouterr().err
