"""What a run would be made of and what it would cost: pure, from what is known beforehand."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date
from typing import Any

from mayfly import cost, spending
from mayfly.clouds import CloudProfile, Resource, notices
from mayfly.collection import DIRECTORY, elsewhere
from mayfly.errors import OverBudget
from mayfly.node_types import Nodes, type_notices
from mayfly.places import Place, Target, missing_notices
from mayfly.prices import STALE_DAYS, Found
from mayfly.spec import Budget, ClusterSpec, Limits


@dataclass(frozen=True)
class Plan:
    """A run before it exists."""

    spec: ClusterSpec
    profile: CloudProfile
    place: Place
    nodes: tuple[Nodes, ...]
    estimate: cost.Estimate | None
    found: Found | None
    """Where the prices are from."""
    why_unknown: str | None
    """Why there is no estimate; None when there is one, or nodes cost nothing."""
    notices: tuple[str, ...]
    basis: spending.Basis | None = None
    """What the run's cost is computed from while it goes on; None where no price is known."""

    @property
    def free(self) -> bool:
        """Nobody is paid for the nodes; a price list of the user's says otherwise."""
        return self.profile.prices == "free" and self.found is None


def make_plan(
    target: Target, nodes: tuple[Nodes, ...], found: Found | None, why: str, today: date
) -> Plan:
    """Return the plan; `why` says why there are no prices, when there are none.

    Raises OverBudget for a budget that cannot be kept: no price, another currency, or less than the
    least that the run can cost.
    """
    spec, profile, place = target.spec, target.profile, target.place
    estimate = None
    if found is not None:
        hours = cost.duration(spec.limits.expected, spec.limits.max_duration)
        estimate = cost.estimate(nodes, found.prices, hours)
        missing = ", ".join(cost.unpriced(nodes, found.prices))
        why = f"{found.origin} has no price of {missing}"
    free = profile.prices == "free" and found is None
    said = [*notices(spec, profile), *missing_notices(place, profile), *_no_bucket(spec)]
    said += _about_roles(spec, profile)
    said += type_notices(nodes, profile)
    if found is not None and not free:
        said += _about_prices(found, today, estimate, any(group.spot for group in nodes))
    if spec.limits.budget is not None and not free:
        said += _about_budget(spec.limits.budget, estimate, why)
    unknown = None if free or estimate is not None else why
    basis = None
    if estimate is not None and found is not None:
        basis = spending.make_basis(estimate, spec.limits.budget, _used(nodes, found))
        said += _about_stop(basis, spec.limits)
    return Plan(spec, profile, place, nodes, estimate, found, unknown, tuple(said), basis)


def created(plan: Plan) -> dict[str, int]:
    """Return how many things of each kind the run makes at the provider and in the bucket."""
    every = sum(group.count for group in plan.nodes)
    public = sum(group.count for group in plan.nodes if group.public)
    counts = {"node": every, "public_node": public, "run": 1}

    def number(resource: Resource) -> int:
        return resource.count * counts[resource.per]

    things = {resource.kind: number(resource) for resource in plan.profile.creates}
    return {
        **{kind: count for kind, count in things.items() if count},
        "directory in the bucket": 1,
    }


def document(plan: Plan) -> dict[str, Any]:
    """Return the plan as JSON takes it; money in the currency of `price`, durations in seconds."""
    limits = plan.spec.limits
    return {
        "cloud": plan.profile.name,
        "region": plan.place.region,
        "nodes": {group: plan.spec.count(group) for group in ("ps", "worker")},
        "groups": [_group(group, plan) for group in plan.nodes],
        "price": _price(plan),
        "creates": created(plan),
        "limits": {
            "budget": str(limits.budget) if limits.budget else None,
            "max_duration": limits.max_duration,
            "expected": limits.expected,
            "idle": limits.idle,
        },
        "notices": list(plan.notices),
        "exercised": plan.profile.exercised,
    }


def _group(group: Nodes, plan: Plan) -> dict[str, Any]:
    size = group.size
    price = plan.found.prices.of(group.type) if plan.found else None
    return {
        "group": group.group,
        "count": group.count,
        "type": group.type,
        "cpu": size.cpu if size else None,
        "memory_mb": size.memory_mb if size else None,
        "gpu": max(group.gpu, size.gpu) if size else group.gpu or None,
        "gpu_model": size.gpu_model if size else None,
        "at_least": size is not None and group.type is None,
        "disk_gb": group.disk_gb,
        "spot": group.spot,
        "public_address": group.public,
        "price_per_hour": price.hour if price else None,
        "spot_price_per_hour": list(price.spot) if price and price.spot else None,
    }


