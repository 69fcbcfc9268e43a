"""The head: order, retries, markers, resuming, searches. Commands are real processes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mayfly_train.errors import BadInput, NodeError
from mayfly_train.recipe import head as heads
from mayfly_train.recipe import stop
from mayfly_train.recipe.attempt import Job
from mayfly_train.recipe.document import Experiment, Hardware, Parameter, Search
from mayfly_train.recipe.engine import ENDED, LOST, InProcessEngine, Member, Report, why_no_room
from mayfly_train.recipe.head import Head
from mayfly_train.recipe.ledger import RUNNING, WAITING, Ledger
from mayfly_train.recipe.lock import Lease
from mayfly_train.recipe.store import read_json, to_bytes
from unit.recipe_fakes import FakeLossyEngine, Lab, head_on


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


def listed(name: str, *values: object) -> Parameter:
    return Parameter(name, "values", values=values)


def numbered(count: int) -> Parameter:
    return Parameter("n", "integers", low=0, high=count - 1)


def states(ledger: Ledger) -> dict[str, str]:
    return {each["name"]: each["state"] for each in ledger.experiments()}


def runs(path: Path) -> list[str]:
    return sorted(path.read_text().split()) if path.exists() else []


def appending(path: Path, count: int = 6, **more: object) -> Experiment:
    """Tasks that write their number into a file, each a whole line at once."""
    line = f"sh -c 'echo $0 >> {path}' {{{{n}}}}"
    return Experiment("only", (line,), (numbered(count),), **more)  # type: ignore[arg-type]


def taking(path: Path) -> str:
    """A command that takes the lease over, and renews it as a head does: the one that had it may
    just have read its own, and then writes that over the other's."""
    (path / "other.json").write_text('{"id": 1, "host": "elsewhere", "beat": 0}')
    take = f"cp {path}/other.json {path}/new && mv {path}/new {path}/store/head.json"
    return f"sh -c 'for _ in $(seq 300); do {take}; sleep 0.1; done'"


def test_every_task_of_a_product_runs_once(lab: Lab, tmp_path: Path):
    outcome, ledger = lab.work(lab.run(appending(tmp_path / "ran")))
    assert outcome == "succeeded"
    assert runs(tmp_path / "ran") == [str(n) for n in range(6)]
    assert ledger.states("only") == {"done": 6}
    assert len(lab.store.names("done/only/")) == 6


def test_experiments_wait_for_what_they_need(lab: Lab, tmp_path: Path):
    line = f"sh -c 'cat {tmp_path}/ran > ../output/seen'"
    after = Experiment("after", (line,), needs=("only",))
    outcome, ledger = lab.work(lab.run(appending(tmp_path / "ran"), after))
    assert outcome == "succeeded"
    row = ledger.row("after", 0)
    assert row is not None
    seen = lab.store.read(f"outputs/after/000000/{row.accepted}/seen")
    assert seen is not None and len(seen.split()) == 6


def test_the_best_output_feeds_the_next(lab: Lab):
    line = 'sh -c \'echo $0 > ../output/model; echo "{\\"acc\\": $0}"\' {{x}}'
    search = Search(objective="acc", direction="maximize")
    train = Experiment("train", (line,), (listed("x", 2, 9, 4),), search=search)
    infer = Experiment("infer", ("cp {{train.best.output}}/model {{output}}/m",), needs=("train",))
    every = Experiment(
        "every",
        ("sh -c 'cat $0/*/model > $1/all' {{train.all.output}} {{output}}",),
        needs=("train",),
    )
    outcome, ledger = lab.work(lab.run(train, infer, every))
    assert outcome == "succeeded"
    (name,) = list(lab.store.names("outputs/infer/"))
    assert lab.store.read(name) == b"9\n"
    (name,) = list(lab.store.names("outputs/every/"))
    assert lab.store.read(name) == b"2\n9\n4\n"


def test_a_glob_is_looked_up_when_its_turn_comes(lab: Lab):
    make = Experiment(
        "make", ("sh -c 'mkdir -p $0/in; echo > $0/in/$1' {{data}} {{n}}",), (numbered(3),)
    )
    globbed = Parameter("file", "glob", pattern="{{data}}/in/*")
    read = Experiment("read", ("test -f {{file}}",), (globbed,), needs=("make",))
    outcome, ledger = lab.work(lab.run(make, read))
    assert outcome == "succeeded"
    assert ledger.states("read") == {"done": 3}


