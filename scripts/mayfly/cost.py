"""What a run will cost: arithmetic only. Every amount is an interval, because nobody knows before.

What the intervals assume is written in docs/costs.md; the constants here are all of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mayfly.node_types import Nodes
from mayfly.prices import PriceList, TypePrice

HOURS_OF_A_MONTH = 730
# Before training: IM makes the nodes, installs on them and stages the data. After it: export and
# destroy.
PREPARATION_S = (300.0, 1200.0)
ENDING_S = (60.0, 600.0)
# Model, checkpoints and logs, should the bucket be in another region: nothing at all, or this much.
TRANSFER_GB = (0.0, 5.0)


@dataclass(frozen=True)
class Interval:
    """From `low` to `high`, both possible."""

    low: float
    high: float

    def __add__(self, other: Interval) -> Interval:
        return Interval(self.low + other.low, self.high + other.high)

    def __mul__(self, other: Interval) -> Interval:
        """The product of amounts that are not negative."""
        return Interval(self.low * other.low, self.high * other.high)


NOTHING = Interval(0.0, 0.0)


@dataclass(frozen=True)
class Estimate:
    """The price of a run, in `currency`."""

    currency: str
    per_hour: Interval
    """Nodes, their disks and their addresses, while they exist."""
    hours: Interval
    """How long they exist."""
    run: Interval
    """The whole run."""
    parts: dict[str, Interval]
    """What the run's price is made of."""
    missing: tuple[str, ...]
    """Parts of which the list has no price, and which are therefore not in it."""
    spot_saves: Interval | None
    """What spot workers save, or would save; None when no spot price is known."""


def duration(expected_s: float | None, max_duration_s: float) -> Interval:
    """How long the nodes exist, in hours.

    Training takes `expected_s` (or no time at all, when that is not known) to `max_duration_s`.
    """
    shortest = min(expected_s or 0.0, max_duration_s)
    low = PREPARATION_S[0] + shortest + ENDING_S[0]
    high = PREPARATION_S[1] + max_duration_s + ENDING_S[1]
    return Interval(low / 3600, high / 3600)


def unpriced(nodes: Iterable[Nodes], prices: PriceList) -> list[str]:
    """The types that the list has no price for; `untyped` stands for nodes that have no type."""
    return list(
        dict.fromkeys(group.type or "untyped" for group in nodes if prices.of(group.type) is None)
    )


def estimate(nodes: tuple[Nodes, ...], prices: PriceList, hours: Interval) -> Estimate | None:
    """The price of these nodes for so long; None when the price of a node is not known."""
    if unpriced(nodes, prices):
        return None
    hourly = {
        "nodes": _sum(_node_hour(group, prices) for group in nodes),
        "disks": _flat(_disk_hour(nodes, prices)),
        "addresses": _flat(
            (prices.address_hour or 0.0) * sum(group.count for group in nodes if group.public)
        ),
    }
    parts = {name: amount * hours for name, amount in hourly.items()}
    parts["transfer"] = _flat(prices.transfer_gb or 0.0) * Interval(*TRANSFER_GB)
    given = {
        "disks": prices.disk_gb_month,
        "addresses": prices.address_hour,
        "transfer": prices.transfer_gb,
    }
    return Estimate(
        currency=prices.currency,
        per_hour=_sum(hourly.values()),
        hours=hours,
        run=_sum(parts.values()),
        parts=parts,
        missing=tuple(name for name, price in given.items() if price is None),
        spot_saves=_spot_saves(nodes, prices, hours),
    )


def _node_hour(group: Nodes, prices: PriceList) -> Interval:
    price = _price(group, prices)
    each = Interval(price.hour, price.hour)
    if group.spot and price.spot is not None:
        # Who bids no price pays up to that of a node on demand.
        each = Interval(min(price.spot[0], price.hour), max(price.spot[1], price.hour))
    return each * _flat(group.count)


def _disk_hour(nodes: tuple[Nodes, ...], prices: PriceList) -> float:
    size = sum(group.count * (group.disk_gb or 0) for group in nodes)
    return size * (prices.disk_gb_month or 0.0) / HOURS_OF_A_MONTH


def _spot_saves(nodes: tuple[Nodes, ...], prices: PriceList, hours: Interval) -> Interval | None:
    """The difference for all workers, which can be lost without losing the run."""
    workers = [group for group in nodes if group.group == "worker"]
    known = [(group, _price(group, prices)) for group in workers]
    if not known or any(price.spot is None for _, price in known):
        return None
    saved = NOTHING
    for group, price in known:
        lowest, highest = price.spot or (price.hour, price.hour)
        each = Interval(max(price.hour - highest, 0.0), max(price.hour - lowest, 0.0))
        saved += each * _flat(group.count)
    return saved * hours


def _price(group: Nodes, prices: PriceList) -> TypePrice:
    price = prices.of(group.type)
    assert price is not None, "estimate() has looked"
    return price


def _flat(amount: float) -> Interval:
    return Interval(amount, amount)


def _sum(amounts: Iterable[Interval]) -> Interval:
    total = NOTHING
    for amount in amounts:
        total += amount
    return total
