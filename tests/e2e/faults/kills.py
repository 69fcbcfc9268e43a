"""A `kill -9` in a run: what happened and how long it took, as a row for docs/engines.md.

Rows are appended to build/kills.jsonl, from which tests/bench/kills_table.py makes the table.
"""

from __future__ import annotations

import json
import time
from typing import Any

from machine import ROOT

from faults.lab import ENDED, Document, Training
from mayfly_train.lifecycle import CHIEF_TASK
from mayfly_train.progress import Progress, after_line, after_lines

ROWS = ROOT / "build/kills.jsonl"
LOG = f"/var/log/mayfly/{CHIEF_TASK}.log"
# What is killed: the process that the task's supervisor runs, or a rank that this one has started.
TASK, RANK = "task", "rank"
LAST_BYTES = 10_000  # of the log, in which there is a step
FOLLOW_S = 300
END_S = 600


def kill_and_tell(run: Training, engine: str, task: str, what: str = TASK) -> Document:
    """Kill, follow the run to its end, and leave the row; the status of the end."""
    row = {"engine": engine, "task": task, "what": what, **_kill_and_follow(run, task, what)}
    try:
        status = run.end(END_S)
    except AssertionError:
        _leave({**row, "outcome": f"did not end within {END_S} s"})
        raise
    redone = status["samples_processed"] - status["samples_seen"]
    attempts = {name: one["attempts"] for name, one in status["tasks"].items()}
    outcome = (status["error"] or {}).get("message") or status["state"]
    batch = status["samples_seen"] // max(1, status["global_step"])
    _leave({**row, "redone": redone // max(1, batch), "attempts": attempts, "outcome": outcome})
    return status


def _kill_and_follow(run: Training, task: str, what: str) -> dict[str, Any]:
    """Seconds from the kill until the process is there again, and until a step is told.

    None is what was not seen before the run ended. They are as seen from outside, to about half a
    second; what the chief's log has said after the kill tells whether a step was made.
    """
    lab, rank = run.lab, what == RANK
    chief = lab.node_of(CHIEF_TASK)
    victim = run.process(task, rank)
    assert victim, f"{task} runs no {what}"
    began = time.monotonic()
    lab.sh(lab.node_of(task), f"kill -KILL {victim}")
    begin = int(lab.sh(chief, f"stat -c %s {LOG}"))
    told = lab.sh(chief, f"head -c {begin} {LOG} | tail -c {LAST_BYTES}").splitlines()
    seen: dict[str, Any] = {"at_step": after_lines(Progress(), told).step}
    seen |= {"restart_s": None, "step_s": None, "restored_step": None}
    while time.monotonic() - began < FOLLOW_S and None in (seen["restart_s"], seen["step_s"]):
        over = (run.status() or {}).get("state") in ENDED
        if seen["restart_s"] is None and run.process(task, rank) not in (None, victim):
            seen["restart_s"] = round(time.monotonic() - began, 1)
        if seen["step_s"] is None:
            after = lab.sh(chief, f"tail -c +{begin + 1} {LOG}").splitlines()
            stepped, seen["restored_step"] = since_the_kill(after)
            seen["step_s"] = round(time.monotonic() - began, 1) if stepped else None
        if over:
            break
        time.sleep(0.3)
    return seen


def since_the_kill(lines: list[str]) -> tuple[bool, int | None]:
    """Whether a step was made after the kill, and the step that training went back to, if it did.

    A step that was under way may still be told, so where nothing was restored a second one counts.
    """
    last, told, restored = Progress(), 0, None
    for line in lines:
        now = after_line(last, line)
        if now.restores != last.restores:
            told, restored = 1, now.restored_step
        elif now.step != last.step:
            told += 1
            if told > 1:
                return True, restored
        last = now
    return False, restored


def _leave(row: dict[str, Any]) -> None:
    line = json.dumps(row)
    print(line)
    ROWS.parent.mkdir(exist_ok=True)
    with ROWS.open("a", encoding="utf-8") as file:
        file.write(f"{line}\n")
