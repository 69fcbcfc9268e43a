"""One experiment under way: which tasks come next, and whether it is over."""

from __future__ import annotations

import importlib
from collections import deque
from typing import Any, Protocol

from mayfly_train.errors import BadInput
from mayfly_train.recipe.document import MAXIMIZE, TPE, Experiment
from mayfly_train.recipe.expand import Expansion, Task
from mayfly_train.recipe.ledger import FAILED, FINISHED, RUNNING, WAITING, Ledger
from mayfly_train.recipe.space import Value

SETTLED = ("done", "failed", "skipped")
_GUIDED = "mayfly_train.recipe.guided"


class Sampler(Protocol):
    """Chooses values by what was found; `history` is in the order of numbers."""

    def ask(
        self, history: list[tuple[dict[str, Value], float | None]], numbers: range
    ) -> list[list[Value]]:
        """The values of these trials, in the order of the parameters."""


class Stage:
    """The tasks of an expanded experiment, in the order in which they are handed out."""

    def __init__(self, expansion: Expansion, ledger: Ledger) -> None:
        """Goes on where the ledger is. Raises BadInput when the sampler is not installed."""
        self.experiment = expansion.experiment
        self.running = 0
        self._expansion, self._ledger = expansion, ledger
        self._again: deque[int] = deque()  # numbers: it may be all of a million tasks
        self._returned: set[int] = set()
        self._waiting = 0  # of those that came back
        self._next = ledger.frozen(self.experiment.name)
        self._again.extend(ledger.numbers(self.experiment.name, (WAITING, RUNNING)))
        self._sampler = _sampler(self.experiment)

    @property
    def count(self) -> int:
        """How many tasks there are."""
        return self._expansion.count

    @property
    def over(self) -> bool:
        """Whether every task has ended for good."""
        return not self.running and not self._again and self._next >= self.count

    def take(self, most: int) -> list[Task]:
        """Up to so many tasks that may start now; new ones are frozen in the ledger."""
        found = [self._frozen(self._again.popleft()) for _ in range(min(most, len(self._again)))]
        self._waiting -= sum(map(self.was_out, found))
        self.running += len(found)  # before others: a generation waits for these
        if room := most - len(found):
            new = self._new(room)
            self.running += len(new)
            found += new
        return found

    def back(self, task: Task) -> None:
        """Take a task back, to hand it out again."""
        self.running -= 1
        self._again.appendleft(task.number)
        self._returned.add(task.number)
        self._waiting += 1

    def was_out(self, task: Task) -> bool:
        """Whether a task was handed out before, and came back."""
        return task.number in self._returned

    @property
    def returned(self) -> int:
        """How many that were handed out and came back are waiting."""
        return self._waiting

    def settle(self) -> None:
        """One task that was handed out has ended for good."""
        self.running -= 1

    def _frozen(self, number: int) -> Task:
        """A task that was handed out before, or is to be by an earlier head."""
        row = self._ledger.row(self.experiment.name, number)
        assert row is not None, "its number is of the ledger"
        return row.task

    def _new(self, most: int) -> list[Task]:
        stop = min(self._next + most, self.count)
        if self._sampler is not None:
            return self._generation(most)
        tasks = list(self._expansion.block(self._next, stop)) if stop > self._next else []
        self._ledger.freeze(tasks)
        self._next = max(self._next, stop)
        return tasks

    def _generation(self, most: int) -> list[Task]:
        """The next trials, when all before them have ended: results come in the trials' order.
        Those for which there is no room yet are kept for later."""
        if self.running or self._again or self._next >= self.count or self._sampler is None:
            return []
        stop = min(self._next + self.experiment.search.generation, self.count)
        history = [
            (dict(row.task.parameters), row.value if row.state in FINISHED else None)
            for row in self._ledger.rows(self.experiment.name)
        ]
        numbers = range(self._next, stop)
        values = self._sampler.ask(history, numbers)
        tasks = [self._expansion.with_values(n, v) for n, v in zip(numbers, values)]
        self._ledger.freeze(tasks)
        self._next = stop
        self._again.extend(numbers[most:])
        return tasks[:most]

    def verdict(self) -> tuple[str, str]:
        """Whether an experiment that is over is done or failed, and why."""
        name, search = self.experiment.name, self.experiment.search
        states = self._ledger.states(name)
        failed, finished = states.get(FAILED, 0), sum(states.get(s, 0) for s in FINISHED)
        message = f"{failed} of {self.count} tasks failed{self._first_cause()}" if failed else ""
        if not search.objective or not finished:
            return ("failed" if failed else "done"), message
        if self._ledger.best(name, search.direction == MAXIMIZE) is None:
            return "failed", f"no task reported {search.objective!r} as a number"
        return "done", message

    def _first_cause(self) -> str:
        """Why the first of the failed tasks did: most often all have the same reason."""
        row = next(self._ledger.rows(self.experiment.name, (FAILED,)))
        return f", {row.task.id}: {row.message}" if row.message else ""


def _sampler(experiment: Experiment) -> Sampler | None:
    if experiment.search.sampler != TPE:
        return None
    try:
        module: Any = importlib.import_module(_GUIDED)
    except ModuleNotFoundError as error:
        raise BadInput(
            f"sampler tpe needs the Python package {error.name} — install mayfly-training[recipe]"
        ) from None
    sampler: Sampler = module.TpeSampler(experiment)
    return sampler
