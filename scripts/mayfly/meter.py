"""Watches what a run costs while it goes on, and ends it when its budget does.

The nodes stop the training themselves (`mayfly_train.caps`); this is for the time before training,
and for nodes that do not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from mayfly.cost import ENDING_S
from mayfly.errors import LimitReached
from mayfly.ledger import Entry, Record
from mayfly.spending import Basis, after, cost_document, describe, lifetime_s, remaining, spent
from mayfly.watch import Pace, Status


class Meter:
    """Counts from `begin`, which is called just before nodes are asked for; times in seconds.

    Without a basis it knows no price, and never ends anything.
    """

    def __init__(
        self, basis: Basis | None, max_duration_s: float, clock: Callable[[], float]
    ) -> None:
        self._basis = basis
        self._max_duration_s = max_duration_s
        self._clock = clock
        self._began: float | None = None

    def begin(self) -> None:
        """Start to count, unless it counts already."""
        self._began = self._clock() if self._began is None else self._began

    def switch(self, basis: Basis | None) -> Basis | None:
        """Go on with another offer, and return its basis with what those before have cost.

        Raises OverBudget when that leaves no time to train.
        """
        paid = self._basis.before + spent(self._basis, self.seconds()) if self._basis else 0.0
        self._basis = after(basis, paid) if basis else None
        self._began = None
        return self._basis

    def seconds(self) -> float:
        """Return for how long nodes have been there."""
        return 0.0 if self._began is None else self._clock() - self._began

    def document(self, status: Status | None, *, gone: bool = False) -> dict[str, Any] | None:
        """Return `cost` of --json, None where no price is known."""
        if self._basis is None:
            return None
        left = None if gone else _left(status, self._max_duration_s)
        return cost_document(self._basis, self.seconds(), left)

    def line(self, status: Status) -> str:
        """Return what is spent and expected, to be put behind a line of progress."""
        cost = self.document(status)
        return f" · {describe(cost)}" if cost else ""

    def over(self) -> bool:
        """Return whether the budget no longer pays for more training."""
        return self._past(self._basis.train_s if self._basis else None)

    def before_training(self, pace: Pace) -> Pace:
        """Return a pace that ends with LimitReached when no time to train is left."""
        return self._until(pace, self._basis.train_s if self._basis else None)

    def to_the_end(self, pace: Pace) -> Pace:
        """Return a pace that ends with LimitReached when nodes have to be destroyed now."""
        end = self._basis.end_s if self._basis else None
        return self._until(pace, None if end is None else end - ENDING_S[0])

    def _past(self, limit_s: float | None) -> bool:
        return limit_s is not None and self._began is not None and self.seconds() > limit_s

    def _until(self, pace: Pace, limit_s: float | None) -> Pace:
        def sleep(seconds: float) -> None:
            if self._basis is not None and self._past(limit_s):
                paid = self._basis.before + spent(self._basis, self.seconds())
                amount = f"{paid:.2f} {self._basis.currency}"
                budget = f"{self._basis.budget:g} {self._basis.currency}"
                raise LimitReached(
                    "budget",
                    f"the budget of {budget} is used up: {amount} are spent, and the rest is for"
                    " removing the nodes",
                    "allow more, or fewer or smaller nodes",
                )
            pace.sleep(seconds)

        return replace(pace, sleep=sleep)


def cost_of(
    record: Record, journal: Sequence[Entry], status: Status | None, now: datetime
) -> dict[str, Any] | None:
    """Return `cost` of a run of the ledger's, None where no price is known."""
    basis = Basis.of(record.cost)
    if basis is None:
        return None
    seconds = lifetime_s(journal, record.destroyed, now)
    limit = float(record.spec["limits"]["max_duration"])
    return cost_document(basis, seconds, None if record.destroyed else _left(status, limit))


def _left(status: Status | None, max_duration_s: float) -> float:
    if status is None:
        return remaining("starting", None, 0.0, max_duration_s)
    trained = status.phases.get("training") or 0.0
    return remaining(status.state, status.eta_s, trained, max_duration_s)
