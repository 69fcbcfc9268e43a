"""SIGTERM as a wish: the step at work is made, a checkpoint is saved, and the program ends.

Mayfly sends it when a limit of the job is reached, and kills what has not ended after a minute
(docs/programs.md). Not every process of a run gets it: those who make steps together agree on the
step after which they stop, so that none waits for another one in vain.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

# What a shell reports for a program that SIGTERM has ended. It is no success: the work is not done,
# and where nobody wants the run to end (the signal was meant for one process) all start again.
EXIT_CODE = 128 + signal.SIGTERM
LOOK_US = 1_000_000  # between two questions to all, in microseconds
MOST_STEPS = 100  # between two questions, as steps may become slower than they were


class Asked:
    """True once SIGTERM has come. Made where training begins: before there is nothing to save."""

    def __init__(self) -> None:
        self._asked = False
        signal.signal(signal.SIGTERM, self._ask)

    def __bool__(self) -> bool:
        return self._asked

    def _ask(self, *_: object) -> None:
        self._asked = True


class StopTogether:
    """Says to all processes at the same step that they are to stop: any of them was asked to.

    The question costs a message to all, so it is put about once a second: after a number of steps
    that all compute from what they have told each other the last time.
    """

    def __init__(self, asked: Asked, total: Callable[[list[int]], list[int]]) -> None:
        """`total` sums whole numbers over all processes, each of which calls it."""
        self._asked, self._total = asked, total
        self._steps, self._wait, self._since = 0, 1, time.monotonic()

    def after_step(self) -> bool:
        """Whether to stop now; all processes call this after each step."""
        self._steps += 1
        if self._steps < self._wait:
            return False
        took = max(1, round((time.monotonic() - self._since) * 1e6))
        asked, all_took, processes = self._total([int(bool(self._asked)), took, 1])
        steps = LOOK_US * self._steps * processes // all_took
        self._wait = max(1, min(steps, MOST_STEPS))
        self._steps, self._since = 0, time.monotonic()
        return asked > 0
