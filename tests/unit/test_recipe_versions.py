"""Engines that differ between head and node, and nodes that cannot run anything."""

from __future__ import annotations

import queue
import subprocess
import sys
from pathlib import Path

import pytest

from mayfly_train.errors import BadInput
from mayfly_train.recipe import dask_task, names, versions
from mayfly_train.recipe.attempt import Job, Node
from mayfly_train.recipe.engine import ENDED
from mayfly_train.recipe.expand import Task
from mayfly_train.recipe.store import DirectoryStore, to_bytes


def test_the_same_versions_are_fine(tmp_path: Path):
    store = DirectoryStore(tmp_path)
    versions.require_same(store, "node-1")  # a head that has told nothing yet
    versions.publish(store)
    versions.require_same(store, "node-1")


def test_every_difference_is_named(tmp_path: Path):
    store = DirectoryStore(tmp_path)
    store.write(names.ENGINE, to_bytes({**versions.here(), "dask": "1.0", "python": "3.9"}))
    own = versions.here()
    with pytest.raises(BadInput) as caught:
        versions.require_same(store, "node-1")
    assert f"node node-1 has dask {own['dask']}, and the head 1.0" in str(caught.value)
    assert f"python {own['python']}, and the head 3.9" in str(caught.value)


def test_a_worker_of_another_version_does_not_start(tmp_path: Path):
    store = DirectoryStore(tmp_path / "store")
    store.write(names.ENGINE, to_bytes({**versions.here(), "distributed": "1.0"}))
    words = ["--scheduler", "tls://127.0.0.1:1", "--host", "127.0.0.1", "--tls", str(tmp_path)]
    words += ["--store", store.address, "--scratch", str(tmp_path / "scratch"), "--name", "node-1"]
    done = subprocess.run(
        [sys.executable, "-m", "mayfly_train.recipe.dask_worker", *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 2
    assert "node node-1 has distributed" in done.stderr


def test_a_node_that_fails_by_itself_rests_longer_each_time(monkeypatch: pytest.MonkeyPatch):
    class FakeNode:
        """Records how long it was told to wait."""

        def __init__(self) -> None:
            self.closing = self
            self.waited: list[float] = []

        def wait(self, seconds: float) -> None:
            self.waited.append(seconds)

    node = FakeNode()
    monkeypatch.setattr(dask_task.Here, "node", node)
    monkeypatch.setattr(dask_task.Here, "broken", 0)
    for broken in (True, True, False, True, *[True] * 9):
        dask_task.rest(broken)
    assert node.waited[:3] == [0.5, 1.0, 0.5]
    assert node.waited[-1] == dask_task.MOST_REST_S


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    """This process as a worker whose news stay in the queue."""
    node = Node("node-1", tmp_path / "node", DirectoryStore(tmp_path / "store"))
    monkeypatch.setattr(dask_task.Here, "node", node)
    monkeypatch.setattr(dask_task.Here, "news", queue.SimpleQueue())
    monkeypatch.setattr(dask_task, "REST_S", 0.0)
    return node


def ends() -> list[tuple[str, str]]:
    found = []
    while not dask_task.Here.news.empty():
        news = dask_task.Here.news.get()
        if news["kind"] == ENDED:
            found.append((news["attempt"], news["outcome"]["state"]))
    return found


def jobs(source: str = "") -> list[dict[str, object]]:
    tasks = [Task("only", n, {}, [["true"]], {}) for n in range(3)]
    return [Job(f"a-{t.number}", t.to_json(), source, "", "r.json").to_json() for t in tasks]


def test_what_a_broken_node_has_not_begun_goes_back_at_once(worker: Node):
    dask_task.run_jobs(jobs(source="0" * 64))  # which is not in the store
    assert ends() == [("a-0", "broken"), ("a-1", "cancelled"), ("a-2", "cancelled")]


def test_a_worker_that_ends_begins_nothing(worker: Node):
    worker.closing.set()
    dask_task.run_jobs(jobs())
    assert ends() == [(f"a-{n}", "cancelled") for n in range(3)]
    assert worker.store.names("") == []
