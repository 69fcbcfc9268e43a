"""A store that is away for some minutes: the head goes on, and no task is lost that has ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mayfly_train.errors import NodeError
from mayfly_train.recipe import attempt, lock, patience
from mayfly_train.recipe import head as heads
from mayfly_train.recipe.attempt import Job
from mayfly_train.recipe.document import Experiment, Parameter
from mayfly_train.recipe.engine import InProcessEngine
from mayfly_train.recipe.expand import Task
from mayfly_train.recipe.head import Head
from mayfly_train.recipe.patience import Patience, PatientStore
from mayfly_train.recipe.store import read_json
from mayfly_train.s3 import NotFound, S3UserError
from unit.recipe_fakes import FakeAwayStore, Lab

KINDS = ("read", "write", "create", "upload", "download", "names")
FOR_EVER = 1 << 30


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is tried again soon, and the head looks in every turn."""
    monkeypatch.setattr(patience, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(patience, "LONGEST_PAUSE_S", 0.02)
    monkeypatch.setattr(heads, "LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(heads, "TURN_S", 0.01)
    monkeypatch.setattr(lock, "EVERY_S", 0.0)


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


# --- the head ---


class FakeOutage(Head):
    """A head whose store is away once it has begun, or once tasks are out."""

    store: Any
    failures = 3
    at_the_start = True

    def _begin(self) -> None:
        super()._begin()
        if self.at_the_start:
            self.store.failures = self.failures

    def _look(self) -> None:
        if self._out and not self.at_the_start and not self.store.failed:
            self.store.failures = self.failures
        super()._look()


@pytest.fixture
def outage(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> type[FakeOutage]:
    """Its workers reach the store all the time."""
    engine_node = lab.node()
    monkeypatch.setattr(lab, "node", lambda *_: engine_node)
    monkeypatch.setattr(FakeOutage, "store", FakeAwayStore(lab.store, *KINDS), raising=False)
    lab.store = FakeOutage.store
    return FakeOutage


def work(lab: Lab, head: type[Head], *lines: str) -> str:
    engine = InProcessEngine(lab.node())
    only = Experiment("only", lines, (Parameter("n", "integers", low=0, high=3),))
    try:
        return head(lab.run(only), lab.ledger(), engine).work()
    finally:
        engine.close()


@pytest.mark.parametrize("at_the_start", [True, False])
def test_a_store_that_is_away_for_a_while_does_not_end_the_run(
    lab: Lab, outage: type[FakeOutage], at_the_start: bool, monkeypatch, capsys
):
    monkeypatch.setattr(outage, "at_the_start", at_the_start)
    assert work(lab, outage, "sleep 0.1") == "succeeded"
    assert outage.store.failed == 3
    assert lab.ledger().states("only") == {"done": 4}
    assert {row.attempts for row in lab.ledger().rows("only")} == {1}
    said = [line for line in capsys.readouterr().err.splitlines() if "store" in line]
    assert said == [
        "mayfly: the store is asked again for 10 minutes: the store is away",
        "mayfly: the store answers again",
    ]


def test_a_store_that_stays_away_ends_the_run_and_its_tasks_wait(
    lab: Lab, outage: type[FakeOutage], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(outage, "at_the_start", False)
    monkeypatch.setattr(outage, "failures", FOR_EVER)
    monkeypatch.setattr(patience, "PATIENCE_S", 0.1)
    with pytest.raises(NodeError, match="the store is away"):
        work(lab, outage, "sleep 600")
    assert lab.ledger().states("only") == {"waiting": 4}


def test_an_interrupt_is_heard_while_the_store_is_away(
    lab: Lab, outage: type[FakeOutage], monkeypatch: pytest.MonkeyPatch
):
    def fake_interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(outage, "at_the_start", False)
    monkeypatch.setattr(outage, "failures", FOR_EVER)
    monkeypatch.setattr(Patience, "_pause", fake_interrupt)
    with pytest.raises(KeyboardInterrupt):
        work(lab, outage, "sleep 600")
    assert lab.ledger().states("only") == {"waiting": 4}


def test_a_head_that_begins_waits_for_no_store(
    lab: Lab, outage: type[FakeOutage], monkeypatch: pytest.MonkeyPatch
):
    run = lab.run(Experiment("only", ("true",)))
    outage.store.failures = FOR_EVER
    with pytest.raises(NodeError, match="the store is away"):
        Head(run, lab.ledger(), InProcessEngine(lab.node())).work()


# --- attempts ---


def job(script: str = "echo hi; echo x > ../output/x", **more: Any) -> Job:
    task = Task("train", 7, {}, [["sh", "-c", script]], {})
    return Job("a-1", task.to_json(), "", "data", "result.json", **more)


@pytest.mark.parametrize("kind", ["read", "write", "upload", "create"])
def test_a_task_that_ends_while_the_store_is_away_is_not_lost(lab: Lab, kind: str):
    """Its marker is looked for, its logs shipped, its output stored, and the marker written."""
    true, away = lab.store, FakeAwayStore(lab.store, kind)
    lab.store, away.failures = away, 3  # type: ignore[assignment]
    outcome = attempt.run(job(), lab.node())
    assert outcome["state"] == "done" and away.failed == 3
    assert read_json(true, "done/train/000007.json") == outcome
    assert true.read("logs/train/000007/a-1/stdout/000001") == b"hi\n"
    assert true.read("outputs/train/000007/a-1/x") == b"x\n"


def test_inputs_are_waited_for(lab: Lab):
    lab.store.write("outputs/prepare/000001/a-9/model", b"weights")
    away = FakeAwayStore(lab.store, "download")
    lab.store, away.failures = away, 3  # type: ignore[assignment]
    one = job("cat ../inputs/prepare/000001/model")
    one = Job(**{**one.to_json(), "task": {**one.task, "inputs": ["prepare/000001/a-9"]}})
    assert attempt.run(one, lab.node())["state"] == "done"
    assert away.failed == 3


def test_a_timeout_is_one_while_the_store_is_away(lab: Lab):
    away = FakeAwayStore(lab.store, "write")
    lab.store, away.failures = away, 3  # type: ignore[assignment]
    outcome = attempt.run(job("echo hi; exec sleep 600", timeout_s=1), lab.node())
    assert (outcome["state"], outcome["message"]) == ("failed", "took longer than 1 s")
    assert away.failed == 3


@pytest.mark.parametrize(("how", "state"), [("cancelled", "cancelled"), ("closing", "broken")])
@pytest.mark.parametrize("kind", ["write", "upload", "create"])
def test_an_attempt_is_ended_while_it_waits_for_the_store(
    lab: Lab, how: str, state: str, kind: str
):
    away = FakeAwayStore(lab.store, kind)
    lab.store, away.failures = away, FOR_EVER  # type: ignore[assignment]
    node = lab.node()

    def fake_end() -> None:
        if away.failed == 3:
            node.cancelled.add("a-1") if how == "cancelled" else node.closing.set()

    away.when_failed = fake_end
    assert attempt.run(job(), node)["state"] == state


@pytest.mark.parametrize("error", [NodeError("away"), S3UserError("S3 access denied")])
def test_a_store_that_takes_nothing_for_long_is_not_the_commands_fault(
    lab: Lab, error: NodeError, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(patience, "PATIENCE_S", 0.1)
    away = FakeAwayStore(lab.store, "upload", error=error)
    lab.store, away.failures = away, FOR_EVER  # type: ignore[assignment]
    outcome = attempt.run(job(), lab.node())
    assert (outcome["state"], outcome["message"]) == ("broken", str(error))
    assert away.failed > 1


# --- patience itself ---


def test_pauses_grow_up_to_a_bound(monkeypatch: pytest.MonkeyPatch, lab: Lab):
    pauses: list[float] = []
    monkeypatch.setattr(patience, "FIRST_PAUSE_S", 0.5)
    monkeypatch.setattr(patience, "LONGEST_PAUSE_S", 15.0)
    monkeypatch.setattr(patience.random, "uniform", lambda _, most: most)
    monkeypatch.setattr(Patience, "_pause", lambda _, seconds: pauses.append(seconds))
    away = FakeAwayStore(lab.store, "read")
    away.failures = 8
    assert PatientStore(away, Patience()).read("nothing") is None  # type: ignore[arg-type]
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 15.0, 15.0]


def test_nobody_waits_for_what_is_not_there(lab: Lab, tmp_path: Path):
    store = PatientStore(lab.store, Patience())
    with pytest.raises(NodeError, match="No such file"):
        store.download("nothing", tmp_path / "file")
    away = FakeAwayStore(lab.store, "download", error=NotFound("nothing there"))
    away.failures = FOR_EVER
    with pytest.raises(NotFound):
        PatientStore(away, Patience()).download("x", tmp_path / "file")  # type: ignore[arg-type]


def test_a_marker_whose_answer_was_lost_is_our_own(lab: Lab):
    """The store has written it, and nobody heard so: the second try finds it."""
    create, lost = lab.store.create, [1]

    def fake_create(name: str, data: bytes) -> bool:
        done = create(name, data)
        if lost and lost.pop():
            raise NodeError("the connection was cut")
        return done

    lab.store.create = fake_create  # type: ignore[method-assign]
    outcome = attempt.run(job(), lab.node())
    assert outcome["state"] == "done" and outcome["attempt"] == "a-1"
