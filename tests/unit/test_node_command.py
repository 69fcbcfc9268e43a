from __future__ import annotations

import subprocess
import sys

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
    for name in sorted(set(node.COMMANDS) - {"convert"}):
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


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setitem(node.COMMANDS, "convert", ("mayfly_train_nowhere", "help"))
    with pytest.raises(SystemExit) as ended:
        node.main(["convert"])
    assert ended.value.code == (
        "mayfly-node: convert needs the Python package mayfly_train_nowhere — install it"
    )
