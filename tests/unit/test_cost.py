"""What a run costs: properties that hold for any run, and one worked by hand."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from tests.unit.cloud_fakes import price_list

from mayfly import cost
from mayfly.clouds import load_job
from mayfly.cost import Interval, duration, estimate, unpriced
from mayfly.node_types import Nodes
from mayfly.prices import PriceList, TypePrice
from mayfly.role_vars import role_vars
from mayfly.run import Run

SEEDS = pytest.mark.parametrize("seed", range(40))
ONE_HOUR = Interval(1.0, 1.0)


def group(name="worker", count=1, kind="c6i.xlarge", **more) -> Nodes:
    values = {"size": None, "gpu": 0, "disk_gb": 50, "spot": False, "public": False, **more}
    return Nodes(name, count, kind, **values)


def any_run(seed: int) -> tuple[tuple[Nodes, ...], PriceList, Interval]:
    dice = random.Random(seed)
    prices = price_list(
        types={
            name: TypePrice(
                hour=hour, spot=(hour * dice.uniform(0.1, 0.4), hour * dice.uniform(0.4, 1.2))
            )
            for name in ("a", "b")
            if (hour := dice.uniform(0.01, 40))
        },
        disk_gb_month=dice.choice([None, dice.uniform(0, 1)]),
        address_hour=dice.choice([None, dice.uniform(0, 0.1)]),
        transfer_gb=dice.choice([None, dice.uniform(0, 0.2)]),
    )
    nodes = tuple(
        group(
            name,
            dice.randint(1, 50),
            dice.choice("ab"),
            disk_gb=dice.choice([None, 20, 500]),
            spot=dice.random() < 0.5,
            public=dice.random() < 0.5,
        )
        for name in ("ps", "worker")
    )
    return nodes, prices, duration(dice.uniform(0, 9e4), dice.uniform(60, 9e4))


def run_of(nodes, prices, hours) -> Interval:
    made = estimate(nodes, prices, hours)
    assert made is not None
    return made.run


@SEEDS
def test_low_is_never_above_high(seed: int):
    nodes, prices, hours = any_run(seed)
    made = estimate(nodes, prices, hours)
    assert made is not None
    for amount in (made.per_hour, made.hours, made.run, *made.parts.values()):
        assert 0 <= amount.low <= amount.high
    assert made.run.low == pytest.approx(sum(part.low for part in made.parts.values()))
    assert made.run.high == pytest.approx(sum(part.high for part in made.parts.values()))


@SEEDS
def test_more_nodes_or_more_time_never_cost_less(seed: int):
    nodes, prices, hours = any_run(seed)
    base = run_of(nodes, prices, hours)
    more = tuple(replace(each, count=each.count + 1) for each in nodes)
    longer = Interval(hours.low + 1, hours.high + 1)
    for other in (run_of(more, prices, hours), run_of(nodes, prices, longer)):
        assert other.low >= base.low
        assert other.high >= base.high


@SEEDS
def test_prices_scale(seed: int):
    """Twice the price, twice the bill: no amount is counted in another currency by accident."""
    nodes, prices, hours = any_run(seed)
    doubled = prices.model_copy(
        update={
            "types": {
                name: TypePrice(hour=2 * price.hour, spot=(2 * price.spot[0], 2 * price.spot[1]))
                for name, price in prices.types.items()
                if price.spot
            },
            **{
                name: 2 * value
                for name in ("disk_gb_month", "address_hour", "transfer_gb")
                if (value := getattr(prices, name)) is not None
            },
        }
    )
    once, twice = run_of(nodes, prices, hours), run_of(nodes, doubled, hours)
    assert twice.low == pytest.approx(2 * once.low)
    assert twice.high == pytest.approx(2 * once.high)


@SEEDS
def test_a_split_group_costs_the_same(seed: int):
    nodes, prices, hours = any_run(seed)
    halves = tuple(
        replace(each, count=count)
        for each in nodes
        for count in (each.count // 2, each.count - each.count // 2)
    )
    assert run_of(halves, prices, hours).high == pytest.approx(run_of(nodes, prices, hours).high)


@SEEDS
def test_spot_never_lowers_the_upper_end_below_what_may_be_paid(seed: int):
    nodes, prices, hours = any_run(seed)
    demand = tuple(replace(each, spot=False) for each in nodes)
    spot = tuple(replace(each, spot=True) for each in nodes)
    assert run_of(spot, prices, hours).high >= run_of(demand, prices, hours).high
    assert run_of(spot, prices, hours).low <= run_of(demand, prices, hours).low
    saved = estimate(demand, prices, hours).spot_saves
    assert saved is not None
    assert 0 <= saved.low <= saved.high <= run_of(demand, prices, hours).high


def test_one_by_hand():
    nodes = (group("ps", 1, "m6i.large", disk_gb=20, public=True), group("worker", 2))
    made = estimate(nodes, price_list(), ONE_HOUR)
    assert made is not None
    assert made.parts["nodes"] == Interval(0.5, 0.5)
    assert made.parts["disks"].low == pytest.approx(120 * 0.073 / 730)
    assert made.parts["addresses"] == Interval(0.005, 0.005)
    assert made.parts["transfer"] == Interval(0.0, 0.5)
    assert made.run.low == pytest.approx(0.5 + 0.012 + 0.005)
    assert made.spot_saves == Interval(pytest.approx(0.24), pytest.approx(0.3))


def test_the_time_before_and_after_training_is_paid_too():
    hours = duration(None, 3600)
    assert hours.low == pytest.approx((cost.PREPARATION_S[0] + cost.ENDING_S[0]) / 3600)
    assert hours.high == pytest.approx(1.5)
    assert duration(1800, 3600).low == pytest.approx(0.5 + hours.low)
    assert duration(7200, 3600).low == pytest.approx(1.0 + hours.low)


def test_the_nodes_own_timer_allows_more_than_the_plan_counts():
    spec, _ = load_job(None, {"cloud": "local", "bucket": "my-models"}, {})
    run = Run("r", "image", "collection", None, "us-east-1")
    planned = cost.PREPARATION_S[1] + spec.limits.max_duration + cost.ENDING_S[1]
    assert role_vars(spec, run)["deadman_max_s"] > planned


def test_a_type_without_a_price_is_no_guess():
    nodes = (group(kind="x9.large"), group(kind=None))
    assert unpriced(nodes, price_list()) == ["x9.large", "untyped"]
    assert estimate(nodes, price_list(), ONE_HOUR) is None


def test_a_price_for_all_other_types():
    nodes = (group(kind="x9.large"), group(kind=None))
    made = estimate(nodes, price_list(other={"hour": 1.5}), ONE_HOUR)
    assert made is not None
    assert made.parts["nodes"] == Interval(3.0, 3.0)


def test_what_has_no_price_is_named():
    made = estimate((group(),), price_list(transfer_gb=None, address_hour=None), ONE_HOUR)
    assert made is not None
    assert made.missing == ("addresses", "transfer")
