"""How many nodes a run should have now: pure, from the wish, what is there and what is left.

`workers` is a wish. A run goes on with the nodes that there are; others are added when they can be
had, lost ones are replaced, and idle ones are removed once there is less to do than they could.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

GONE = ("off", "failed", "stopped", "unconfigured")  # as IM calls nodes that will not work any more
UP = "configured"
# For a moment when a cloud does not answer, and for ever of what it has no more.
UNKNOWN = "unknown"
IDLE_S = 60.0  # a node that has had nothing to do for so long is removed
MAKING = ("pending", "running")  # not configured yet
MAKING_S = 1800.0  # a node that is not configured after so long never will be
MISSING_S = 300.0  # a node that the head does not see for so long is given up
BACKOFF_S, LONGEST_BACKOFF_S = 30.0, 900.0


@dataclass(frozen=True)
class Node:
    """A worker node as IM and the head know it; durations in seconds."""

    number: str
    name: str
    state: str
    idle_s: float = 0.0
    """For how long the head has seen it without a task."""
    missing_s: float = 0.0
    """For how long the head has not seen it, though it is configured or of unknown state."""
    making_s: float = 0.0
    """For how long it has been there and was not configured."""


@dataclass(frozen=True)
class Situation:
    """All that decides."""

    wish: int
    left: int
    """Slots that tasks could use at a time from now on."""
    slots: int
    """Tasks that one node runs at a time."""
    nodes: tuple[Node, ...]
    busy: bool = False
    """IM makes or configures nodes."""
    failures: int = 0
    """How often in a row nodes could not be added."""
    since_failure_s: float = 0.0
    together: int = 0
    """Those of `left` that are of tasks on several nodes: each takes a node of its own."""


@dataclass(frozen=True)
class Actions:
    """What is to be done; nodes by their numbers."""

    remove: tuple[str, ...] = ()
    add: int = 0


def decide(now: Situation) -> Actions:
    """What to do next. Lost nodes are removed before others are added in their place: IM would try
    to configure them, too. IM is left alone while it is busy, but for lost nodes."""
    lost = tuple(node.number for node in now.nodes if is_lost(node))
    there = [node for node in now.nodes if node.number not in lost]
    needed = nodes_needed(now)
    missing = needed - len(there)
    if missing > 0:
        may = not now.busy and now.since_failure_s >= backoff_s(now.failures)
        return Actions(lost, missing if may else 0)
    if now.busy:
        return Actions(lost)
    idle = [node.number for node in there if node.state == UP and node.idle_s >= IDLE_S]
    newest = sorted(idle, key=int, reverse=True)
    return Actions((*lost, *newest[: len(there) - needed]))


def is_lost(node: Node) -> bool:
    """Whether a node will run no task any more."""
    late = node.missing_s >= MISSING_S or node.making_s >= MAKING_S
    return node.state in GONE or late


def nodes_needed(now: Situation) -> int:
    """As many as there are tasks for, and no more than are wished for; one while there is any."""
    return min(now.wish, max(now.together, -(-now.left // max(1, now.slots))))


def backoff_s(failures: int) -> float:
    """How long to wait after so many failures in a row before nodes are asked for again."""
    return min(BACKOFF_S * 2 ** (failures - 1), LONGEST_BACKOFF_S) if failures else 0.0


class Clocks:
    """For how long something has been so, by the name of what it is of."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}

    def update(self, holds: Mapping[str, bool], now: float) -> dict[str, float]:
        """Seconds since it holds without a break; those for which it does not are absent."""
        self._since = {
            name: self._since.get(name, now) for name, holding in holds.items() if holding
        }
        return {name: now - since for name, since in self._since.items()}
