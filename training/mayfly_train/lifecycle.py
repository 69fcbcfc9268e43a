"""A run's life as a pure function: what the coordinator knows, what it sees, and what follows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from mayfly_train import caps
from mayfly_train.caps import Stop
from mayfly_train.cluster import CHIEF, EVALUATOR, PS, WORKER, Cluster
from mayfly_train.progress import Progress, Redone, account
from mayfly_train.topology import Task, placement

STARTING, TRAINING, STOPPING, EXPORTING = "starting", "training", "stopping", "exporting"
SUCCEEDED, FAILED, STOPPED = "succeeded", "failed", "stopped"
ENDED = (SUCCEEDED, FAILED, STOPPED)

CHIEF_TASK, EVALUATOR_TASK = str(Task(CHIEF, 0)), str(Task(EVALUATOR, 0))
# A task that has failed may be restarted; systemd tells when it is not (see `failed`).
TASK_SUCCEEDED, TASK_STOPPED, TASK_FAILED = "succeeded", "stopped", "failed"
TASK_RUNNING = "running"
# Engines whose programs all tell their steps: without any, training has not started. Others' need
# not print them, and then only max_duration and the tasks' own end say how it goes.
TELL_STEPS = ("estimator",)
# Synchronous engines that go on with the workers that are left.
ELASTIC = ("horovod",)


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
    disk_full: bool = False


def parse_heartbeat(document: Any) -> Heartbeat | None:
    """The heartbeat in a document, None when it is not one."""
    try:
        fields = {key: document[key] for key in ("task", "node", "state", "attempt", "exit_code")}
        progress = Progress(**document["progress"])
        return Heartbeat(
            **fields,
            updated=document["updated"],
            progress=progress,
            disk_full=bool(document.get("disk_full")),
        )
    except (KeyError, TypeError):
        return None


@dataclass(frozen=True)
class Sight:
    """What the coordinator has seen of one task, by its own clock.

    `heard` is when the heartbeat last changed, `stepped` when the task's own step did or when this
    attempt began, `slowest` the longest time between two of its steps: programs log at their pace.
    """

    updated: str
    heard: float
    attempt: int
    step: int | None
    stepped: float
    slowest: float | None = None


@dataclass(frozen=True)
class RunState:
    """The coordinator's memory. Times are seconds since 1970.

    `stepped` is when the global step last changed; `trained` when the chief succeeded, `ended`
    when training, final evaluation included, was over. `lost` are tasks whose heartbeat stands
    still, `restarts` the attempts of hung trainers that were asked to start again. `born` is when
    the chief's node was made, `stop` the limit that ended the training.
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
    sights: Mapping[str, Sight] = field(default_factory=dict)
    lost: tuple[str, ...] = ()
    restarts: Mapping[str, int] = field(default_factory=dict)
    born: float | None = None
    stop: Stop | None = None


def dump_state(state: RunState) -> dict[str, Any]:
    """The state as a document."""
    return asdict(state)


def parse_state(document: Any) -> RunState | None:
    """The state in a document, None when it is not one."""
    try:
        redone = Redone(**document["redone"])
        sights = {task: Sight(**sight) for task, sight in document["sights"].items()}
        lost = tuple(document["lost"])
        stop = Stop(**document["stop"]) if document.get("stop") else None
        parts = {"redone": redone, "sights": sights, "lost": lost, "stop": stop}
        return RunState(**{**document, **parts})
    except (KeyError, TypeError, AttributeError):
        return None


def resumed(state: RunState, now: float) -> RunState:
    """The state after a time without a coordinator: nobody is to blame for that silence."""
    sights = {t: replace(s, heard=now, stepped=now) for t, s in state.sights.items()}
    return replace(state, stepped=now, sights=sights)


@dataclass(frozen=True)
class Limits:
    """How long things may take, in seconds.

    A task is `lost` after this time without a heartbeat. `stall` is the time after which the run
    fails when it cannot go on without a lost task, or makes no step (at least three times the
    longest time between two steps so far), and after which a trainer that makes no step while
    others do is asked to start again; `first_step` is what it has before its first one. `stop` is
    the time that the chief has to save and to end once a limit of the job is reached. `logs` is
    what the others have, once it is over, to end and to leave their logs: more than supervisors
    let a worker go on after the chief.
    """

    start: float = 900.0
    lost: float = 60.0
    stall: float = 150.0
    first_step: float = 300.0
    evaluator: float = 920.0
    stop: float = 120.0
    board: float = 100.0
    logs: float = 25.0
    final_status: float = 600.0
    poll: float = 3.0


