"""A run's life as a pure function: what the coordinator knows, what it sees, and what follows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from mayfly_train.cluster import Cluster
from mayfly_train.progress import Progress, Redone, account
from mayfly_train.topology import CHIEF, EVALUATOR, Task

STARTING, TRAINING, EXPORTING = "starting", "training", "exporting"
SUCCEEDED, FAILED = "succeeded", "failed"
ENDED = (SUCCEEDED, FAILED)

CHIEF_TASK, EVALUATOR_TASK = str(Task(CHIEF, 0)), str(Task(EVALUATOR, 0))
# A task that has failed may be restarted; systemd tells when it is not (see `failed`).
TASK_SUCCEEDED, TASK_STOPPED, TASK_FAILED = "succeeded", "stopped", "failed"


@dataclass(frozen=True)
class Heartbeat:
    """What a task has last said: its state, which attempt it is, and its progress."""

    task: str
    node: str
    state: str
    attempt: int
    exit_code: int | None
    updated: str
    progress: Progress


def parse_heartbeat(document: Any) -> Heartbeat | None:
    """The heartbeat in a document, None when it is not one."""
    try:
        fields = {key: document[key] for key in ("task", "node", "state", "attempt", "exit_code")}
        progress = Progress(**document["progress"])
        return Heartbeat(**fields, updated=document["updated"], progress=progress)
    except (KeyError, TypeError):
        return None


@dataclass(frozen=True)
class RunState:
    """The coordinator's memory. Times are seconds since 1970.

    `stepped` is when the global step last changed; `trained` when the chief succeeded, `ended`
    when training, final evaluation included, was over.
    """

    phase: str
    started: float
    stepped: float
    step: int | None = None
    trained: float | None = None
    ended: float | None = None
    exported: float | None = None
    redone: Redone = field(default_factory=Redone)
    error: Mapping[str, Any] | None = None
    export: Mapping[str, int] | None = None


def dump_state(state: RunState) -> dict[str, Any]:
    """The state as a document."""
    return asdict(state)


def parse_state(document: Any) -> RunState | None:
    """The state in a document, None when it is not one."""
    try:
        return RunState(**{**document, "redone": Redone(**document["redone"])})
    except (KeyError, TypeError):
        return None


@dataclass(frozen=True)
class Limits:
    """How long things may take, in seconds.

    `stall` is the time without a new global step after which the run has failed: a parameter
    server that never comes back leaves every other task waiting in silence.
    """

    start: float = 900.0
    stall: float = 600.0
    evaluator: float = 920.0
    board: float = 300.0
    logs: float = 15.0
    final_status: float = 600.0
    poll: float = 3.0


@dataclass(frozen=True)
class Seen:
    """What the board holds: heartbeats by task, and the two markers."""

    heartbeats: Mapping[str, Heartbeat] = field(default_factory=dict)
    done: bool = False
    failed: Mapping[str, Any] | None = None


def advance(state: RunState, seen: Seen, cluster: Cluster, now: float, limits: Limits) -> RunState:
    """The state after what is seen now. An ended state stays, and so does an exporting one."""
    if state.phase in (*ENDED, EXPORTING):
        return state
    state = _with_progress(state, seen, now)
    if seen.failed is not None:
        message = seen.failed.get("message") or "the run was marked as failed"
        kept = {key: seen.failed[key] for key in ("task", "node", "log_tail") if key in seen.failed}
        return fail(state, now, message, **kept)
    if seen.done:
        state = state if state.trained else replace(state, trained=now)
        evaluator = seen.heartbeats.get(EVALUATOR_TASK)
        evaluated = evaluator is not None and evaluator.state in (TASK_SUCCEEDED, TASK_STOPPED)
        if evaluated or now - (state.trained or now) > limits.evaluator:
            return replace(state, phase=EXPORTING, ended=now)
        return state
    message = _overdue(state, cluster, now, limits)
    return fail(state, now, message=message) if message else state


def fail(state: RunState, now: float, message: str, **where: Any) -> RunState:
    """The state of a run that has failed; `where` may hold task, node and log_tail."""
    error = {"task": None, "node": None, "message": message, "log_tail": [], **where}
    return replace(state, phase=FAILED, ended=state.ended or now, error=error)


def _with_progress(state: RunState, seen: Seen, now: float) -> RunState:
    chief = seen.heartbeats.get(CHIEF_TASK)
    if chief is None:
        return state
    trainers = [h.progress.step or 0 for n, h in seen.heartbeats.items() if n != EVALUATOR_TASK]
    redone = account(state.redone, chief.progress, trainers)
    step = chief.progress.step
    if step is None:
        return replace(state, redone=redone)
    stepped = now if step != state.step else state.stepped
    return replace(state, phase=TRAINING, step=step, stepped=stepped, redone=redone)


def _overdue(state: RunState, cluster: Cluster, now: float, limits: Limits) -> str | None:
    """What takes too long, None when nothing does."""
    if now - state.started > cluster.max_duration_s:
        return f"the run took longer than max_duration, {cluster.max_duration_s} s"
    if state.phase == STARTING and now - state.started > limits.start:
        return f"training did not start within {limits.start:.0f} s — see the tasks' logs"
    if state.phase == TRAINING and now - state.stepped > limits.stall:
        where = f"no new global step for {limits.stall:.0f} s, at step {state.step}"
        return f"{where} — a lost parameter server stops all; see the tasks' logs"
    return None
