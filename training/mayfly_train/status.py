"""What a run says about itself to the outside: status document and events, as pure functions."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import datetime, timezone
from typing import Any

from mayfly_train.cluster import EVALUATOR, Cluster
from mayfly_train.lifecycle import (
    CHIEF_TASK,
    EVALUATOR_TASK,
    EXPORTING,
    STARTING,
    STOPPED,
    STOPPING,
    SUCCEEDED,
    TRAINING,
    Heartbeat,
    RunState,
)
from mayfly_train.progress import Progress
from mayfly_train.topology import placement

VERSION = 1
LOST = "lost"


def status_document(
    cluster: Cluster,
    state: RunState,
    heartbeats: Mapping[str, Heartbeat],
    now: float,
    staging_s: float | None = None,
) -> dict[str, Any]:
    """The document that `status.json` holds (its fields are described in docs/status.md)."""
    judge = EVALUATOR_TASK if EVALUATOR in cluster.kinds else CHIEF_TASK
    chief, evaluator = (_progress(heartbeats, task) for task in (CHIEF_TASK, judge))
    step = state.step or 0
    rate = chief.steps_per_second if state.phase in (STARTING, TRAINING) else None
    return {
        "version": VERSION,
        "run": cluster.run,
        "state": state.phase,
        "updated": iso(now),
        "steps": cluster.steps,
        "global_step": step,
        "samples_seen": step * cluster.batch_size,
        "samples_processed": (step + state.redone.steps) * cluster.batch_size,
        "examples_per_second": round(rate * cluster.batch_size, 1) if rate else None,
        "loss": chief.loss,
        "accuracy": evaluator.accuracy,
        "accuracy_step": evaluator.evaluated_step,
        "eta_s": round(max(0, cluster.steps - step) / rate) if rate else None,
        "phases": _phases(state, now, staging_s),
        "tasks": _tasks(cluster, heartbeats, state.lost),
        "disk_full": sorted({h.node for h in heartbeats.values() if h.disk_full}),
        "export": dict(state.export) if state.export else {"bytes_done": 0, "bytes_total": None},
        "error": dict(state.error) if state.error else None,
        "reason": state.stop.reason if state.stop else None,
        "stopped_because": state.stop.message if state.stop else None,
        "model_uri": f"{cluster.run_uri}/model" if state.phase in (SUCCEEDED, STOPPED) else None,
    }


def _progress(heartbeats: Mapping[str, Heartbeat], task: str) -> Progress:
    heartbeat = heartbeats.get(task)
    return heartbeat.progress if heartbeat else Progress()


def _phases(state: RunState, now: float, staging_s: float | None) -> dict[str, float | None]:
    """Seconds of each phase, up to now for the one that goes on."""
    over = state.ended if state.phase not in (STARTING, TRAINING, STOPPING) else now
    training = (over or now) - state.started
    export = None
    if state.ended is not None and state.phase in (EXPORTING, SUCCEEDED, STOPPED):
        export = round((state.exported or now) - state.ended, 1)
    return {"staging": staging_s, "training": round(training, 1), "export": export}


def _tasks(
    cluster: Cluster, heartbeats: Mapping[str, Heartbeat], lost: Collection[str]
) -> dict[str, dict[str, Any]]:
    tasks = {}
    for task, node in placement(cluster).items():
        heard = heartbeats.get(str(task))
        tasks[str(task)] = {
            "node": node.name,
            "state": LOST if str(task) in lost else heard.state if heard else "pending",
            "attempts": heard.attempt if heard else 0,
            "exit_code": heard.exit_code if heard else None,
            "updated": heard.updated if heard else None,
        }
    return tasks


def events_between(old: Mapping[str, Any] | None, new: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What happened between two status documents, one event each, oldest first."""
    before = old or {"state": None, "tasks": {}, "accuracy_step": None}
    events: list[dict[str, Any]] = []
    for name, task in new["tasks"].items():
        earlier = before["tasks"].get(name, {"state": "pending", "attempts": 0})
        if (task["state"], task["attempts"]) != (earlier["state"], earlier["attempts"]):
            kept = _only(task, "node", "state", "attempts", "exit_code")
            events.append({"event": "task", "task": name, **kept})
    if new["disk_full"] != before.get("disk_full", []):
        events.append({"event": "disk", "disk_full": new["disk_full"]})
    if old and new["samples_processed"] - new["samples_seen"] > (
        old["samples_processed"] - old["samples_seen"]
    ):
        kept = _only(new, "global_step", "samples_seen", "samples_processed")
        events.append({"event": "rewind", **kept})
    if new["accuracy_step"] != before["accuracy_step"]:
        events.append({"event": "evaluation", **_only(new, "accuracy", "accuracy_step")})
    if new["state"] != before["state"]:
        events.append({"event": "state", "state": new["state"], "error": new["error"]})
    return [{"time": new["updated"], "run": new["run"], **event} for event in events]


def _only(document: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: document[key] for key in keys}


def iso(seconds: float) -> str:
    """Seconds since 1970 as ISO 8601 in UTC."""
    moment = datetime.fromtimestamp(seconds, timezone.utc)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