@dataclass(frozen=True)
class Seen:
    """What the board holds: heartbeats by task, and the markers.

    `at` is when it answered; None: now. While it does not, nobody is blamed for being silent.
    """

    heartbeats: Mapping[str, Heartbeat] = field(default_factory=dict)
    done: bool = False
    failed: Mapping[str, Any] | None = None
    stopped: bool = False
    at: float | None = None


def advance(state: RunState, seen: Seen, cluster: Cluster, now: float, limits: Limits) -> RunState:
    """The state after what is seen now. An ended state stays, and so does an exporting one."""
    if state.phase in (*ENDED, EXPORTING):
        return state
    state = _with_tasks(_with_progress(state, seen, now), seen, now, limits)
    if state.phase == STOPPING and not seen.done:
        return _stopping(state, seen, now, limits)
    if seen.failed is not None:
        message = seen.failed.get("message") or "the run was marked as failed"
        kept = {key: seen.failed[key] for key in ("task", "node", "log_tail") if key in seen.failed}
        return fail(state, now, message, **kept)
    if seen.done:
        return _trained(state, seen, cluster, now, limits)
    failed = _lost_for_good(state, seen, cluster, now, limits)
    stop = _limit(state, cluster, now, limits)
    if failed is None and stop is not None:
        return replace(state, phase=STOPPING, stop=stop)
    overdue = failed or _overdue(state, seen, cluster, now, limits)
    return overdue or _hung(state, seen, cluster, now, limits)


def fail(state: RunState, now: float, message: str, **where: Any) -> RunState:
    """The state of a run that has failed; `where` may hold task, node and log_tail."""
    error = {"task": None, "node": None, "message": message, "log_tail": [], **where}
    return replace(state, phase=FAILED, ended=state.ended or now, error=error)


def _trained(state: RunState, seen: Seen, cluster: Cluster, now: float, limits: Limits) -> RunState:
    """The state after the chief's success, which waits for the final evaluation."""
    state = replace(state, trained=state.trained or now, stop=None)
    evaluator = seen.heartbeats.get(EVALUATOR_TASK)
    evaluated = EVALUATOR not in cluster.kinds or (
        evaluator is not None and evaluator.state in (TASK_SUCCEEDED, TASK_STOPPED)
    )
    waited = now - (state.trained or now)
    gone = _silent(state, EVALUATOR_TASK, seen, now) > limits.stall
    late = waited > limits.evaluator or _limit(state, cluster, now, limits) is not None
    if evaluated or gone or late:
        return replace(state, phase=EXPORTING, ended=now)
    return state


def _limit(state: RunState, cluster: Cluster, now: float, limits: Limits) -> Stop | None:
    """The job's limit that is reached.

    Nobody is idle once the chief has trained, nor before the first step: where all programs tell
    theirs, `_overdue` judges the start, and others have at least as long for theirs.
    """
    stepped = state.stepped
    if state.trained or (state.step is None and cluster.engine in TELL_STEPS):
        stepped = now
    elif state.step is None:
        stepped += max(0.0, limits.start - cluster.idle_s)
    return caps.reached(cluster, caps.Times(state.born, state.started, stepped), now)


def _stopping(state: RunState, seen: Seen, now: float, limits: Limits) -> RunState:
    """The state while the chief saves: what it has saved by the end of its time is exported.

    A task that fails meanwhile changes nothing, as its peers are leaving.
    """
    if seen.stopped or (state.stop and now - state.stop.at > limits.stop):
        return replace(state, phase=EXPORTING, ended=now)
    return state


def _with_progress(state: RunState, seen: Seen, now: float) -> RunState:
    chief = seen.heartbeats.get(CHIEF_TASK)
    if chief is None:
        return state
    trainers = [h.progress.step or 0 for n, h in seen.heartbeats.items() if n != EVALUATOR_TASK]
    redone = account(state.redone, chief.progress, trainers, chief.attempt == 1)
    step = chief.progress.step
    if step is None:
        return replace(state, redone=redone)
    stepped = now if step != state.step else state.stepped
    phase = state.phase if state.phase == STOPPING else TRAINING
    return replace(state, phase=phase, step=step, stepped=stepped, redone=redone)