def test_a_glob_that_matches_nothing_ends_the_run(lab: Lab):
    globbed = Parameter("file", "glob", pattern="{{data}}/nothing/*")
    with pytest.raises(BadInput, match="read.file: nothing matches"):
        lab.work(lab.run(Experiment("read", ("cat {{file}}",), (globbed,))))


def test_a_file_whose_name_is_not_utf_8_is_named(lab: Lab):
    data = lab.path / "store/data"
    data.mkdir(parents=True)
    Path(os.fsdecode(bytes(data) + b"/caf\xe9.jpg")).touch()
    globbed = Parameter("file", "glob", pattern="{{data}}/*")
    with pytest.raises(BadInput, match=r"read.file: .* not UTF-8: '.*caf\\udce9.jpg' — rename it"):
        lab.work(lab.run(Experiment("read", ("cat {{file}}",), (globbed,))))


def test_a_failed_command_is_tried_again_with_the_same_arguments(lab: Lab, tmp_path: Path):
    line = f"sh -c 'echo $0 >> {tmp_path}/ran; test $(wc -l < {tmp_path}/ran) -ge 3' {{{{x}}}}"
    draw = Parameter("x", "uniform", low=0, high=1)
    run = lab.run(Experiment("only", (line,), (draw,), samples=1, task_retries=2))
    outcome, ledger = lab.work(run)
    row = ledger.row("only", 0)
    assert outcome == "succeeded" and row is not None
    assert (row.failures, row.node_losses, row.attempts) == (2, 0, 3)
    assert len(set(runs(tmp_path / "ran"))) == 1


def test_a_task_that_fails_for_good_fails_what_needs_it(lab: Lab):
    bad = Experiment("bad", ("test {{n}} = 0",), (numbered(2),), task_retries=1)
    after = Experiment("after", ("true",), needs=("bad",))
    beside = Experiment("beside", ("true",))
    outcome, ledger = lab.work(lab.run(bad, after, beside))
    assert outcome == "failed"
    assert states(ledger) == {"bad": "failed", "after": "skipped", "beside": "done"}
    assert ledger.states("bad") == {"done": 1, "failed": 1}
    row = ledger.row("bad", 1)
    assert row is not None and row.failures == 2 and row.exit_code == 1


def test_a_search_goes_on_without_its_failed_trials(lab: Lab):
    line = 'sh -c \'test $0 != 1 && echo "{\\"acc\\": $0}"\' {{n}}'
    search = Search(objective="acc")
    train = Experiment("train", (line,), (numbered(3),), search=search, task_retries=0)
    after = Experiment("after", ("test -d {{train.best.output}}",), needs=("train",))
    outcome, ledger = lab.work(lab.run(train, after))
    assert outcome == "succeeded"
    assert ledger.experiments()[0]["message"] == "1 of 3 tasks failed, train/000001: exit code 1"


def test_an_objective_that_nobody_reports(lab: Lab):
    only = Experiment("only", ("true",), (), search=Search(objective="accuracy"))
    outcome, ledger = lab.work(lab.run(only))
    assert outcome == "failed"
    assert ledger.experiments()[0]["message"] == "no task reported 'accuracy' as a number"


def test_lost_nodes_are_not_the_tasks_fault(lab: Lab, tmp_path: Path):
    engine = FakeLossyEngine(lab.node(), lost=[1, 2, 3, 7])
    outcome, ledger = lab.work(lab.run(appending(tmp_path / "ran", task_retries=0)), engine)
    assert outcome == "succeeded"
    assert runs(tmp_path / "ran") == [str(n) for n in range(6)]
    rows = list(ledger.rows("only"))
    assert sum(row.node_losses for row in rows) == 4
    assert sum(row.failures for row in rows) == 0
    assert sum(job.urgent for job in engine.jobs) == 4
    tasks: dict[int, set[str]] = {}
    for job in engine.jobs:
        tasks.setdefault(job.task["number"], set()).add(str(job.task["commands"]))
    assert all(len(commands) == 1 for commands in tasks.values())


def test_a_task_whose_result_was_lost_does_not_run_again(lab: Lab, tmp_path: Path):
    engine = FakeLossyEngine(lab.node(), lost=[1, 2, 3], after=True)
    outcome, ledger = lab.work(lab.run(appending(tmp_path / "ran")), engine)
    assert outcome == "succeeded"
    assert runs(tmp_path / "ran") == [str(n) for n in range(6)]
    assert sum(row.node_losses for row in ledger.rows("only")) == 0


