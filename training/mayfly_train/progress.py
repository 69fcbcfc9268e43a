"""What a program says about itself in its log, and the account of work done twice.

Every Estimator program that logs at INFO writes these lines; nothing is asked of it. Others write
`progress: step=120 loss=0.31 …` (docs/programs.md). Sources of Estimator's: tensorflow_estimator's
basic_session_run_hooks (loss, rate, checkpoints), estimator.py (results of an evaluation) and
saver.py (restored checkpoints).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

_NUMBER = r"([-+.\deE]+|nan|inf)"
_LOSS = re.compile(rf"loss = {_NUMBER}, step = (\d+)")
_RATE = re.compile(rf"global_step/sec: {_NUMBER}")
_SAVED = re.compile(r"Saving checkpoints for (\d+)")
_RESTORED = re.compile(r"Restoring parameters from \S*-(\d+)\s*$")
_RESULT = re.compile(r"Saving dict for global step (\d+): (.*)")
_TOLD = re.compile(r"progress: (.*=.*)")
_FACT = re.compile(rf"(\w+)={_NUMBER}(?:\s|$)")
_METRIC = re.compile(rf"(\w+) = {_NUMBER}")


# The numbers in a line of our own form.
WHOLE = ("step", "restored_step", "evaluated_step")
REAL = ("loss", "steps_per_second", "accuracy")


@dataclass(frozen=True)
class Progress:
    """The last known state of one task; None is what it has not said yet.

    `step` is the global step; `steps_per_second` counts global steps of all trainers together.
    `restores` counts restored checkpoints, `restored_step` is the last one's step.
    """

    step: int | None = None
    loss: float | None = None
    steps_per_second: float | None = None
    restores: int = 0
    restored_step: int | None = None
    accuracy: float | None = None
    evaluated_step: int | None = None


def after_line(progress: Progress, line: str) -> Progress:
    """The state after one more line of the log."""
    if match := _TOLD.search(line):
        return _after_facts(progress, dict(_FACT.findall(match[1])))
    return _after_estimators_line(progress, line)


def _after_estimators_line(progress: Progress, line: str) -> Progress:
    if match := _LOSS.search(line):
        # This step is from before the session's run: at the end, the last checkpoint's is newer.
        step = max(progress.step or 0, int(match[2]))
        return replace(progress, loss=float(match[1]), step=step)
    if match := _RATE.search(line):
        return replace(progress, steps_per_second=float(match[1]))
    if match := _SAVED.search(line):
        return replace(progress, step=int(match[1]))
    if match := _RESTORED.search(line):
        step = int(match[1])
        return replace(progress, restores=progress.restores + 1, restored_step=step, step=step)
    if match := _RESULT.search(line):
        metrics = {name: float(value) for name, value in _METRIC.findall(match[2])}
        accuracy = metrics.get("accuracy", progress.accuracy)
        return replace(progress, evaluated_step=int(match[1]), accuracy=accuracy)
    return progress


def _after_facts(progress: Progress, facts: Mapping[str, str]) -> Progress:
    """The state after a line of our own form; what cannot be read as its number is left out."""
    whole = {name: int(facts[name]) for name in WHOLE if facts.get(name, "").isdecimal()}
    real = {name: float(facts[name]) for name in REAL if name in facts}
    told: dict[str, Any] = {**whole, **real}
    progress = replace(progress, **told)
    if "restored_step" not in whole:
        return progress
    step = whole["restored_step"]
    return replace(progress, restores=progress.restores + 1, step=step)


def after_lines(progress: Progress, lines: Iterable[str]) -> Progress:
    """The state after more lines of the log."""
    for line in lines:
        progress = after_line(progress, line)
    return progress


@dataclass(frozen=True)
class Redone:
    """Account of global steps that were lost and done again.

    A chief or parameter server that comes back restores the last checkpoint, and the global step
    rewinds; what was done since is done again. `reached` is the furthest step since that restore.
    """

    steps: int = 0
    reached: int = 0
    restores: int = 0


def account(
    redone: Redone, chief: Progress, others: Iterable[int], first_start: bool = False
) -> Redone:
    """The account after the chief's newest state; `others` are the other trainers' last steps.

    Programs with lines of our own tell a restored step 0 at their first start, too: there nothing
    was lost, though others may have made steps by the time that it is seen.

    The chief may be dead while the others go on, so at a rewind the furthest of all counts. After
    it only the chief counts: what the others said last may be from before. Steps are known from
    logs, so the account can miss what was done after the last logged step.
    """
    if chief.restores > redone.restores and chief.restored_step is not None:
        begins = first_start and chief.restores == 1 and not (redone.reached or chief.restored_step)
        furthest = 0 if begins else max([redone.reached, *others])
        lost = max(0, furthest - chief.restored_step)
        step = max(chief.restored_step, chief.step or 0)
        return Redone(redone.steps + lost, step, chief.restores)
    return replace(redone, reached=max(redone.reached, chief.step or 0))
