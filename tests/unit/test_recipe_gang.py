"""Tasks on several nodes at once: they meet, start and end together. Commands are processes."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from mayfly_train.recipe import gang
from mayfly_train.recipe.document import Experiment, Hardware, Parameter
from mayfly_train.recipe.engine import InProcessEngine, Member, why_no_room
from mayfly_train.recipe.expand import Context, Expansion
from mayfly_train.recipe.gang import Gang
from unit.recipe_fakes import FakeLossyEngine, Lab

THREE = Hardware(nodes=3)


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    monkeypatch.setattr(gang, "LOOK_S", 0.02)
    return Lab(tmp_path)


def only(line: str, **more: object) -> Experiment:
    return Experiment("only", (line,), hardware=THREE, **more)  # type: ignore[arg-type]


def test_all_members_know_each_other(lab: Lab, tmp_path: Path):
    line = (
        f"sh -c 'echo $MASTER_ADDR $MASTER_PORT $NODE_RANK $RANK $NNODES $WORLD_SIZE >>"
        f" {tmp_path}/ran; echo $RANK > ../output/rank'"
    )
    outcome, ledger = lab.work(lab.run(only(line)), InProcessEngine(lab.node(), 3))
    assert outcome == "succeeded"
    ran = [each.split() for each in (tmp_path / "ran").read_text().splitlines()]
    assert sorted(each[2] for each in ran) == ["0", "1", "2"]
    assert all(each[2] == each[3] and each[4:] == ["3", "3"] for each in ran)
    assert len({tuple(each[:2]) for each in ran}) == 1 and ran[0][0] == "127.0.0.1"
    row = ledger.row("only", 0)
    assert row is not None and row.attempts == 1
    assert lab.store.read(f"outputs/only/000000/{row.accepted}/rank") == b"0\n"
    assert {each["state"] for each in ledger.attempts("only", 0)} == {"done"}
    assert len(ledger.attempts("only", 0)) == 3


def test_one_that_fails_ends_all_and_they_try_again_together(lab: Lab, tmp_path: Path):
    """Others would run for ever."""
    line = (
        f"sh -c 'echo $RANK >> {tmp_path}/ran; test -e {tmp_path}/second && exit 0;"
        f" test $RANK = 1 || exec sleep 600; while test $(wc -l < {tmp_path}/ran) -lt 3;"
        f" do sleep 0.05; done; touch {tmp_path}/second; exit 3'"
    )
    outcome, ledger = lab.work(lab.run(only(line)), InProcessEngine(lab.node(), 3))
    row = ledger.row("only", 0)
    assert outcome == "succeeded" and row is not None
    assert (row.failures, row.node_losses, row.attempts) == (1, 0, 2)
    assert sorted((tmp_path / "ran").read_text().split()) == ["0", "0", "1", "1", "2", "2"]
    states = sorted(each["state"] for each in ledger.attempts("only", 0))
    assert states == ["cancelled", "cancelled", "done", "done", "done", "failed"]


def test_a_lost_member_is_the_nodes_fault_and_all_try_again(lab: Lab, tmp_path: Path):
    """Its like never came: the others do not wait for it."""
    engine = FakeLossyEngine(lab.node(), lost=[2])
    engine._member = Member("node-0", 3, 8, 8 << 30, 0, together=3)
    engine._pool._max_workers = 3
    outcome, ledger = lab.work(lab.run(only(f"sh -c 'echo >> {tmp_path}/ran'")), engine)
    row = ledger.row("only", 0)
    assert outcome == "succeeded" and row is not None
    assert (row.failures, row.node_losses) == (0, 1)
    assert len((tmp_path / "ran").read_text().splitlines()) == 3


def test_gangs_never_wait_for_each_others_slots(lab: Lab):
    """Of two on three slots: a member of each could be left waiting for its other for ever."""
    number = Parameter("n", "integers", low=0, high=5)
    both = [
        Experiment(name, ("true {{n}}",), (number,), hardware=Hardware(nodes=2)) for name in "ab"
    ]
    done: list[str] = []

    def work() -> None:
        done.append(lab.work(lab.run(*both), InProcessEngine(lab.node(), 3))[0])

    worker = threading.Thread(target=work, daemon=True)
    worker.start()
    worker.join(120)
    assert done == ["succeeded"]


def test_too_few_nodes_are_named():
    members = [Member("a", 1, 1, 1, 0), Member("b", 1, 1, 1, 0)]
    assert why_no_room(members, THREE) == "waits for 3 nodes at once: there is room on 2"
    assert why_no_room(members, Hardware(nodes=2)) == ""


def test_a_node_takes_one_member():
    members = [Member("a", 4, 4, 1, 0), Member("b", 4, 4, 1, 0)]
    assert why_no_room(members, THREE) == "waits for 3 nodes at once: there is room on 2"


def test_every_node_of_a_task_is_known_to_be_busy(lab: Lab):
    ledger = lab.ledger()
    (task,) = [Expansion(only("true"), Context("", {}, {})).task(0)]
    ledger.freeze([task])
    for rank in range(3):
        ledger.submit(task, gang.member("a", rank))
        ledger.start(gang.member("a", rank), f"worker-{rank}.0-x", counts=rank == 0)
    assert ledger.running_on("only") == {f"worker-{rank}.0-x": 1 for rank in range(3)}
    ledger.end("a.1", {"state": "done"})
    assert set(ledger.running_on("only")) == {"worker-0.0-x", "worker-2.0-x"}


def test_a_marker_that_a_member_finds_is_the_tasks():
    found = Gang({"a", "a.1"}, "a")
    marker = {"state": "done", "attempt": "earlier"}
    assert not found.end("a.1", marker, well=True)
    assert found.end("a", {"state": "lost", "attempt": "a"}, well=False) is False
    assert found.verdict() == marker


def test_the_first_that_went_wrong_is_blamed():
    found = Gang({"a", "a.1", "a.2"}, "a")
    assert found.end("a.2", {"state": "failed", "attempt": "a.2"}, well=False)
    assert not found.end("a", {"state": "cancelled", "attempt": "a"}, well=False)
    assert not found.end("a.1", {"state": "done", "attempt": "a.1"}, well=True)
    assert found.verdict()["state"] == "failed"
