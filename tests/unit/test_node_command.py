from __future__ import annotations

import io
import subprocess
import sys
from contextlib import nullcontext

import pytest

from mayfly_train import __main__ as node
from mayfly_train import hdfs
from mayfly_train.hdfs import Hdfs, HdfsFailure


@pytest.mark.parametrize("name", node.COMMANDS)
def test_every_subcommand_has_a_help_page(name, capsys):
    with pytest.raises(SystemExit) as ended:
        node.main([name, "--help"])
    assert ended.value.code == 0
    assert f"mayfly-node {name}" in capsys.readouterr().out


def test_a_library_that_is_missing_breaks_only_what_needs_it(tmp_path):
    for name in ("PIL", "numpy", "google_crc32c", "tensorflow"):
        (tmp_path / f"{name}.py").write_text(f"raise ImportError({name!r})\n")
    script = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from mayfly_train.__main__ import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    for name in sorted(set(node.COMMANDS) - {"convert", "preprocess"}):
        done = subprocess.run(
            [sys.executable, "-c", script, name, "--help"], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr


def test_an_error_is_one_line_and_its_exit_code(capsys, tmp_path):
    assert node.main(["verify-manifest", str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        f"mayfly-node: no manifest.json in {tmp_path} — name another directory\n"
    )
    assert node.main(["--debug", "verify-manifest", str(tmp_path)]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_an_hdfs_address_is_taken_apart():
    assert hdfs.split_url("hdfs://n:9000/mayfly/data/") == ("hdfs://n:9000", "/mayfly/data")
    for url in ("hdfs://n:9000", "/mayfly/data", "s3://b/x", "hdfs:///x"):
        with pytest.raises(HdfsFailure, match="not an HDFS address"):
            hdfs.split_url(url)


def test_an_hdfs_that_is_not_there_is_named():
    store = Hdfs("hdfs://127.0.0.1:1", "http://127.0.0.1:2", timeout_s=1)
    with pytest.raises(HdfsFailure, match="cannot reach HDFS at http://127.0.0.1:2 for /x"):
        store.status("/x")


def test_an_error_of_the_body_is_not_taken_for_one_of_hdfs():
    def body():
        yield b"x"
        raise KeyError("the body's own")

    store = Hdfs("hdfs://127.0.0.1:1", "http://127.0.0.1:2", timeout_s=1)
    store.native = None

    class Web:
        def write(self, path, data, overwrite):
            try:
                list(data)
            except KeyError as error:
                raise OSError("wrapped") from error

    store.web = Web()
    with pytest.raises(KeyError, match="the body's own"):
        store.write_chunks("/x", body(), web=True)


class NameNode:
    """A stand-in for hdfs-native's client of a NameNode that has these files."""

    def __init__(self, *files):
        self.files, self.answers = set(files), True

    def create(self, path, options):
        assert not options.overwrite
        if path in self.files:
            raise RuntimeError("AlreadyBeingCreatedException")
        self._change(added=path)
        return self

    def rename(self, source, target, overwrite):
        assert not overwrite
        if target in self.files or source not in self.files:
            raise FileExistsError(target)
        self.files.remove(source)
        self._change(added=target)

    def _change(self, added):
        self.files.add(added)
        if not self.answers:
            raise OSError("the connection broke")

    def close(self):
        pass


@pytest.fixture
def namenode(monkeypatch):
    """A store whose NameNode has the file /a."""
    store = Hdfs("hdfs://127.0.0.1:1", "http://127.0.0.1:2", timeout_s=1)
    store.native = NameNode("/a")
    monkeypatch.setattr(store, "status", lambda path: path if path in store.native.files else None)
    return store


def test_only_one_creates_a_file_of_a_name(namenode):
    assert namenode.create_new("/b")
    assert not namenode.create_new("/b")
    assert not namenode.create_new("/a")


def test_a_file_is_not_renamed_to_a_name_that_is_taken(namenode):
    assert namenode.rename_new("/a", "/b")
    namenode.native.files.add("/c")
    assert not namenode.rename_new("/c", "/b")
    assert namenode.native.files == {"/b", "/c"}
    with pytest.raises(HdfsFailure):
        namenode.rename_new("/nothing", "/d")


def test_a_rename_whose_answer_was_lost_has_happened(namenode):
    namenode.native.answers = False
    assert namenode.rename_new("/a", "/b")


def test_an_error_before_anything_was_created_is_told(namenode, monkeypatch):
    monkeypatch.setattr(namenode.native, "create", lambda *_: (_ for _ in ()).throw(OSError("no")))
    with pytest.raises(HdfsFailure, match="failed for /b: no"):
        namenode.create_new("/b")


class Ranges:
    """A file of ten bytes for both of the libraries."""

    def read(self, path, offset=0, length=None):
        return nullcontext(io.BytesIO(b"0123456789"[offset : offset + (length or 0)]))


def test_a_range_is_read_whole_or_refused(namenode):
    namenode.web = Ranges()
    assert namenode.read_range("/x", 3, 4, web=True) == b"3456"
    with pytest.raises(HdfsFailure, match="HDFS has 2 of 4 bytes at 8 of /x"):
        namenode.read_range("/x", 8, 4, web=True)


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setitem(node.COMMANDS, "convert", ("mayfly_train_nowhere", "help"))
    with pytest.raises(SystemExit) as ended:
        node.main(["convert"])
    assert ended.value.code == (
        "mayfly-node: convert needs the Python package mayfly_train_nowhere — install it"
    )
