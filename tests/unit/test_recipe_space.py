"""The product, minimal repetition, draws, and laziness."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from mayfly_train.recipe.document import Experiment, Parameter, Search
from mayfly_train.recipe.expand import Context, Expansion
from mayfly_train.recipe.space import Permutation, Space

NOTHING = Context("s3://bucket/run/data", {}, {})
WIDTH = Parameter("width", "values", (64, 128, 256))
OPTIMIZER = Parameter("optimizer", "values", ("sgd", "adam"))
RATE = Parameter("lr", "loguniform", low=0.001, high=0.3)


def rows(space: Space, count: int) -> list[tuple[object, ...]]:
    return list(zip(*space.columns(0, count), strict=True))


def test_without_samples_the_product_is_run_whole_and_in_order():
    space = Space([WIDTH, OPTIMIZER], 0, 7)
    assert rows(space, space.count) == list(itertools.product((64, 128, 256), ("sgd", "adam")))


def test_whole_numbers_are_in_the_product_without_being_listed():
    space = Space([Parameter("shard", "integers", low=0, high=10**12)], 0, 0)
    assert space.count == 10**12 + 1
    assert space.values(10**12) == [10**12]


@pytest.mark.parametrize("samples", [1, 5, 6, 7, 600, 1001])
def test_every_combination_comes_k_or_k_plus_1_times(samples: int):
    space = Space([WIDTH, OPTIMIZER], samples, 7)
    times = Counter(rows(space, samples))
    assert sum(times.values()) == samples
    assert len(times) == min(samples, 6)
    assert max(times.values()) - (min(times.values()) if samples >= 6 else 1) <= 1


@pytest.mark.parametrize("size", [1, 2, 6, 97, 65536, 65537, 70001])
def test_a_permutation_takes_every_place_once(size: int):
    assert sorted(Permutation(size, 99).part(0, size)) == list(range(size))


def test_rounds_of_the_product_have_orders_of_their_own():
    space = Space([Parameter("x", "values", tuple(range(20)))], 60, 1)
    column = space.columns(0, 60)[0]
    assert len({tuple(column[start : start + 20]) for start in (0, 20, 40)}) == 3


def test_a_task_depends_on_the_seed_and_its_number_alone():
    whole = Space([RATE, WIDTH, OPTIMIZER], 1000, 7)
    assert [whole.values(n) for n in (999, 3, 0)] == [
        list(row) for row in (rows(whole, 1000)[n] for n in (999, 3, 0))
    ]
    assert rows(Space([RATE, WIDTH, OPTIMIZER], 50, 7), 50) == rows(whole, 50)
    assert rows(Space([RATE, WIDTH, OPTIMIZER], 50, 8), 50) != rows(whole, 50)


@pytest.mark.parametrize(
    ("kind", "low", "high"), [("uniform", 0.1, 0.3), ("loguniform", 1e-4, 0.3), ("int", -3, 5)]
)
def test_draws_stay_in_their_range_and_fill_it(kind: str, low: float, high: float):
    column = Space([Parameter("x", kind, low=low, high=high)], 4000, 1).columns(0, 4000)[0]
    assert low <= min(column) and max(column) <= high
    if kind == "int":
        assert set(column) == set(range(-3, 6))
        return
    middle = (low * high) ** 0.5 if kind == "loguniform" else (low + high) / 2
    assert 1800 < sum(value < middle for value in column) < 2200


def test_drawn_and_listed_parameters_are_matched_at_random():
    found = rows(Space([Parameter("x", "uniform", low=0, high=1), OPTIMIZER], 2000, 3), 2000)
    high = sum(1 for value, optimizer in found if value > 0.5 and optimizer == "sgd")
    assert 430 < high < 570


def test_choice_draws_and_does_not_multiply():
    choice = Parameter("c", "choice", ("a", "b", "c", "d"))
    space = Space([choice, OPTIMIZER], 100, 3)
    assert space.product == 2
    assert set(space.columns(0, 100)[0]) == {"a", "b", "c", "d"}


def expansion(samples: int, command: str = "train --lr {{lr}} --w={{width}} -o {{output}}"):
    experiment = Experiment("train", (command,), (RATE, WIDTH), samples=samples, search=Search())
    return Expansion(experiment, NOTHING)


def test_the_last_of_a_million_tasks_needs_none_of_the_others():
    tasks = expansion(1_000_000)
    assert next(tasks.tasks(999_999)) == tasks.task(999_999)


def test_a_task_has_its_values_as_words():
    task = expansion(10).task(3)
    rate, width = task.parameters["lr"], task.parameters["width"]
    assert task.commands == (("train", "--lr", str(rate), f"--w={width}", "-o", "../output"),)
    assert task.id == "train/000003"


def test_blocks_meet():
    tasks = expansion(3000)
    assert [task.number for task in tasks.tasks()] == list(range(3000))
    assert list(tasks.tasks())[1024] == tasks.task(1024)


@pytest.mark.parametrize("kind", ["uniform", "loguniform"])
@pytest.mark.parametrize(("low", "high"), [(100000.1, 100000.9), (0.99999, 0.999999), (1, 1.0001)])
def test_a_narrow_range_is_drawn_from_all_over(kind: str, low: float, high: float):
    space = Space((Parameter("x", kind, low=low, high=high),), 1000, 0)
    (found,) = space.columns(0, 1000)
    assert len(set(found)) > 900
    assert all(low <= value <= high for value in found)
