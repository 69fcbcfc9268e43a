"""What the head of a run on nodes tells the control side: how far it is, and what each node does.

The control side adds and removes nodes by it, and shows it; it asks nobody else.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mayfly_train.errors import NodeError
from mayfly_train.recipe import names
from mayfly_train.recipe.document import Experiment, Recipe
from mayfly_train.recipe.engine import Member, slots_for
from mayfly_train.recipe.ledger import RUNNING, Ledger
from mayfly_train.recipe.shape import node_of
from mayfly_train.recipe.space import Space
from mayfly_train.recipe.stage import SETTLED
from mayfly_train.recipe.store import Store, to_bytes

EVERY_S = 10.0  # without news
OVER = ("done", "stopped", "failed")


class Progress:
    """Writes `nodes/progress.json`: when something has changed, and now and then."""

    def __init__(
        self,
        recipe: Recipe,
        store: Store,
        ledger: Ledger,
        members: Callable[[], list[Member]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._recipe, self._store, self._ledger = recipe, store, ledger
        self._members, self._clock = members, clock
        self._last: Mapping[str, Any] | None = None
        self._written = 0.0

    def show(self, experiments: list[dict[str, Any]]) -> None:
        """Tell where experiments are. A store that fails is asked again the next time."""
        running: Counter[str] = Counter()
        for each in experiments:
            if each["states"].get(RUNNING):
                running.update(self._ledger.running_on(each["name"]))
        members = self._members()
        left = slots_left(self._recipe, experiments, members)
        document = {
            "experiments": experiments,
            "left": sum(left.values()),
            "together": sum(left[name] for name in left if self._takes_nodes(name)),
            "nodes": nodes(members, running),
        }
        if document == self._last and self._clock() - self._written < EVERY_S:
            return
        with contextlib.suppress(NodeError):
            self._store.write(names.PROGRESS, to_bytes({**document, "time": time.time()}))
            self._last, self._written = document, self._clock()

    def _takes_nodes(self, experiment: str) -> bool:
        """Whether its tasks take several nodes; with GPUs they take several of these."""
        wanted = self._recipe.experiment(experiment).hardware
        return wanted.nodes > 1 and not wanted.gpus


def nodes(members: Sequence[Member], running: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """How many tasks each node can run at a time, and how many it does, by the node's name."""
    found: dict[str, dict[str, int]] = {}
    for member in members:
        node = found.setdefault(node_of(member.name), {"slots": 0, "running": 0})
        node["slots"] += member.slots
        node["running"] += running.get(member.name, 0)
    return found


def slots_left(
    recipe: Recipe, experiments: Sequence[Mapping[str, Any]], members: Sequence[Member] = ()
) -> dict[str, int]:
    """How many slots each experiment that is not over could use at a time from now on, if there
    were nodes for all of its tasks: one for each, or for each of a task's nodes.

    Of an experiment that others go before, and whose files nobody knows yet, it is as many as run
    at a time on all nodes; no experiment runs more at a time than its `workers`.
    """
    left = {}
    for each in experiments:
        experiment = recipe.experiment(each["name"])
        if each["state"] in SETTLED:
            continue
        nodes = experiment.hardware.nodes
        if each["tasks"] is None:
            room = max(1, slots_for(members, experiment.hardware) // nodes)
            count = planned_count(experiment) or room
        else:
            count = each["tasks"] - sum(each["states"].get(state, 0) for state in OVER)
        most = min(count, experiment.workers) if experiment.workers else count
        left[experiment.name] = most * nodes
    return left


@functools.lru_cache
def planned_count(experiment: Experiment) -> int | None:
    """How many tasks an experiment will have that is not expanded yet; None when files decide."""
    if any(each.kind == "glob" for each in experiment.parameters):
        return experiment.samples or None
    return Space(experiment.parameters, experiment.samples, experiment.search.seed).count