def test_too_many_lost_nodes_fail_a_task(lab: Lab):
    only = Experiment("only", ("true",), node_retries=2)
    outcome, ledger = lab.work(lab.run(only), FakeLossyEngine(lab.node(), range(1, 99)))
    row = ledger.row("only", 0)
    assert outcome == "failed" and row is not None
    assert (row.node_losses, row.failures, row.message) == (3, 0, "node lost")


class FakeInterruptedHead(Head):
    """Is interrupted once so many tasks have ended, as by Ctrl-C."""

    after = 3

    def _turn(self) -> bool:
        if self._ledger.states("only").get("done", 0) >= self.after:
            raise KeyboardInterrupt
        return super()._turn()


def interrupted(lab: Lab, tmp_path: Path, **more: object) -> None:
    engine, ledger = InProcessEngine(lab.node(), slots=1), lab.ledger()
    with pytest.raises(KeyboardInterrupt):
        FakeInterruptedHead(lab.run(appending(tmp_path / "ran", 12, **more)), ledger, engine).work()
    engine.close()
    ledger.close()


def test_an_interrupted_run_goes_on_where_it_was(lab: Lab, tmp_path: Path):
    interrupted(lab, tmp_path)
    before = runs(tmp_path / "ran")
    assert 3 <= len(before) < 12
    outcome, ledger = lab.work(lab.run(appending(tmp_path / "ran", 12)))
    assert outcome == "succeeded"
    ended = list(runs(tmp_path / "ran"))
    assert set(ended) == {str(n) for n in range(12)}
    assert ledger.states("only") == {"done": 12}


def test_another_machine_goes_on_with_the_store_alone(lab: Lab, tmp_path: Path):
    """Without any ledger: the markers say what is finished, and it does not run again."""
    interrupted(lab, tmp_path)
    finished = lab.store.names("done/only/")
    before = {name: lab.store.read(name) for name in finished}
    ledger = Ledger(tmp_path / "elsewhere/ledger.sqlite")
    engine = InProcessEngine(lab.node("node-1"))
    assert Head(lab.run(appending(tmp_path / "ran", 12)), ledger, engine).work() == "succeeded"
    engine.close()
    assert ledger.states("only") == {"done": 12}
    assert {name: lab.store.read(name) for name in finished} == before
    numbers = [int(name[-11:-5]) for name in finished]
    assert all(runs(tmp_path / "ran").count(str(number)) == 1 for number in numbers)


def test_the_ledgers_copy_in_the_store_is_whole(lab: Lab, tmp_path: Path):
    lab.work(lab.run(appending(tmp_path / "ran")))
    lab.store.download("ledger.sqlite", tmp_path / "copy/ledger.sqlite")
    assert Ledger(tmp_path / "copy/ledger.sqlite").states("only") == {"done": 6}


def test_a_marker_of_another_command_is_refused(lab: Lab, tmp_path: Path):
    lab.store.write("done/only/000000.json", to_bytes({"digest": "other", "state": "done"}))
    with pytest.raises(NodeError, match="of another command"):
        lab.work(lab.run(appending(tmp_path / "ran")))


def test_only_one_head_works_on_a_run(lab: Lab, tmp_path: Path):
    held = Lease(lab.store)
    held.take()
    with pytest.raises(BadInput, match="is run by process"):
        lab.work(lab.run(appending(tmp_path / "ran")))
    held.release()
    assert lab.work(lab.run(appending(tmp_path / "ran")))[0] == "succeeded"


