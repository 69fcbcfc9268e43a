"""The runtime's hdfs:// for fsspec: files that appear whole, and writes that outlive a DataNode.

That hdfs-native and torch.load take it is seen in tests/e2e/test_torch.py.
"""

from __future__ import annotations

import importlib.util
import io
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "roles/runtime/files/mayfly_hdfs.py"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    spec = importlib.util.spec_from_file_location("mayfly_hdfs", SCRIPT)
    assert spec and spec.loader
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    monkeypatch.setattr(loaded, "PAUSE_S", 0.0)
    return loaded


class Writer(io.BytesIO):
    def __init__(self, client: Client, path: str) -> None:
        super().__init__()
        self.client, self.path = client, path

    def close(self) -> None:
        if not self.closed:
            self.client.files[self.path] = self.getvalue()
        super().close()


class Client:
    """hdfs-native's client on a dictionary; the first `failures` writes fail."""

    def __init__(self, failures: int = 0) -> None:
        self.files: dict[str, bytes] = {"/m/step=1.ckpt": b"old"}
        self.failures = failures
        self.renamed: list[tuple[str, str]] = []

    def create(self, path: str, _options: Any) -> Writer:
        self.failures -= 1
        if self.failures >= 0:
            raise RuntimeError("could only be written to 0 of the 1 minReplication nodes")
        return Writer(self, path)

    def rename(self, source: str, target: str, overwrite: bool) -> None:
        assert overwrite
        self.files[target] = self.files.pop(source)
        self.renamed.append((source, target))

    def delete(self, path: str, _recursive: bool) -> bool:
        return self.files.pop(path, None) is not None


def test_a_file_appears_when_it_is_whole(module):
    client = Client()
    with module.WholeFile(client, "/m/step=1.ckpt", commits=True) as file:
        file.write(b"ne")
        file.write(b"w")
        assert client.files == {"/m/step=1.ckpt": b"old"}
    assert client.files == {"/m/step=1.ckpt": b"new"}
    ((source, _),) = client.renamed
    assert source.endswith(".part")


def test_an_error_while_writing_leaves_what_was_there(module):
    client = Client()
    with pytest.raises(ValueError), module.WholeFile(client, "/m/step=1.ckpt", True) as file:  # noqa: PT011
        file.write(b"half")
        raise ValueError
    assert client.files == {"/m/step=1.ckpt": b"old"}


def test_a_transaction_decides(module):
    client = Client()
    for end, there in (("commit", True), ("discard", False)):
        file = module.WholeFile(client, f"/m/{end}", commits=False)
        file.write(b"x")
        file.close()
        assert f"/m/{end}" not in client.files
        getattr(file, end)()
        assert (f"/m/{end}" in client.files) is there


def test_a_write_is_tried_again_until_the_namenode_knows(module, caplog):
    client = Client(failures=2)
    with module.WholeFile(client, "/m/x", commits=True) as file:
        file.write(b"x")
    assert client.files["/m/x"] == b"x"
    assert len(caplog.records) == 2


def test_it_gives_up_in_the_end(module, monkeypatch):
    monkeypatch.setattr(module, "PATIENCE_S", 0.0)
    client = Client(failures=100)
    file = module.WholeFile(client, "/m/x", commits=True)
    with pytest.raises(RuntimeError, match="minReplication"):
        file.close()
    assert set(client.files) == {"/m/step=1.ckpt"}
