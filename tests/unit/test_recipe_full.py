"""A node whose disk is full takes nothing, and does not use up what tasks may lose of nodes."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mayfly_train.recipe import attempt, dask_task
from mayfly_train.recipe import head as heads
from mayfly_train.recipe.attempt import Job, Node
from mayfly_train.recipe.document import Experiment, Hardware
from mayfly_train.recipe.engine import ENDED, STARTED, InProcessEngine, Member, Report
from mayfly_train.recipe.expand import Task
from mayfly_train.recipe.ledger import Ledger
from unit.recipe_fakes import Lab, head_on


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


@pytest.fixture
def worker(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> Node:
    """This process as a worker whose news stay in the queue; its disk is full of three files."""
    node = lab.node()
    monkeypatch.setattr(dask_task.Here, "node", node)
    monkeypatch.setattr(dask_task.Here, "news", queue.SimpleQueue())
    monkeypatch.setattr(dask_task, "REST_S", 0.0)

    def fake_full(directory: Path) -> bool:
        return len([path for path in directory.rglob("*.big") if path.is_file()]) >= 3

    monkeypatch.setattr(attempt, "_is_full", fake_full)
    return node


def run(script: str, name: str, node: Node) -> tuple[str, str]:
    """State and message of an attempt that a worker is handed."""
    task = Task("only", int(name[2:]), {}, [["sh", "-c", script]], {})
    dask_task.run_jobs([Job(name, task.to_json(), "", "", "r.json").to_json()])
    while (news := dask_task.Here.news.get())["kind"] != ENDED:
        pass
    return news["outcome"]["state"], news["outcome"].get("message", "")


def test_a_worker_takes_nothing_while_its_disk_is_full(worker: Node):
    (worker.scratch / "others").mkdir()
    for number in range(3):
        (worker.scratch / f"others/{number}.big").touch()
    back = ("cancelled", "not begun: the node's disk is full")
    assert [run("true", f"a-{n}", worker) for n in (1, 2)] == [back, back]
    assert worker.store.names("") == []
    (worker.scratch / "others/0.big").unlink()
    assert run("true", "a-3", worker)[0] == "done"


def test_what_a_task_has_filled_the_disk_with_goes_before_the_next(worker: Node):
    state, message = run("touch ../output/1.big 2.big 3.big; echo no room; exit 1", "a-1", worker)
    assert (state, message) == ("broken", "the node's disk is full: exit code 1")
    assert run("echo x > ../output/x", "a-2", worker)[0] == "done"
    assert worker.store.read("outputs/only/000002/a-2/x") == b"x\n"


class FakeBrokenEngine(InProcessEngine):
    """Its attempts are broken on nodes in turn; afterwards they end well."""

    def __init__(self, node: Node, nodes: Sequence[str], members: Sequence[str]) -> None:
        super().__init__(node)
        self._nodes = list(nodes)
        self._members = [Member(f"{name}.0-a1", 1, 1, 1 << 30, 0) for name in members]

    def submit(self, jobs: Sequence[Job], wanted: Hardware) -> None:
        for job in jobs:
            if not self._nodes:
                super().submit([job], wanted)
                continue
            node = f"{self._nodes.pop(0)}.0-a1"
            outcome = {"state": "broken", "attempt": job.attempt, "node": node, "message": "full"}
            self._news.put(Report(job.attempt, STARTED, node))
            self._news.put(Report(job.attempt, ENDED, node, outcome))

    def members(self) -> list[Member]:
        return self._members


@pytest.mark.parametrize(
    ("nodes", "members", "losses"),
    [
        (["n-1"] * 50, ["n-1", "n-2"], 1),
        (["n-1", "n-1", "n-2", "n-2", "n-1"], ["n-1", "n-2"], 3),
        (["n-1"] * 3, ["n-1"], 3),
    ],
    ids=["others are busy", "nodes in turn", "there are no others"],
)
def test_a_node_counts_once_in_a_row_while_others_are_busy(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, nodes: Any, members: Any, losses: int
):
    monkeypatch.setattr(heads, "TURN_S", 0.01)
    engine = FakeBrokenEngine(lab.node(), nodes, members)
    outcome, ledger = lab.work(lab.run(Experiment("only", ("true",))), engine)
    assert outcome == "succeeded"
    assert losses_of(ledger) == losses


def test_nodes_that_are_broken_in_turn_fail_a_task_for_good(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(heads, "TURN_S", 0.01)
    engine = FakeBrokenEngine(lab.node(), ["n-1", "n-2"] * 9, ["n-1", "n-2"])
    outcome, ledger = lab.work(lab.run(Experiment("only", ("true",), node_retries=4)), engine)
    assert outcome == "failed"
    assert losses_of(ledger) == 5


def losses_of(ledger: Ledger) -> int:
    row = ledger.row("only", 0)
    assert row is not None
    return row.node_losses


class FakeFullEngine(InProcessEngine):
    """Its one node hands everything back while its disk is full."""

    full = True

    def submit(self, jobs: Sequence[Job], wanted: Hardware) -> None:
        if not self.full:
            super().submit(jobs, wanted)
            return
        for job in jobs:
            about = {"attempt": job.attempt, "node": "n-1.0-a1"}
            outcome = {**about, "state": "cancelled", "message": f"not begun: {attempt.FULL}"}
            self._news.put(Report(job.attempt, ENDED, "n-1.0-a1", outcome))


def test_status_says_that_disks_are_full_until_a_task_ends_well(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(heads, "TURN_S", 0.01)
    engine = FakeFullEngine(lab.node())
    head = head_on(lab, engine, Experiment("only", ("true",)))
    for _ in range(2):
        head._turn()
    assert message_of(lab) == "n-1 takes nothing: the node's disk is full"
    engine.full = False
    for _ in range(100):
        head._turn()
    assert message_of(lab) == ""
    assert lab.ledger().experiments()[0]["state"] == "done"
    assert losses_of(lab.ledger()) == 0


def message_of(lab: Lab) -> str:
    return str(lab.ledger().experiments()[0]["message"])
