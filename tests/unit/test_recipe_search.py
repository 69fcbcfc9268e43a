"""Guided searches: the same trials however often the run was interrupted; the median rule."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mayfly_train.recipe import stop
from mayfly_train.recipe.document import Experiment, Parameter, Search
from mayfly_train.recipe.engine import InProcessEngine
from mayfly_train.recipe.expand import Context, Expansion
from mayfly_train.recipe.guided import TpeSampler
from mayfly_train.recipe.head import Head
from mayfly_train.recipe.ledger import Ledger
from mayfly_train.recipe.stage import Stage
from unit.recipe_fakes import Lab

SPACE = (
    Parameter("x", "loguniform", low=0.001, high=10),
    Parameter("k", "int", low=1, high=9),
    Parameter("name", "values", values=("a", "b")),
)
SEARCH = Search(sampler="tpe", seed=3, objective="loss", direction="minimize", generation=4)
LINE = (
    'awk \'BEGIN { loss = (ARGV[1] - 2) ^ 2 + (ARGV[2] - 5) ^ 2 + (ARGV[3] == "a");'
    ' if (ARGV[2] == 9) exit 1; printf "{\\"loss\\": %.6f}\\n", loss }\' {{x}} {{k}} {{name}}'
)


def experiment(samples: int = 24) -> Experiment:
    return Experiment(
        "train", (LINE,), SPACE, samples=samples, search=SEARCH, task_retries=0, workers=3
    )


def trials(ledger: Ledger) -> list[tuple[str, float | None]]:
    return [(row.task.frozen, row.value) for row in ledger.rows("train")]


def test_trials_do_not_depend_on_who_finishes_first(tmp_path: Path):
    found = []
    for slots in (1, 3):
        lab = Lab(tmp_path / str(slots))
        _, ledger = lab.work(lab.run(experiment()), InProcessEngine(lab.node(), slots))
        found.append(trials(ledger))
    assert found[0] == found[1]
    assert len({frozen for frozen, _ in found[0]}) == 24


def test_a_generation_waits_for_room(tmp_path: Path):
    lab = Lab(tmp_path)
    stage = Stage(Expansion(experiment(), Context("", {}, {})), lab.ledger())
    first = stage.take(3)
    assert [task.number for task in first] == [0, 1, 2]
    assert [task.number for task in stage.take(3)] == [3], "the generation has four"
    assert stage.take(3) == [], "the next one waits for all of these"


class FakeInterruptedHead(Head):
    """Is interrupted once so many trials have ended."""

    after = 10

    def _turn(self) -> bool:
        if sum(self._ledger.states("train").get(state, 0) for state in ("done", "failed")) >= 10:
            raise KeyboardInterrupt
        return super()._turn()


@pytest.mark.parametrize("keep_ledger", [True, False])
def test_a_resumed_search_equals_an_uninterrupted_one(tmp_path: Path, keep_ledger: bool):
    whole = Lab(tmp_path / "whole")
    _, expected = whole.work(whole.run(experiment()))
    lab = Lab(tmp_path / "parts")
    ledger, engine = lab.ledger(), InProcessEngine(lab.node())
    with pytest.raises(KeyboardInterrupt):
        FakeInterruptedHead(lab.run(experiment()), ledger, engine).work()
    engine.close()
    ledger.close()
    if not keep_ledger:
        for path in (tmp_path / "parts/head").iterdir():
            path.unlink()
    _, resumed = lab.work(lab.run(experiment()))
    assert trials(resumed) == trials(expected)


def test_guided_beats_its_own_first_trials(tmp_path: Path):
    lab = Lab(tmp_path)
    _, ledger = lab.work(lab.run(experiment(40)))
    values = [row.value for row in ledger.rows("train") if row.value is not None]
    assert min(values[10:]) < min(values[:10])


def test_trials_stay_in_their_ranges():
    sampler = TpeSampler(experiment())
    history = [
        ({"x": 0.5, "k": 3, "name": "a"}, 7.0),
        ({"x": 5.0, "k": 9, "name": "b"}, None),
    ]
    for x, k, name in sampler.ask(history * 8, range(16, 20)):
        assert 0.001 <= x <= 10 and k in range(1, 10) and name in ("a", "b")


def test_medians_are_of_running_averages():
    curves = [[(1, 1.0), (2, 3.0)], [(1, 2.0), (2, 2.0)], [(1, 6.0)]]
    assert stop.medians(curves) == {1: 2.0}
    assert stop.medians([*curves, [(1, 0.0), (2, 10.0)]]) == {1: 1.5, 2: 2.0}


@pytest.mark.parametrize(
    ("curve", "maximize", "stopped"),
    [
        ([(3, 0.4)], True, True),
        ([(3, 0.6)], True, False),
        ([(1, 0.9), (3, 0.4)], True, False),
        ([(3, 0.6)], False, True),
        ([(2, 0.1)], True, False),
        ([(4, 0.1)], True, False),
        ([], True, False),
    ],
)
def test_only_a_lagging_task_is_stopped(curve, maximize: bool, stopped: bool):
    assert stop.should_stop(curve, {2: 0.5, 3: 0.5}, 3, maximize) == stopped


HEAD = """
import sys
sys.path.append({tests!r})
from pathlib import Path
from unit.recipe_fakes import Lab
from unit.test_recipe_search import experiment
from mayfly_train.recipe.engine import InProcessEngine
lab = Lab(Path({lab!r}))
lab.work(lab.run(experiment()), InProcessEngine(lab.node(), 3))
"""


@pytest.mark.parametrize("ended", [2, 9, 14])
def test_a_search_whose_head_was_killed_in_a_generation_equals_a_whole_one(
    tmp_path: Path, ended: int
):
    """Kill -9: nothing is told, and what runs goes on or is lost. The ledger that is found later
    may be the head's own, or a copy of any moment before, or none."""
    whole = Lab(tmp_path / "whole")
    _, expected = whole.work(whole.run(experiment()))
    path = tmp_path / "killed"
    script = HEAD.format(tests=str(Path(__file__).parents[1]), lab=str(path))
    head = subprocess.Popen([sys.executable, "-c", script])
    copies = [Ledger(tmp_path / "none/ledger.sqlite")]
    try:
        while head.poll() is None:
            done = len(list((path / "store/done/train").glob("*.json")))
            if done >= ended // 2 and len(copies) == 1:
                (tmp_path / "copy").mkdir()
                Ledger(path / "head/ledger.sqlite").copy_to(tmp_path / "copy/ledger.sqlite")
                copies.append(Ledger(tmp_path / "copy/ledger.sqlite"))
            if done >= ended:
                break
            time.sleep(0.002)
    finally:
        head.kill()
        head.wait()
    for number, ledger in enumerate([*copies, Ledger(path / "head/ledger.sqlite")]):
        lab = Lab(tmp_path / str(number))
        shutil.copytree(path / "store", lab.path / "store")
        engine = InProcessEngine(lab.node())
        assert Head(lab.run(experiment()), ledger, engine).work() == "succeeded"
        engine.close()
        assert trials(ledger) == trials(expected)
