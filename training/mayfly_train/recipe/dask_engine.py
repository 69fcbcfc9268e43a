"""The engine on Dask distributed. Of Dask only placement and liveness are used, never results."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from distributed import Client, Future
from distributed.scheduler import KilledWorker

from mayfly_train.errors import NodeError
from mayfly_train.recipe import attempt, dask_settings, dask_task
from mayfly_train.recipe.attempt import Job
from mayfly_train.recipe.document import Hardware
from mayfly_train.recipe.engine import ENDED, LOST, RETURNED, STARTED, Member, Report

SCAN_S = 0.2
MEMBERS_S = 1.0
EVENT_LATE_S = 3.0
SCHEDULER_GONE_S = 15.0
BATCH_S = 0.005
CANCEL_IDLE_S = 2.0
TOGETHER_S, MOST_TOGETHER, SMOOTHING = 1.0, 16, 0.1


class DaskEngine:
    """Attempts as Dask tasks whose key is the attempt's name."""

    def __init__(self, scheduler: str, tls: Path, alike: bool = False) -> None:
        """Connect. `alike` says that every task takes one slot and nothing else counts, which
        spares the scheduler work. Raises NodeError when there is no scheduler, or it does not know
        our key."""
        dask_settings.apply()
        try:
            self._client = Client(
                scheduler, security=dask_settings.security(tls), set_as_default=False, timeout=30
            )
        except (OSError, TimeoutError) as error:
            raise NodeError(f"no engine at {scheduler}: {error} — is its scheduler up?") from error
        self._alike = alike
        self._futures: dict[str, Future] = {}  # by the name of a group's first attempt
        self._groups: dict[str, list[str]] = {}  # attempts of a group that have not ended
        self._group_of: dict[str, str] = {}
        self._started: dict[str, str] = {}
        self._finished: dict[str, float] = {}
        self._cancelled: set[str] = set()
        self._cancel_idle_at: float | None = None
        self._mean_s: dict[str, float] = {}  # of an experiment's tasks
        self._news: queue.SimpleQueue[list[dict[str, Any]]] = queue.SimpleQueue()
        self._members: list[Member] = []
        self._asked = self._scanned = 0.0
        self._alive = time.monotonic()
        self._client.subscribe_topic(dask_settings.TOPIC, lambda event: self._news.put(event[1]))

    def submit(self, jobs: Sequence[Job], wanted: Hardware) -> None:
        for urgent in (True, False):
            if chosen := [job for job in jobs if job.urgent == urgent]:
                self._submit(chosen, wanted, priority=int(urgent))

    def _submit(self, jobs: Sequence[Job], wanted: Hardware, priority: int) -> None:
        resources: dict[str, float] = {"cpus": wanted.cpus}
        if wanted.memory:
            resources["memory"] = wanted.memory
        if wanted.gpus:
            resources["gpus"] = wanted.gpus
        if wanted.nodes > 1:
            resources["together"] = 1
        # Few tasks are spread: no slot has several while others have none.
        slots = sum(member.slots for member in self._members) or 1
        most = self.together(jobs[0].task["experiment"]) if wanted.nodes == 1 else 1
        size = max(1, min(most, -(-len(jobs) // slots)))
        groups = [list(jobs[start : start + size]) for start in range(0, len(jobs), size)]
        keys = [group[0].attempt for group in groups]
        futures = self._client.map(
            dask_task.run_jobs,
            [[job.to_json() for job in group] for group in groups],
            key=keys,
            pure=False,
            retries=0,
            priority=priority,
            resources=None if self._alike else resources,
        )
        self._futures.update(zip(keys, futures))
        for key, group in zip(keys, groups):
            self._groups[key] = [job.attempt for job in group]
            self._group_of.update((job.attempt, key) for job in group)

    def together(self, experiment: str) -> int:
        """So many that they take a second: the way to Dask and back, in which a slot has nothing,
        is then shared, and no slot has much to do while others have nothing."""
        mean_s = self._mean_s.get(experiment, TOGETHER_S)
        return max(1, min(MOST_TOGETHER, int(TOGETHER_S / mean_s)))

    def wait(self, timeout_s: float) -> list[Report]:
        """News of workers, and what the state of futures says of those that are silent.

        Raises NodeError when the scheduler has been gone for long.
        """
        reports: list[Report] = []
        end = time.monotonic() + timeout_s
        while not reports and (left := end - time.monotonic()) > 0:
            reports = self._heard(min(left, SCAN_S))
            if time.monotonic() - self._scanned >= SCAN_S:
                reports += self._scan()
        return reports

    def _heard(self, timeout_s: float) -> list[Report]:
        found: list[Report] = []
        with contextlib.suppress(queue.Empty):
            found += self._reports(self._news.get(timeout=timeout_s))
            if found:
                time.sleep(BATCH_S)  # others follow; handling them together is cheaper
            while True:
                found += self._reports(self._news.get_nowait())
        return found

    def _reports(self, news: list[dict[str, Any]]) -> list[Report]:
        return [report for message in news for report in self._report(message)]

    def _report(self, message: dict[str, Any]) -> list[Report]:
        name, kind, node = message["attempt"], message["kind"], message["node"]
        if name not in self._group_of:
            return []
        if kind == STARTED:
            self._started[name] = node
            return [Report(name, STARTED, node)]
        outcome = message["outcome"]
        self._learn(outcome)
        self._forget(name)
        return [Report(name, ENDED, node, outcome)]

    def _learn(self, outcome: Mapping[str, Any]) -> None:
        """How long an experiment's tasks take; it says nothing of those of another one."""
        if "seconds" in outcome:
            experiment = outcome["task"].partition("/")[0]
            mean_s = self._mean_s.get(experiment, TOGETHER_S)
            self._mean_s[experiment] = mean_s + SMOOTHING * (outcome["seconds"] - mean_s)

    def _scan(self) -> list[Report]:
        """Attempts that Dask has given up, and ended ones whose event did not come."""
        now = self._scanned = time.monotonic()
        if self._client.status == "running":
            self._alive = now
        elif now - self._alive > SCHEDULER_GONE_S:
            raise NodeError("the engine's scheduler is gone — resume the run")
        if self._cancel_idle_at is not None and now > self._cancel_idle_at:
            self._cancel_idle()
        found = []
        for key, future in list(self._futures.items()):
            status = future.status
            if status == "pending":
                continue
            if status == "finished" and (now - self._finished.setdefault(key, now) < EVENT_LATE_S):
                continue
            for name in list(self._groups[key]):
                if status == "finished":
                    found.append(Report(name, ENDED, self._started.get(name, "")))
                else:
                    found.append(self._given_up(name, future))
                self._forget(name)
        return found

    def _given_up(self, name: str, future: Future) -> Report:
        node = self._started.get(name, "")
        if future.status == "cancelled" and name in self._cancelled:
            return Report(name, LOST, node, message="cancelled")
        error = future._state.exception  # at hand; asking for it would be a request
        if error is not None and not isinstance(error, KilledWorker):
            outcome = {"state": attempt.BROKEN, "attempt": name, "message": f"engine: {error}"}
            return Report(name, ENDED, node, outcome)
        if node:
            return Report(name, LOST, node, message=f"node {node} was lost")
        return Report(name, RETURNED, message="its node was lost before it started")

    def _forget(self, name: str) -> None:
        self._started.pop(name, None)
        key = self._group_of.pop(name)
        self._groups[key].remove(name)
        if not self._groups[key]:
            del self._groups[key]
            self._finished.pop(key, None)
            self._futures.pop(key).release()

    def cancel(self, attempts: Iterable[str]) -> None:
        """Tell all workers, in a thread of its own: one that is dead must not hold up the head."""
        names = list(attempts)
        if names:
            self._cancelled.update(names)
            self._cancel_idle_at = time.monotonic() + CANCEL_IDLE_S
            self._in_thread(self._client.run, dask_task.cancel_here, names, on_error="ignore")

    def _in_thread(self, function: Callable[..., Any], *words: Any, **more: Any) -> None:
        def call() -> None:
            with contextlib.suppress(Exception):  # a worker that is gone runs nothing
                function(*words, **more)

        threading.Thread(target=call, name="cancel", daemon=True).start()

    def _cancel_idle(self) -> None:
        """Take back from Dask what no worker has started, and so will not report."""
        self._cancel_idle_at = None
        idle = [
            self._futures[key]
            for key, group in self._groups.items()
            if set(group) <= self._cancelled and not self._started.keys() & set(group)
        ]
        self._in_thread(self._client.cancel, idle)

    def members(self) -> list[Member]:
        now = time.monotonic()
        if now - self._asked < MEMBERS_S:
            return self._members
        self._asked = now
        try:
            ask = self._client.scheduler.identity
            identity = self._client.sync(ask, n_workers=-1, callback_timeout=5)
        except Exception:  # noqa: BLE001 (any failed request: what was known stays)
            return self._members
        self._members = [_member(each) for each in identity["workers"].values()]
        return self._members

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self._client.close(timeout=5)


def _member(worker: dict[str, Any]) -> Member:
    has = worker["resources"]
    return Member(
        name=str(worker["name"]),
        slots=worker["nthreads"],
        cpus=has.get("cpus", worker["nthreads"]),
        memory=int(has.get("memory", 0)),
        gpus=int(has.get("gpus", 0)),
        together=int(has.get("together", 1)),
    )
