"""The job's limits that end a run before its steps are done, in order: checkpoint, export, end.

A run that reaches one has not failed: it is stopped, and what there is of its model is exported.
"""

from __future__ import annotations

from dataclasses import dataclass

from mayfly_train.cluster import Cluster

BUDGET, MAX_DURATION, IDLE = "budget", "max_duration", "idle"


@dataclass(frozen=True)
class Stop:
    """Why and since when (seconds since 1970) a run is being stopped."""

    reason: str
    message: str
    at: float


@dataclass(frozen=True)
class Times:
    """Seconds since 1970: when the chief's node was made, training began, a step was last seen.

    `born` is None where it is not known, and then no budget can be kept from here.
    """

    born: float | None
    started: float
    stepped: float


def reached(cluster: Cluster, times: Times, now: float) -> Stop | None:
    """The limit that is reached, None while none is; of several the one that costs most."""
    if cluster.budget_s and times.born is not None and now - times.born > cluster.budget_s:
        spent = f"the nodes have been there for {cluster.budget_s} s"
        message = f"{spent}, and longer would cost more than limits.budget"
        return Stop(BUDGET, message, now)
    if now - times.started > cluster.max_duration_s:
        message = f"training took longer than limits.max_duration, {cluster.max_duration_s} s"
        return Stop(MAX_DURATION, message, now)
    if cluster.idle_s and now - times.stepped > cluster.idle_s:
        return Stop(IDLE, f"no step was made for limits.idle, {cluster.idle_s} s", now)
    return None
