"""What a run has cost so far, what it will have cost, and when its budget ends it: arithmetic only.

Everything follows from the prices of the plan, which are kept with the run, and from the time since
its nodes were asked for. Spot nodes count by their highest price, so the truth is not above it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from typing import Any

from mayfly.cost import ENDING_S, PREPARATION_S, Estimate
from mayfly.errors import OverBudget
from mayfly.spec import Budget

HOUR_S = 3600.0


@dataclass(frozen=True)
class Basis:
    """What a run's cost is computed from; money in `currency`."""

    currency: str
    per_hour: float
    """All nodes with their disks and addresses, at most."""
    once: float
    """What does not depend on the time: what leaves the region, at most."""
    budget: float | None
    train_s: int | None
    """When training has to stop, in seconds since the nodes were made; None without a budget."""
    end_s: int | None
    """When the nodes have to be gone."""
    prices: Mapping[str, Any] = field(default_factory=dict)
    """The prices that were used, their date and source."""
    before: float = 0.0
    """What offers have cost that were tried before this one."""

    def document(self) -> dict[str, Any]:
        """Return it as the ledger keeps it."""
        return asdict(self)

    @classmethod
    def of(cls, document: Mapping[str, Any] | None) -> Basis | None:
        """Return the basis in a ledger's record; None for a run that has none."""
        return cls(**document) if document else None


def make_basis(estimate: Estimate, budget: Budget | None, prices: Mapping[str, Any]) -> Basis:
    """Return the basis of a plan. Raises OverBudget for a budget that leaves no time to train."""
    amount = budget.amount if budget else None
    hourly, once = estimate.per_hour.high, estimate.parts["transfer"].high
    return _capped(Basis(estimate.currency, hourly, once, amount, None, None, prices))


def after(basis: Basis, paid: float) -> Basis:
    """Return the basis of an offer before which others have cost so much. Raises OverBudget."""
    return _capped(replace(basis, before=paid))


def _capped(basis: Basis) -> Basis:
    """The basis with the times that follow from its budget.

    From the end of what the budget pays, ten minutes are kept for export and destroy.
    """
    if basis.budget is None or not basis.per_hour:
        return replace(basis, train_s=None, end_s=None)
    fixed = basis.once + basis.before
    end_s = int(max(0.0, basis.budget - fixed) / basis.per_hour * HOUR_S)
    train_s = int(end_s - ENDING_S[1])
    if train_s <= PREPARATION_S[0]:
        needed = fixed + (PREPARATION_S[0] + ENDING_S[1] + 60) / HOUR_S * basis.per_hour
        raise OverBudget(
            f"limits.budget is {basis.budget:g} {basis.currency}, which pays for {end_s // 60}"
            " minutes: no time to train is left, as 10 are kept for export and destroy, and"
            f" {fixed:.2f} for what leaves the region and was spent before",
            f"allow {needed:.2f} {basis.currency} or more, or ask for fewer or smaller nodes",
        )
    return replace(basis, train_s=train_s, end_s=end_s)


def spent(basis: Basis, seconds: float) -> float:
    """Return the cost of nodes that have been there for so long."""
    return basis.per_hour * max(0.0, seconds) / HOUR_S


def remaining(state: str, eta_s: float | None, trained_s: float, max_duration_s: float) -> float:
    """Return how many seconds a run will still need: as it tells, or as long as it may."""
    if state in ("succeeded", "stopped", "failed"):
        return ENDING_S[0]
    if state in ("stopping", "exporting"):
        return ENDING_S[1]
    if eta_s is not None:
        return eta_s + ENDING_S[1]
    return max(0.0, max_duration_s - trained_s) + ENDING_S[1]


def cost_document(basis: Basis, seconds: float, left: float | None) -> dict[str, Any]:
    """Return `cost` of --json; `left` is None once the nodes are gone."""
    now = basis.before + spent(basis, seconds)
    whole = now if left is None else now + spent(basis, left) + basis.once
    return {
        "spent": round(now, 4),
        "forecast": round(whole, 4),
        "budget": basis.budget,
        "currency": basis.currency,
    }


def describe(cost: Mapping[str, Any]) -> str:
    """Return a cost document on one line: `0.12 of 5 USD spent, 0.40 at the end`."""
    of = f" of {cost['budget']:g}" if cost["budget"] is not None else ""
    line = f"{_money(cost['spent'])}{of} {cost['currency']} spent"
    if cost["forecast"] > cost["spent"]:
        line += f", {_money(cost['forecast'])} at the end"
    if cost["budget"] is not None and cost["forecast"] > cost["budget"]:
        line += ": it will be stopped before"
    return line


def _money(amount: float) -> str:
    return f"{amount:.2f}" if amount >= 1 or not amount else f"{amount:.3f}"


def lifetime_s(journal: Iterable[Any], destroyed: bool, now: datetime) -> float:
    """Return for how long a run's nodes have been there, from its journal.

    Time counts from when they were asked for, which is before anybody is paid; of several offers
    that were tried only the last, as the others are in the basis. Nodes are gone when IM, or our
    own sweep, has removed the last of them.
    """
    creates = [entry.intended for entry in journal if entry.action == "create"]
    gone = ("destroy", "remove")
    ends = [e.ended for e in journal if e.action in gone and e.outcome == "done" and e.ended]
    if not creates:
        return 0.0
    end = datetime.fromisoformat(max(ends)) if destroyed and ends else now
    return max(0.0, (end - datetime.fromisoformat(max(creates))).total_seconds())