def _price(plan: Plan) -> dict[str, Any]:
    if plan.free:
        return {"known": True, "free": True}
    estimate, found = plan.estimate, plan.found
    if estimate is None or found is None:
        return {"known": False, "free": False, "why": plan.why_unknown}
    return {
        "known": True,
        "free": False,
        "currency": estimate.currency,
        "per_hour": _pair(estimate.per_hour),
        "hours": _pair(estimate.hours),
        "run": _pair(estimate.run),
        "parts": {name: _pair(amount) for name, amount in estimate.parts.items()},
        "not_included": list(estimate.missing),
        "spot_saves": _pair(estimate.spot_saves) if estimate.spot_saves else None,
        "date": found.prices.date.isoformat(),
        "source": found.prices.source,
        "file": found.origin,
    }


def _pair(amount: cost.Interval) -> list[float]:
    return [round(amount.low, 4), round(amount.high, 4)]


def _no_bucket(spec: ClusterSpec) -> list[str]:
    if "@" not in str(spec.model.destination):
        return []
    return ["no bucket for the model: deploy needs --bucket, model.destination or MAYFLY_BUCKET"]


def _about_roles(spec: ClusterSpec, profile: CloudProfile) -> list[str]:
    """Where nodes get the roles from, where that is in the user's own bucket."""
    if profile.collection != "bucket" or elsewhere(spec) is not None:
        return []
    where = f"{spec.model.destination}{DIRECTORY}"
    return [
        f"this checkout's roles are put into {where} by deploy; nodes fetch them there by a signed"
        " URL, which holds for 7 days, and no longer than temporary keys"
    ]


def _about_prices(
    found: Found, today: date, estimate: cost.Estimate | None, spot: bool
) -> list[str]:
    said = []
    if found.prices.is_stale(today):
        said.append(
            f"the prices are {found.prices.age(today)} days old, which is more than {STALE_DAYS}:"
            " fetch them with `mayfly prices update`"
        )
    if estimate and estimate.missing:
        said.append(f"not in the price, for want of one: {', '.join(estimate.missing)}")
    if estimate and spot and estimate.spot_saves is None:
        said.append("there is no spot price: spot nodes are counted as if on demand")
    return said


def _about_budget(budget: Budget, estimate: cost.Estimate | None, why: str) -> list[str]:
    """What a budget means for the plan; raises OverBudget where it cannot be kept."""
    if estimate is None:
        raise OverBudget(
            f"limits.budget is {budget}, and the price is unknown: {why}",
            "give prices, or no budget",
        )
    if budget.currency != estimate.currency:
        raise OverBudget(
            f"limits.budget is {budget}, and the prices are in {estimate.currency}",
            f"write the budget in {estimate.currency}",
        )
    least = estimate.run.low
    if budget.amount < least:
        raise OverBudget(
            f"limits.budget is {budget}, and the run costs {least:.2f} {budget.currency} at least",
            "allow more, ask for fewer nodes or smaller types, or lower limits.expected",
        )
    if budget.amount < estimate.run.high:
        up_to = f"{estimate.run.high:.2f} {budget.currency}"
        return [f"the run may cost up to {up_to}, and is stopped at the budget of {budget}"]
    return []


def _about_stop(basis: spending.Basis, limits: Limits) -> list[str]:
    """When the budget ends training, if it does so before max_duration."""
    if basis.train_s is None or basis.train_s > cost.PREPARATION_S[1] + limits.max_duration:
        return []
    return [
        f"training is stopped {basis.train_s // 60} minutes after the nodes were made, with a"
        " checkpoint, so that export and destroy are paid by the budget, too"
    ]


def _used(nodes: tuple[Nodes, ...], found: Found) -> dict[str, Any]:
    """The prices that the plan is made of, as the ledger keeps them with the run."""
    whole = found.prices.model_dump(mode="json", exclude_none=True)
    types = {group.type for group in nodes}
    own = {name: price for name, price in whole.get("types", {}).items() if name in types}
    return {**whole, "types": own, "file": found.origin}
