"""The median rule: a task that is worse than half of the finished ones were is ended.

Golovin et al., "Google Vizier" (2017), section 3.2: at step s, the best value of the task so far
is compared with the median of the running averages of finished tasks, up to the same step.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

LEAST = 3  # finished tasks that say something about a step
MOST = 1000  # finished tasks that are looked at: more would hardly move a median

Curve = Sequence[tuple[int, float]]


def medians(curves: Sequence[Curve]) -> dict[int, float]:
    """For each step, the median of the running averages of the tasks that came so far."""
    averages: dict[int, list[float]] = {}
    for curve in curves:
        total = 0.0
        for count, (step, value) in enumerate(sorted(curve), start=1):
            total += value
            averages.setdefault(step, []).append(total / count)
    return {
        step: statistics.median(values)
        for step, values in sorted(averages.items())
        if len(values) >= LEAST
    }


def should_stop(curve: Curve, bars: Mapping[int, float], after: int, maximize: bool) -> bool:
    """Whether the newest report of a task is below the bar; before step `after` none is."""
    if not curve:
        return False
    step, _ = curve[-1]
    if step < after or step not in bars:
        return False
    values = [value for _, value in curve]
    return max(values) < bars[step] if maximize else min(values) > bars[step]
