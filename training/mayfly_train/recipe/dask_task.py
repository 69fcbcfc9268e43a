"""The function that Dask runs on workers. It returns nothing: news travel as events."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from mayfly_train.recipe import attempt
from mayfly_train.recipe.attempt import Job, Node
from mayfly_train.recipe.engine import ENDED, STARTED

Emit = Callable[[list[Mapping[str, Any]]], None]
TOGETHER_S = 0.05
REST_S, MOST_REST_S = 0.25, 30.0


class Here:
    """What this worker process is; set once, before it has any task."""

    node: Node | None = None
    news: queue.SimpleQueue[Mapping[str, Any]] = queue.SimpleQueue()
    running = 0
    broken = 0  # attempts in a row that ended for the node's fault
    lock = threading.Lock()


def start(node: Node, emit: Emit) -> None:
    """Make this process a worker of this node, whose news `emit` takes, several at a time."""
    Here.node = node
    threading.Thread(target=_tell, args=(emit,), name="news", daemon=True).start()


def _tell(emit: Emit) -> None:
    """Pass news on. A message costs more than what is in it, so they wait for each other."""
    while True:
        news = [Here.news.get()]
        time.sleep(TOGETHER_S)
        while not Here.news.empty():
            news.append(Here.news.get())
        emit(news)


def run_jobs(jobs: list[Mapping[str, Any]]) -> None:
    """Run attempts one after another on this worker; short ones come several at a time.

    What this node cannot run goes back at once, for others to run. While its disk is full that is
    everything, and counts for nothing: others may be busy for longer than retries last.
    """
    able = Here.node is None or Here.node.has_room()
    why = "not begun" if able else f"not begun: {attempt.FULL}"
    for job in jobs:
        if able and not (Here.node is not None and Here.node.closing.is_set()):
            able = _run(job) != attempt.BROKEN
        else:
            _hand_back(job, why)
    rest(not able)


def _hand_back(job: Mapping[str, Any], why: str) -> None:
    """Report an attempt that was not begun; nobody is to blame."""
    node = "" if Here.node is None else Here.node.name
    about = {"attempt": job["attempt"], "node": node}
    outcome = {**about, "state": attempt.CANCELLED, "message": why}
    Here.news.put({**about, "kind": ENDED, "outcome": outcome})


def _run(job: Mapping[str, Any]) -> str:
    """Run one attempt, and say how it ended. Events say when it starts and how it ended.

    An event follows the marker that is in the store already; nobody has to fetch a result from a
    worker, which would wait for one that is dead.
    """
    node = Here.node
    assert node is not None, "the worker sets it before it starts"
    with Here.lock:
        Here.running += 1
    try:
        about = {"attempt": job["attempt"], "node": node.name}
        Here.news.put({**about, "kind": STARTED})
        outcome = attempt.run(Job(**job), node)
        Here.news.put({**about, "kind": ENDED, "outcome": outcome})
        return str(outcome["state"])
    finally:
        with Here.lock:
            Here.running -= 1


def rest(broken: bool) -> None:
    """Let other nodes have the next task, when this one cannot run any: longer each time."""
    Here.broken = Here.broken + 1 if broken else 0
    if broken and Here.node is not None:
        Here.node.closing.wait(min(REST_S * 2 ** min(Here.broken, 10), MOST_REST_S))


def cancel_here(attempts: list[str]) -> None:
    """End these attempts, if they are or will be here."""
    if Here.node is not None:
        Here.node.cancelled.update(attempts)