def _overdue(
    state: RunState, seen: Seen, cluster: Cluster, now: float, limits: Limits
) -> RunState | None:
    """The failed state when something takes too long, None when nothing does."""
    if state.phase == STARTING and now - state.started > limits.start:
        placed = placement(cluster).items()
        silent = [f"{t} on node {n.name}" for t, n in placed if str(t) not in seen.heartbeats]
        never = f"never heard of: {', '.join(silent)}" if silent else "see the tasks' logs"
        if silent or cluster.engine in TELL_STEPS:
            message = f"training did not start within {limits.start:.0f} s — {never}"
            return fail(state, now, message)
    chief = state.sights.get(CHIEF_TASK)
    allowed = _allowed(chief, limits) if chief else limits.stall
    if state.phase == TRAINING and now - state.stepped > allowed:
        where = f"no new global step for {allowed:.0f} s, at step {state.step}"
        suspect = "a hung parameter server" if PS in cluster.kinds else "one hung process"
        message = f"{where} — {suspect} stops all; see the tasks' logs"
        return fail(state, now, message)
    return None


# --- tasks -------------------------------------------------------------------------------------


def _with_tasks(state: RunState, seen: Seen, now: float, limits: Limits) -> RunState:
    """The state with what is seen of each task: when it was heard, when it made a step."""
    sights = {
        task: _sight(state.sights.get(task), heartbeat, now)
        for task, heartbeat in seen.heartbeats.items()
    }
    state = replace(state, sights=sights)
    lost = [
        task
        for task, heartbeat in seen.heartbeats.items()
        if heartbeat.state != TASK_SUCCEEDED and _silent(state, task, seen, now) > limits.lost
    ]
    return replace(state, lost=() if seen.failed is not None else tuple(lost))


def _sight(old: Sight | None, heartbeat: Heartbeat, now: float) -> Sight:
    step, attempt = heartbeat.progress.step, heartbeat.attempt
    if old is None or old.attempt != attempt:
        slowest = old.slowest if old else None
        return Sight(heartbeat.updated, now, attempt, step, now, slowest)
    heard = now if heartbeat.updated != old.updated else old.heard
    if step == old.step:
        return replace(old, updated=heartbeat.updated, heard=heard)
    # From "no step" to the first one is the start, which says nothing of the pace.
    took = now - old.stepped if old.step is not None else 0.0
    slowest = max(took, old.slowest or 0.0) if took else old.slowest
    return Sight(heartbeat.updated, heard, attempt, step, now, slowest)


def _silent(state: RunState, task: str, seen: Seen, now: float) -> float:
    """For how long a task's heartbeat has stood still; 0 for one that was never heard of."""
    sight = state.sights.get(task)
    return (now if seen.at is None else seen.at) - sight.heard if sight else 0.0


def _allowed(sight: Sight, limits: Limits) -> float:
    """How long a trainer may go without a new step: its own pace decides when it is slow."""
    if sight.step is None or sight.slowest is None:
        return max(limits.stall, limits.first_step)
    return max(limits.stall, 3 * sight.slowest)


def _lost_for_good(
    state: RunState, seen: Seen, cluster: Cluster, now: float, limits: Limits
) -> RunState | None:
    """The failed state when a task is lost without which the run cannot go on, None otherwise."""
    elastic = cluster.mode == "async" or cluster.engine in ELASTIC
    needed = (PS, CHIEF) if elastic else (PS, CHIEF, WORKER)
    for task, node in placement(cluster).items():
        gone = str(task) in state.lost and _silent(state, str(task), seen, now) > limits.stall
        if gone and task.kind in needed:
            silent = f"has given no sign of life for {limits.stall:.0f} s"
            message = f"{task} on node {node.name} {silent} — the run cannot go on without it"
            return fail(state, now, message, task=str(task), node=node.name)
    return None


def _hung(state: RunState, seen: Seen, cluster: Cluster, now: float, limits: Limits) -> RunState:
    """The state with trainers to be restarted: alive, but without a step while others make some.

    Of engines whose programs need not tell steps, only a task that has told some is judged.
    """
    must_tell = cluster.engine in TELL_STEPS
    trainers = {
        task: sight
        for task, sight in state.sights.items()
        if task.startswith((CHIEF, WORKER)) and (must_tell or sight.step is not None)
    }
    moving = [t for t, s in trainers.items() if s.step and now - s.stepped < limits.stall / 3]
    hung = {
        task: sight.attempt
        for task, sight in trainers.items()
        if now - sight.stepped > _allowed(sight, limits)
        and task not in state.lost
        and seen.heartbeats[task].state == TASK_RUNNING
        and [t for t in moving if t != task]
    }
    return replace(state, restarts={**state.restarts, **hung}) if hung else state
