"""One node's wheel reaches the others through HDFS, whole or not at all."""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
from datetime import datetime
from pathlib import Path

import pytest
from tests.unit.data_fakes import FakeHdfs

from mayfly_train.hdfs import FileInfo, HdfsFailure

FILES = Path(__file__).resolve().parents[2] / "roles/horovod/files"
STORE = "/mayfly/cache/horovod"
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
def modules(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(FILES))
    for name in ("build_wheel", "share_wheel"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module("share_wheel"), importlib.import_module("build_wheel")
    for name in ("build_wheel", "share_wheel"):
        sys.modules.pop(name, None)


@pytest.fixture
def built(modules, tmp_path):
    """A wheel as build_wheel leaves it, and what it is for."""
    _, build_wheel = modules
    wanted = build_wheel.Wanted("0.28.1", 1, "torch", "2.13.0+cpu", "3.11", "x86_64")
    wheel = tmp_path / "first" / wanted.key("gcc 12.2.0") / "horovod-0.28.1+torch.whl"
    wheel.parent.mkdir(parents=True)
    wheel.write_bytes(b"wheel" * 1000)
    record = {**dataclasses.asdict(wanted), "wheel": wheel.name}
    record["sha256"] = build_wheel.sha256(wheel)
    (wheel.parent / "build.json").write_text(json.dumps(record))
    return wheel, wanted


def test_what_one_publishes_another_fetches(modules, built, tmp_path):
    share_wheel, build_wheel = modules
    wheel, wanted = built
    hdfs, output = Hdfs(), tmp_path / "second"
    assert share_wheel.fetch(hdfs, STORE, wanted, output) is None
    assert share_wheel.publish(hdfs, STORE, wheel)
    assert not share_wheel.publish(hdfs, STORE, wheel)
    got = share_wheel.fetch(hdfs, STORE, wanted, output)
    assert got.read_bytes() == wheel.read_bytes()
    assert build_wheel.find(output, wanted) == got
    assert [path.name for path in output.iterdir()] == [wheel.parent.name]


def test_a_wheel_for_another_framework_is_left(modules, built, tmp_path):
    share_wheel, _ = modules
    wheel, wanted = built
    hdfs = Hdfs({f"{STORE}/failed-tensorflow.txt": b"why"})
    share_wheel.publish(hdfs, STORE, wheel)
    other = dataclasses.replace(wanted, framework="tensorflow", framework_version="2.15.1")
    assert share_wheel.fetch(hdfs, STORE, other, tmp_path / "second") is None


def test_a_wheel_without_its_record_is_none_yet(modules, built, tmp_path):
    share_wheel, _ = modules
    wheel, wanted = built
    hdfs = Hdfs({f"{STORE}/{wheel.parent.name}/{wheel.name}": b"half"})
    assert share_wheel.fetch(hdfs, STORE, wanted, tmp_path / "second") is None


def test_a_damaged_wheel_is_an_error_and_leaves_nothing(modules, built, tmp_path):
    share_wheel, build_wheel = modules
    wheel, wanted = built
    hdfs, output = Hdfs(), tmp_path / "second"
    share_wheel.publish(hdfs, STORE, wheel)
    hdfs.files[f"{STORE}/{wheel.parent.name}/{wheel.name}"] = b"half"
    with pytest.raises(build_wheel.BuildError, match="damaged"):
        share_wheel.fetch(hdfs, STORE, wanted, output)
    assert list(output.iterdir()) == []


@pytest.fixture
def run(modules, built, monkeypatch, tmp_path):
    share_wheel, _ = modules
    hdfs = Hdfs()
    monkeypatch.setattr(share_wheel, "Hdfs", lambda rpc, http: hdfs)
    monkeypatch.setattr(share_wheel, "describe", lambda python, framework: built[1])

    def call(*words: str) -> int:
        common = ["--namenode=hdfs://n:9000", "--namenode-http=http://n:9870", f"--store={STORE}"]
        return share_wheel.main([*common, *words])

    return call, hdfs


def fetch_words(tmp_path: Path, since: float) -> list[str]:
    local = str(datetime.fromtimestamp(since))  # as Ansible tells when a command has begun
    return ["fetch", f"--since={local}", "/x/python", "torch", str(tmp_path / "second")]


def test_the_command_publishes_and_fetches(run, built, tmp_path, capsys):
    call, hdfs = run
    wheel, _ = built
    assert call(*fetch_words(tmp_path, NOW_S)) == 3
    assert call("publish", str(wheel)) == 0
    assert call("publish", str(wheel)) == 0
    assert capsys.readouterr().out.splitlines() == ["changed", "unchanged"]
    assert call(*fetch_words(tmp_path, NOW_S)) == 0
    assert Path(capsys.readouterr().out.strip()).read_bytes() == wheel.read_bytes()


def test_a_failure_ends_the_waiting_unless_it_is_an_old_one(
    run, built, tmp_path, capsys, monkeypatch
):
    call, _ = run
    monkeypatch.setattr("sys.stdin", StringInput("no C++ compiler — apt-get install g++\n"))
    assert call("fail", "torch") == 0
    assert call(*fetch_words(tmp_path, NOW_S + 5)) == 1
    assert "could not build the wheel: no C++ compiler" in capsys.readouterr().err
    assert call(*fetch_words(tmp_path, NOW_S + 3600)) == 3
    assert call("publish", str(built[0])) == 0
    assert call(*fetch_words(tmp_path, NOW_S)) == 0


def test_hdfs_out_of_reach_is_waited_for(run, tmp_path, capsys, monkeypatch):
    call, hdfs = run

    def fails(path: str) -> list[FileInfo]:
        raise HdfsFailure("cannot reach HDFS at http://n:9870 — is it running?")

    monkeypatch.setattr(hdfs, "list_directory", fails)
    assert call(*fetch_words(tmp_path, NOW_S)) == 3
    assert "cannot reach HDFS" in capsys.readouterr().err


class StringInput:
    """Standard input with this text."""

    def __init__(self, text: str) -> None:
        self.text = text

    def read(self) -> str:
        return self.text
