"""How long the tasks of the experiments that run will still take, by how many ended lately."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mayfly_train.recipe.progress import OVER

WINDOW_S = 300.0  # nodes come and go: what was long ago says little
LEAST_S, LEAST_TASKS = 20.0, 5  # what is less would be a guess


class Outlook:
    """Told where experiments are, it says in how many seconds the known tasks will be over."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._names: list[str] = []
        self._seen: deque[tuple[float, int]] = deque()

    def eta_s(self, experiments: Sequence[Mapping[str, Any]]) -> float | None:
        """None while nothing runs, or too little has ended since these began to run together."""
        running = [each for each in experiments if each["state"] == "running" and each["tasks"]]
        names = [each["name"] for each in running]
        over = sum(int(each["states"].get(state, 0)) for each in running for state in OVER)
        now = self._clock()
        if names != self._names or (self._seen and over < self._seen[-1][1]):
            self._names, self._seen = names, deque()
        if not self._seen or over > self._seen[-1][1]:
            self._seen.append((now, over))
        while len(self._seen) > 2 and now - self._seen[1][0] > WINDOW_S:  # noqa: PLR2004
            self._seen.popleft()
        began, before = self._seen[0]
        if now - began < LEAST_S or over - before < LEAST_TASKS:
            return None
        left = sum(int(each["tasks"]) for each in running) - over
        return left * (now - began) / (over - before)
