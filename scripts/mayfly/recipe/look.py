"""Looking at a run from anywhere: status, results, and what its tasks print."""

from __future__ import annotations

import csv
import io
import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from mayfly.errors import UserError, unknown
from mayfly.recipe.runs import Place
from mayfly_train.recipe import lock, names
from mayfly_train.recipe.document import MAXIMIZE, Experiment
from mayfly_train.recipe.expand import task_id
from mayfly_train.recipe.head import Run
from mayfly_train.recipe.ledger import Ledger, Row
from mayfly_train.recipe.store import read_json

pause = time.sleep
FOLLOW_S = 1.0
ALONE = 10  # looks without a head: one that is to come, or comes again, has that long


def status(run: Run, place: Place, ledger: Ledger) -> dict[str, Any]:
    """Where a run is. `state`: running, succeeded, failed, cancelled or interrupted."""
    known = {each["name"]: each for each in ledger.experiments()}
    empty: dict[str, Any] = {"state": "waiting", "tasks": None, "message": "", "states": {}}
    experiments = [
        {"name": each.name, **(known.get(each.name) or empty)} for each in run.recipe.experiments
    ]
    return {
        "run": place.name,
        "address": place.store.address,
        "state": _state([each["state"] for each in experiments], place),
        "experiments": experiments,
    }


def _state(states: list[str], place: Place) -> str:
    if lock.is_held(place.store):
        return "running"
    if set(states) <= {"done"}:
        return "succeeded"
    if place.store.read(names.CANCEL) is not None:
        return "cancelled"
    return "failed" if set(states) <= {"done", "failed", "skipped"} else "interrupted"


def results(run: Run, place: Place, ledger: Ledger, only: str | None) -> dict[str, Any]:
    """Every task that has begun, the best first, and what each experiment took."""
    chosen = [each for each in run.recipe.experiments if only in (None, each.name)]
    if not chosen:
        raise unknown("experiment", str(only), (each.name for each in run.recipe.experiments))
    return {
        "run": place.name,
        "address": place.store.address,
        "experiments": [_results(each, place, ledger) for each in chosen],
    }


def _results(experiment: Experiment, place: Place, ledger: Ledger) -> dict[str, Any]:
    rows = sorted(ledger.rows(experiment.name), key=_order(experiment))
    return {
        "name": experiment.name,
        "objective": experiment.search.objective or None,
        "direction": experiment.search.direction,
        "node_seconds": round(ledger.node_seconds(experiment.name), 3),
        "tasks": [_row(row, place) for row in rows],
    }


def _order(experiment: Experiment) -> Callable[[Row], tuple[bool, float, int]]:
    """Best first, then those without a value, each in the order of numbers."""
    sign = -1 if experiment.search.direction == MAXIMIZE else 1
    return lambda row: (row.value is None, sign * (row.value or 0.0), row.task.number)


def _row(row: Row, place: Place) -> dict[str, Any]:
    output = None
    if row.accepted:
        output = f"{place.store.address}/{names.output(row.task.id, row.accepted)}"
    return {
        "task": row.task.id,
        "state": row.state,
        "value": row.value,
        "parameters": dict(row.task.parameters),
        "results": dict(row.results),
        "seconds": row.seconds,
        "attempts": row.attempts,
        "failures": row.failures,
        "node_losses": row.node_losses,
        "node": row.node,
        "exit_code": row.exit_code,
        "message": row.message,
        "output": output,
    }


def as_csv(document: Mapping[str, Any]) -> str:
    """Results as one table: a column for each parameter and each result."""
    tasks = [task for each in document["experiments"] for task in each["tasks"]]
    plain = [key for key in (tasks[0] if tasks else {}) if key not in ("parameters", "results")]
    parameters = list(dict.fromkeys(name for task in tasks for name in task["parameters"]))
    found = list(dict.fromkeys(name for task in tasks for name in task["results"]))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*plain, *parameters, *(f"result.{name}" for name in found)])
    for task in tasks:
        values = [task["parameters"].get(name) for name in parameters]
        values += [task["results"].get(name) for name in found]
        writer.writerow([*(task[key] for key in plain), *values])
    return text.getvalue()


def find_task(text: str, run: Run) -> tuple[str, int]:
    """Experiment and number in `train/12`. Raises UserError."""
    match = re.fullmatch(r"(?:(\w+)/)?(\d+)", text)
    if not match:
        raise UserError(f"not a task: {text!r}", "write experiment/number, such as train/12")
    known = [each.name for each in run.recipe.experiments]
    name = match[1] or known[0]
    if name not in known:
        raise unknown("experiment", name, known)
    return name, int(match[2])


def log(
    task: tuple[str, int], stream: str, place: Place, ledger: Ledger, follow: bool
) -> Iterator[bytes]:
    """What a task's accepted or newest attempt has printed, piece by piece; with `follow` until it
    ends. Raises UserError when there is none, and when nobody works on the run any more."""
    name, ended, alone = task_id(*task), False, 0
    shown: set[str] = set()
    begun: dict[str, None] = {}
    while True:
        begun |= dict.fromkeys(_begun(task, place, ledger))
        attempt = _accepted(name, place) or next(reversed(begun), None)
        if attempt is not None:
            for piece in place.store.names(names.log(name, attempt, stream)):
                if piece not in shown:
                    shown.add(piece)
                    yield place.store.read(piece) or b""
        elif not follow:
            raise UserError(f"task {name} has not begun", "see `mayfly recipe status`")
        if ended or not follow:
            return
        ended = attempt is not None and _has_ended(name, attempt, place)
        if ended:
            continue  # what it printed at last may have come in between
        alone = 0 if lock.is_held(place.store) else alone + 1
        if alone >= ALONE:
            advice = f"go on with `mayfly recipe resume {place.name}`"
            raise UserError(f"task {name} has not ended, and nobody works on its run", advice)
        pause(FOLLOW_S)


def _has_ended(name: str, attempt: str, place: Place) -> bool:
    ends = (names.done(name), names.attempt(name, attempt))
    return any(place.store.read(end) is not None for end in ends)


def _accepted(name: str, place: Place) -> str | None:
    """The attempt that a task's marker is of; None while there is none."""
    marker = read_json(place.store, names.done(name))
    return None if marker is None else str(marker["attempt"])


def _begun(task: tuple[str, int], place: Place, ledger: Ledger) -> list[str]:
    """The attempts at a task that have begun, those that the ledger knows first: its copy may be
    older than what others, which it does not know, have printed."""
    known = [str(each["attempt"]) for each in ledger.attempts(*task) if each["started"]]
    return known + [log.split("/")[3] for log in place.store.names(f"logs/{task_id(*task)}/")]
