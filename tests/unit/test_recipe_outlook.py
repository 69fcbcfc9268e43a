"""How long the tasks of a recipe will still take."""

from __future__ import annotations

from typing import Any

import pytest

from mayfly.recipe.execute import Ticker
from mayfly.recipe.outlook import LEAST_S, WINDOW_S, Outlook


class Clock:
    """A clock that is set."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def experiment(
    done: int, tasks: int | None = 100, name: str = "train", state: str = "running", **others: int
) -> dict[str, Any]:
    states = {"done": done, "running": 4, **others}
    return {"name": name, "state": state, "tasks": tasks, "message": "", "states": states}


def told(*seen: tuple[float, list[dict[str, Any]]]) -> float | None:
    """What an outlook says last of what it was told at these times."""
    clock = Clock()
    outlook = Outlook(clock)
    for clock.now, experiments in seen:
        said = outlook.eta_s(experiments)
    return said


def test_what_is_left_takes_as_long_as_what_has_ended():
    assert told((0, [experiment(10)]), (30, [experiment(25)])) == pytest.approx(150)


def test_stopped_and_failed_tasks_are_over_too():
    assert told((0, [experiment(0)]), (30, [experiment(5, stopped=5, failed=5)])) == 170


def test_it_does_not_guess():
    assert told((0, [experiment(0)])) is None
    assert told((0, [experiment(0)]), (LEAST_S - 1, [experiment(50)])) is None
    assert told((0, [experiment(0)]), (600, [experiment(4)])) is None
    assert told((0, []), (60, [])) is None
    assert told((0, [experiment(0, None)]), (60, [experiment(50, None)])) is None


def test_what_ended_long_ago_does_not_count():
    fast = [(float(second), [experiment(second, 10_000)]) for second in range(0, 1000, 10)]
    slow = [
        (1000.0 + 10 * n, [experiment(990 + n, 10_000)]) for n in range(2 * int(WINDOW_S) // 10)
    ]
    now, (last,) = slow[-1]
    assert now > 1000 + WINDOW_S
    left = 10_000 - last["states"]["done"]
    assert told(*fast, *slow) == pytest.approx(left * 10, rel=0.05)


def test_a_pause_makes_it_later():
    before = [(0.0, [experiment(0)]), (30.0, [experiment(30)])]
    assert told(*before) == 70
    assert told(*before, (60.0, [experiment(30)])) == 140


def test_another_experiment_begins_anew():
    first = [(0.0, [experiment(0)]), (30.0, [experiment(90)])]
    second = experiment(0, 50, "infer")
    assert told(*first, (31.0, [experiment(100, state="done"), second])) is None
    end = (61.0, [experiment(100, state="done"), experiment(25, 50, "infer")])
    assert told(*first, (31.0, [second]), end) == 30


def test_tasks_that_are_to_run_again_begin_anew():
    assert told((0, [experiment(0)]), (30, [experiment(90)]), (31, [experiment(20)])) is None


def test_a_run_on_this_machine_tells_it(capsys):
    clock = Clock()
    ticker = Ticker(outlook=Outlook(clock))
    for clock.now, done in ((0, 0), (30, 20), (31, 20), (90, 100)):
        state = "running" if done < 100 else "done"
        ticker.show([experiment(done, state=state)])
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "train: running: 4 running of 100",
        "train: running: 20 done, 4 running of 100 · ETA 2 min 00 s",
        "train: done: 100 done, 4 running of 100",
    ]
