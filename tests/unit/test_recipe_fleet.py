"""A run on nodes as the control side sees it: the fleet, the follower, and how it says goodbye."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from mayfly.errors import LimitReached, RemoteError, RunFailed
from mayfly.im import Node, State
from mayfly.ledger import Ledger
from mayfly.recipe.elastic import Actions
from mayfly.recipe.fleet import EVERY_S, Fleet
from mayfly.recipe.on_nodes import Follower, describe, say_goodbye
from mayfly.watch import Broken, Pace
from mayfly_train.recipe import lock, names
from mayfly_train.recipe.patience import PATIENCE_S
from mayfly_train.recipe.store import DirectoryStore, Store, to_bytes
from unit.deploy_fakes import FakeClock
from unit.recipe_fakes import FakeAwayStore


@dataclass
class FakeIM:
    """An IM that has nodes in a dictionary, and says of added ones what `next_state` is."""

    states: dict[str, str] = field(default_factory=dict)
    infrastructure: str = "configured"
    next_state: str = "configured"
    refusal: str = ""
    removed: list[str] = field(default_factory=list)
    radls: list[str] = field(default_factory=list)
    restarts: int = 0
    reconfigured: int = 0

    def reconfigure(self, infrastructure: str) -> None:
        self.reconfigured += 1

    def state(self, infrastructure: str) -> State:
        return State(self.infrastructure, dict(self.states))

    def nodes(self, infrastructure: str) -> list[Node]:
        return [
            Node(
                number,
                "head" if number == "0" else "worker",
                state,
                f"{'head' if number == '0' else 'worker'}-{number}",
                *(None, None, "root", None, None),
            )
            for number, state in sorted(self.states.items())
        ]

    def add(self, infrastructure: str, radl: str) -> list[str]:
        self.radls.append(radl)
        if self.refusal:
            raise RemoteError(self.refusal)
        count = int(radl.split()[-1])
        first = max(int(number) for number in self.states) + 1
        new = [str(first + n) for n in range(count)]
        self.states |= dict.fromkeys(new, self.next_state)
        return new

    def remove(self, infrastructure: str, numbers: Sequence[str]) -> None:
        for number in numbers:
            del self.states[number]
            self.removed.append(number)


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    made = Ledger(tmp_path / "ledger.sqlite")
    made.add("r-1", "local", "s3://bucket/r-1/", {}, None)
    return made


def fleet(im: FakeIM, ledger: Ledger, clock: FakeClock, wish: int = 2) -> Fleet:
    said: list[str] = []
    return Fleet("r-1", "infra", wish, im, ledger, said.append, clock)  # type: ignore[arg-type]


def progress(left: int = 100, **running: int) -> dict[str, Any]:
    """Nodes by `worker_1=2`: how many tasks run there."""
    each = {name.replace("_", "-"): {"slots": 2, "running": n} for name, n in running.items()}
    return {"left": left, "nodes": each, "experiments": []}


def actions(ledger: Ledger) -> list[tuple[str, str, str | None]]:
    return [(each.action, each.target, each.outcome) for each in ledger.journal("r-1")]


def test_a_lost_node_is_replaced_and_both_calls_are_in_the_journal(ledger: Ledger):
    im = FakeIM({"0": "configured", "1": "configured", "2": "off"})
    fleet(im, ledger, FakeClock()).look(progress(worker_1=2))
    assert im.removed == ["2"]
    assert im.states == {"0": "configured", "1": "configured", "2": "configured"}
    assert actions(ledger) == [("shrink", "worker-2 (off)", "done"), ("grow", "1 nodes", "done")]


def test_im_is_asked_now_and_then_only(ledger: Ledger):
    im, clock = FakeIM({"0": "configured", "1": "configured"}), FakeClock()
    mine = fleet(im, ledger, clock)
    assert mine.look(progress(worker_1=2)).add == 1
    im.states.pop("2")
    clock.sleep(EVERY_S - 1)
    assert mine.look(progress(worker_1=2)) == Actions()


def test_a_refusal_is_journalled_and_puts_off_the_next_try(ledger: Ledger):
    im = FakeIM({"0": "configured"}, refusal="InsufficientInstanceCapacity")
    clock = FakeClock()
    mine = fleet(im, ledger, clock)
    for _ in range(12):
        mine.look(progress())
        clock.sleep(EVERY_S)
    assert len(im.radls) == 3  # at 0, 30 and 90 s
    assert actions(ledger)[0] == ("grow", "2 nodes", "failed")
    im.refusal = ""
    clock.sleep(1000)
    mine.look(progress())
    assert im.states == {"0": "configured", "1": "configured", "2": "configured"}


def test_added_nodes_that_come_to_nothing_count_as_failures(ledger: Ledger):
    im, clock = FakeIM({"0": "configured"}, next_state="unconfigured"), FakeClock()
    mine = fleet(im, ledger, clock)
    for _ in range(6):
        mine.look(progress())
        clock.sleep(EVERY_S)
    assert len(im.radls) == 2  # at 0 s; seen at 10 s, again after 30 s more
    assert im.removed[:2] == ["1", "2"]


def test_an_im_that_does_not_answer_changes_nothing(ledger: Ledger):
    im = FakeIM({"0": "configured"})
    im.state = lambda _: (_ for _ in ()).throw(RemoteError("no answer"))  # type: ignore[method-assign]
    assert fleet(im, ledger, FakeClock()).look(progress()) == Actions()
    assert actions(ledger) == []


def test_a_node_that_im_has_lost_sight_of_is_given_up_when_the_head_has_too(ledger: Ledger):
    im, clock = FakeIM({"0": "configured", "1": "configured", "2": "unknown"}), FakeClock()
    im.infrastructure = "unknown"
    mine = fleet(im, ledger, clock)
    for _ in range(30):
        mine.look(progress(worker_1=1, worker_2=1))
        clock.sleep(EVERY_S)
    assert im.removed == [], "it works on, whatever IM sees"
    for _ in range(32):
        mine.look(progress(worker_1=1))
        clock.sleep(EVERY_S)
    assert im.removed == ["2"]


def test_an_im_that_was_restarted_is_told_once_to_go_on(ledger: Ledger):
    im, clock = FakeIM({"0": "configured", "1": "running"}, "running"), FakeClock()
    mine = fleet(im, ledger, clock)
    for restarts in (0, 1, 1):
        im.restarts = restarts
        mine.look(progress(worker_1=1))
        clock.sleep(EVERY_S)
    assert im.reconfigured == 1


def test_idle_nodes_go_when_little_is_left(ledger: Ledger):
    im, clock = FakeIM({"0": "configured", "1": "configured", "2": "configured"}), FakeClock()
    mine = fleet(im, ledger, clock)
    for _ in range(8):
        mine.look(progress(left=1, worker_1=1, worker_2=0))
        clock.sleep(EVERY_S)
    assert im.removed == ["2"]


# --- the follower ---

FOR_EVER = 1_000_000  # calls


@dataclass
class Scene:
    """A store, a fleet of one node and a clock on which things happen."""

    store: FakeAwayStore
    follower: Follower
    clock: FakeClock
    happens: dict[float, Any] = field(default_factory=dict)

    def sleep(self, seconds: float) -> None:
        self.clock.sleep(seconds)
        for moment in [moment for moment in self.happens if moment <= self.clock()]:
            self.happens.pop(moment)()


def scene(tmp_path: Path, ledger: Ledger, im: FakeIM | None = None, limit_s: float = 1e6) -> Scene:
    store, clock = FakeAwayStore(DirectoryStore(tmp_path / "store"), "read"), FakeClock()
    im = im or FakeIM({"0": "configured", "1": "configured"})
    made = Scene(store, None, clock)  # type: ignore[arg-type]
    pace = Pace(2.0, 300.0, clock=clock, sleep=made.sleep)
    made.follower = Follower(store, fleet(im, ledger, clock, 1), pace, limit_s)
    return made


def ended(store: Store, outcome: str, message: str = "") -> None:
    store.write(names.ENDED, to_bytes({"outcome": outcome, "message": message, "time": 1}))


def alive(store: Store, time: float) -> None:
    store.write(names.PROGRESS, to_bytes({**progress(worker_1=1), "time": time}))


def report(*_: object) -> None:
    """Nobody looks."""


def test_a_run_is_followed_until_its_head_says_that_it_has_ended(tmp_path: Path, ledger: Ledger):
    on = scene(tmp_path, ledger)
    on.happens = {10: lambda: alive(on.store, 1), 20: lambda: ended(on.store, "succeeded")}
    assert on.follower.follow(report).raw["outcome"] == "succeeded"
    assert 20 <= on.clock() < 23


def test_a_failed_recipe_is_told_with_its_reason(tmp_path: Path, ledger: Ledger):
    on = scene(tmp_path, ledger)
    ended(on.store, "failed", "a* matches nothing")
    with pytest.raises(RunFailed, match=r"the recipe has failed: a\* matches nothing"):
        on.follower.follow(report)


def test_a_head_that_says_nothing_for_long_is_given_up(tmp_path: Path, ledger: Ledger):
    on = scene(tmp_path, ledger, FakeIM({"0": "off", "1": "configured"}))
    alive(on.store, 1)
    on.happens = {200: lambda: alive(on.store, 2)}
    with pytest.raises(Broken, match="no sign of life: its node is gone"):
        on.follower.follow(report)
    assert 500 <= on.clock() < 510


def test_the_longest_time_ends_a_run(tmp_path: Path, ledger: Ledger):
    on = scene(tmp_path, ledger, limit_s=60)
    with pytest.raises(LimitReached, match="60 s"):
        on.follower.follow(report)


def test_a_store_that_is_away_is_waited_for_as_long_as_the_head_waits(tmp_path, ledger):
    on = scene(tmp_path, ledger)
    on.store.failures = FOR_EVER
    with pytest.raises(Broken, match="store has not answered for 10 minutes"):
        on.follower.follow(report)
    assert PATIENCE_S <= on.clock() < PATIENCE_S + 10


def test_a_head_has_time_to_speak_again_after_the_store_was_away(tmp_path, ledger):
    on = scene(tmp_path, ledger)
    alive(on.store, 1)
    on.happens[10] = lambda: setattr(on.store, "failures", FOR_EVER)
    on.happens[580] = lambda: setattr(on.store, "failures", 0)
    on.happens[800] = lambda: alive(on.store, 2)
    on.happens[1000] = lambda: ended(on.store, "succeeded")
    assert on.follower.follow(report).raw["outcome"] == "succeeded"


def test_progress_is_one_line():
    experiments = [
        {"name": "a", "state": "done", "tasks": 2, "message": "", "states": {"done": 2}},
        {"name": "b", "state": "running", "tasks": 6, "message": "", "states": {"done": 2}},
        {"name": "c", "state": "waiting", "tasks": None, "message": "", "states": {}},
    ]
    text, fraction = describe({**progress(worker_1=2, worker_2=1), "experiments": experiments})
    assert text == "b: running: 2 done of 6 · 3 run on 2 nodes"
    assert fraction == 0.5
    text, _ = describe({**progress(worker_1=2), "experiments": experiments}, eta_s=3900.0)
    assert text == "b: running: 2 done of 6 · 2 run on 1 nodes · ETA 1 h 05 min"


def test_a_head_gets_time_to_end_its_tasks(tmp_path: Path):
    store, clock = DirectoryStore(tmp_path), FakeClock()
    lease = lock.Lease(store)
    lease.take()

    def sleep(seconds: float) -> None:
        clock.sleep(seconds)
        assert store.read(names.CANCEL) is not None
        if clock() >= 6:
            lease.release()

    say_goodbye(store, Pace(2.0, clock=clock, sleep=sleep))
    assert clock() == 6
    assert store.read(names.CANCEL) is None, "the run was not cancelled: it goes on"


def test_a_head_that_does_not_end_is_not_waited_for_for_ever(tmp_path: Path):
    store, clock = DirectoryStore(tmp_path), FakeClock()
    lock.Lease(store).take()
    say_goodbye(store, Pace(2.0, clock=clock, sleep=clock.sleep))
    assert clock() == 40
