"""What runs attempts: the interface, and an engine for tests that runs them in this process."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from mayfly_train.recipe import attempt
from mayfly_train.recipe.attempt import Job, Node
from mayfly_train.recipe.document import Hardware

STARTED, ENDED, LOST, RETURNED = "started", "ended", "lost", "returned"


@dataclass(frozen=True)
class Report:
    """News of an attempt: it has started on a node, has ended with an outcome, is lost with its
    node, or comes back because its node was lost before it started.

    An `ended` one without an outcome has left its marker or its record in the store.
    """

    attempt: str
    kind: str
    node: str = ""
    outcome: Mapping[str, Any] | None = None
    message: str = ""


@dataclass(frozen=True)
class Member:
    """A worker and what it has; memory in bytes."""

    name: str
    slots: int
    cpus: float
    memory: int
    gpus: int
    together: int = 1
    """How many members of tasks on several nodes it takes: on a node it is one."""

    def room(self, wanted: Hardware) -> int:
        """How many tasks with these wishes it runs at a time, when it does nothing else."""
        parts = [self.slots, int(self.cpus / wanted.cpus)]
        if wanted.memory:
            parts.append(self.memory // wanted.memory)
        if wanted.gpus:
            parts.append(self.gpus // wanted.gpus)
        if wanted.nodes > 1:
            parts.append(self.together)
        return min(parts)


class Engine(Protocol):
    """Runs attempts somewhere. It may lose them and forget them; it keeps nothing."""

    def submit(self, jobs: Sequence[Job], wanted: Hardware) -> None:
        """Take attempts; they start when there is room."""

    def wait(self, timeout_s: float) -> list[Report]:
        """What has happened since; waits for something to happen."""

    def together(self, experiment: str) -> int:
        """How many of an experiment's attempts a slot takes at a time: more than one when they are
        short."""

    def cancel(self, attempts: Iterable[str]) -> None:
        """End attempts, wherever they are; those that run report how they have ended."""

    def members(self) -> list[Member]:
        """The workers that there are now."""

    def close(self) -> None:
        """End everything."""


class InProcessEngine:
    """Runs attempts in threads of this process: the tests' engine."""

    def __init__(self, node: Node, slots: int = 2, cpus: float = 8, memory: int = 8 << 30) -> None:
        self.node = node
        self._member = Member(node.name, slots, cpus, memory, 0, together=slots)
        self._pool = ThreadPoolExecutor(slots)
        self._news: queue.SimpleQueue[Report] = queue.SimpleQueue()
        self._closed = threading.Event()

    def submit(self, jobs: Sequence[Job], wanted: Hardware) -> None:  # noqa: ARG002
        for job in jobs:
            self._pool.submit(self._run, job)

    def _run(self, job: Job) -> None:
        if job.attempt in self.node.cancelled or self._closed.is_set():
            self._news.put(Report(job.attempt, LOST, message="cancelled"))
            return
        self._news.put(Report(job.attempt, STARTED, self.node.name))
        outcome = attempt.run(job, self.node)
        self._news.put(Report(job.attempt, ENDED, self.node.name, outcome))

    def wait(self, timeout_s: float) -> list[Report]:
        found: list[Report] = []
        try:
            found.append(self._news.get(timeout=timeout_s))
            while True:
                found.append(self._news.get_nowait())
        except queue.Empty:
            return found

    def together(self, experiment: str) -> int:  # noqa: ARG002
        return 1

    def cancel(self, attempts: Iterable[str]) -> None:
        self.node.cancelled.update(attempts)

    def members(self) -> list[Member]:
        return [self._member]

    def close(self) -> None:
        self._closed.set()
        self.node.closing.set()
        self._pool.shutdown(wait=True)


def slots_for(members: Iterable[Member], wanted: Hardware) -> int:
    """How many tasks with these wishes run at a time on all workers."""
    return sum(member.room(wanted) for member in members)


def why_no_room(members: Sequence[Member], wanted: Hardware) -> str:
    """What a task waits for when no worker has what it wants; empty when one has."""
    if not members:
        return "waits for a node: there is none"
    if slots := slots_for(members, wanted):
        few = f"waits for {wanted.nodes} nodes at once: there is room on {slots}"
        return few if slots < wanted.nodes else ""
    most: dict[str, tuple[Any, Any]] = {
        "cores": (wanted.cpus, max(member.cpus for member in members)),
        "GPUs": (wanted.gpus, max(member.gpus for member in members)),
    }
    for what, (want, have) in most.items():
        if want > have:
            return f"waits for a node with {want:g} {what}: the largest has {have:g}"
    if wanted.memory > (largest := max(member.memory for member in members)):
        want, have = (f"{size / (1 << 30):.1f}" for size in (wanted.memory, largest))
        return f"waits for a node with {want} GiB of memory: the largest has {have}"
    return "waits for a node that has all it wants"