def test_a_head_that_was_replaced_ends(lab: Lab, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(heads, "LOOK_EVERY_S", 0.0)
    monkeypatch.setattr("mayfly_train.recipe.lock.EVERY_S", 0.0)
    with pytest.raises(NodeError, match="another head has taken over"):
        lab.work(lab.run(Experiment("only", (taking(lab.path),))))


def test_a_cancelled_run_ends_what_runs(lab: Lab, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(heads, "LOOK_EVERY_S", 0.0)
    line = f"sh -c 'echo > {lab.path}/store/cancel.json; exec sleep 600'"
    outcome, ledger = lab.work(lab.run(Experiment("only", (line,))))
    assert outcome == "cancelled"
    assert ledger.states("only") == {"waiting": 1}


def test_workers_bound_how_many_run_at_once(lab: Lab, tmp_path: Path):
    line = f"sh -c 'mkdir {tmp_path}/lock && sleep 0.05 && rmdir {tmp_path}/lock' {{{{n}}}}"
    only = Experiment("only", (line,), (numbered(5),), workers=1, task_retries=0)
    outcome, ledger = lab.work(lab.run(only), InProcessEngine(lab.node(), slots=4))
    assert outcome == "succeeded"
    assert ledger.states("only") == {"done": 5}


def test_no_more_are_frozen_than_the_window_holds(lab: Lab, tmp_path: Path):
    class FakeStuckEngine(InProcessEngine):
        """Counts how many attempts it was handed before the first one ended."""

        def wait(self, timeout_s):
            raise KeyboardInterrupt

        def cancel(self, attempts):
            handed.extend(attempts)
            self.wait = super().wait
            super().cancel(handed)

    handed: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        lab.work(lab.run(appending(tmp_path / "ran", 1_000_000)), FakeStuckEngine(lab.node(), 2))
    assert len(handed) == heads.WINDOW * 2
    assert lab.ledger().frozen("only") == heads.WINDOW * 2


def test_failed_tasks_run_again_when_they_are_forgiven(lab: Lab, tmp_path: Path):
    only = Experiment("only", (f"test -e {tmp_path}/fixed",), task_retries=0)
    assert lab.work(lab.run(only))[0] == "failed"
    (tmp_path / "fixed").touch()
    assert lab.ledger().forgive() == 1
    assert lab.work(lab.run(only))[0] == "succeeded"


@pytest.mark.parametrize(("most", "median"), [(1000, 2.0), (3, 3.0)])
def test_the_median_rule_knows_what_the_newest_finished_tasks_reported(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, most: int, median: float
):
    monkeypatch.setattr(stop, "MOST", most)
    monkeypatch.setattr(heads, "LOOK_EVERY_S", 0.0)
    line = 'sh -c \'for s in 1 2; do echo "{\\"step\\": $s, \\"acc\\": $0}"; done\' {{n}}'
    search = Search(objective="acc", stop_after=1)
    lab.work(lab.run(Experiment("only", (line,), (numbered(5),), search=search)))
    assert read_json(lab.store, "medians/only.json") == {"1": median, "2": median}


@pytest.mark.parametrize(
    ("wanted", "part"),
    [
        (Hardware(cpus=4), "4 cores: the largest has 2"),
        (Hardware(memory=64 << 30), "64.0 GiB of memory: the largest has 4.0"),
        (Hardware(gpus=1), "1 GPUs: the largest has 0"),
        (Hardware(cpus=2, memory=1 << 30), ""),
    ],
)
def test_what_a_task_waits_for_is_named(wanted: Hardware, part: str):
    members = [Member("a", 2, 2, 4 << 30, 0), Member("b", 1, 1, 1 << 30, 0)]
    assert part in why_no_room(members, wanted)
    assert bool(part) == bool(why_no_room(members, wanted))


class FakeRecordingEngine(InProcessEngine):
    """Runs nothing; attempts end when the test says so."""

    def __init__(self, node, slots: int) -> None:
        super().__init__(node, slots)
        self.jobs: list[Job] = []

    def submit(self, jobs, wanted) -> None:
        self.jobs += jobs


def test_a_head_keeps_little_of_a_run_that_it_resumes(lab: Lab, tmp_path: Path):
    """Of a million finished or forgiven tasks, no markers and no commands are kept."""
    interrupted(lab, tmp_path)
    only = appending(tmp_path / "ran", 12)
    finished = {int(name[-11:-5]) for name in lab.store.names("done/only/")}
    head = head_on(lab, InProcessEngine(lab.node()), only)
    head._expand()
    assert head._markers == {"only": set()}
    assert list(head._stages["only"]._again) == list(
        lab.ledger().numbers("only", (WAITING, RUNNING))
    )
    head._lease.release()
    elsewhere = Ledger(tmp_path / "elsewhere/ledger.sqlite")
    other = Head(lab.run(only), elsewhere, InProcessEngine(lab.node()))
    other._begin()
    other._expand()
    assert other._markers == {"only": finished}


def test_what_came_back_does_not_wait_for_room(lab: Lab, monkeypatch: pytest.MonkeyPatch):
    """One of two nodes is lost: more tasks are out than its like would now be handed."""
    monkeypatch.setattr(heads, "TURN_S", 0.01)
    engine = FakeRecordingEngine(lab.node(), slots=4)
    head = head_on(lab, engine, Experiment("only", ("true {{n}}",), (numbered(99),)))
    head._turn()
    assert len(engine.jobs) == 4 * heads.WINDOW
    engine._member = Member("left", 2, 8, 1 << 30, 0)
    lost = engine.jobs[:2]
    for job in lost:
        engine._news.put(Report(job.attempt, LOST))
    head._turn()
    head._turn()
    again = engine.jobs[4 * heads.WINDOW :]
    assert {job.task["number"] for job in again} == {job.task["number"] for job in lost}
    assert all(job.urgent for job in again)


def test_a_limit_holds_while_nodes_come_and_is_no_barrier(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(heads, "TURN_S", 0.01)
    engine = FakeRecordingEngine(lab.node(), slots=1)
    head = head_on(lab, engine, Experiment("only", ("true {{n}}",), (numbered(99),), workers=2))
    head._turn()
    engine._member = Member("large", 8, 8, 1 << 30, 0)
    head._turn()
    assert len(engine.jobs) == 2
    first = engine.jobs[0]
    outcome = {"state": "done", "attempt": first.attempt, "node": "large"}
    engine._news.put(Report(first.attempt, ENDED, "large", outcome))
    head._turn()
    head._turn()
    assert len(engine.jobs) == 3


def test_found_markers_cost_no_waiting(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    only = appending(tmp_path / "ran", 60)
    assert lab.work(lab.run(only))[0] == "succeeded"
    waits: list[float] = []

    class FakeCountingEngine(InProcessEngine):
        def wait(self, timeout_s):
            waits.append(timeout_s)
            return super().wait(timeout_s)

    engine = FakeCountingEngine(lab.node("node-1"))
    ledger = Ledger(tmp_path / "elsewhere/ledger.sqlite")
    assert Head(lab.run(only), ledger, engine).work() == "succeeded"
    engine.close()
    assert ledger.states("only") == {"done": 60}
    assert sum(waits) < 2 * heads.TURN_S


def test_an_attempt_that_was_second_ends_in_the_ledger(lab: Lab):
    marker = {"state": "done", "attempt": "other", "node": "node-9"}

    class FakeLateEngine(InProcessEngine):
        def wait(self, timeout_s):
            return [
                Report(each.attempt, each.kind, each.node, each.outcome and marker)
                for each in super().wait(timeout_s)
            ]

    _, ledger = lab.work(lab.run(Experiment("only", ("true",))), FakeLateEngine(lab.node()))
    (attempt,) = ledger.attempts("only", 0)
    assert (attempt["state"], attempt["message"]) == ("superseded", "other was first")


def test_a_replaced_head_leaves_the_others_ledger_alone(lab: Lab, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(heads, "LOOK_EVERY_S", 0.0)
    monkeypatch.setattr("mayfly_train.recipe.lock.EVERY_S", 0.0)
    monkeypatch.setattr(heads, "COPY_EVERY_S", 1e9)
    lab.store.write("ledger.sqlite", b"newer")
    with pytest.raises(NodeError, match="another head has taken over"):
        lab.work(lab.run(Experiment("only", (taking(lab.path),))))
    assert lab.store.read("ledger.sqlite") == b"newer"


@pytest.mark.parametrize(
    ("wanted", "waits"),
    [
        (Hardware(gpus=1), "waits for a node with 1 GPUs: the largest has 0"),
        (
            Hardware(memory=64 << 30),
            "waits for a node with 64.0 GiB of memory: the largest has 8.0",
        ),
        (Hardware(nodes=3), "waits for 3 nodes at once: there is room on 2"),
    ],
)
def test_status_says_what_a_task_waits_for_until_it_is_there(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, wanted: Hardware, waits: str
):
    monkeypatch.setattr(heads, "TURN_S", 0.01)
    engine = FakeRecordingEngine(lab.node(), slots=2)
    head = head_on(lab, engine, Experiment("only", ("true",), hardware=wanted))
    head._turn()
    assert lab.ledger().experiments()[0]["message"] == waits
    assert engine.jobs == []
    engine._member = Member("large", 4, 8, 128 << 30, 1, together=4)
    head._turn()
    assert lab.ledger().experiments()[0]["message"] == ""
    assert len(engine.jobs) == wanted.nodes
