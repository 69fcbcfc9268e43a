"""Trying again, with a pause that grows."""

from __future__ import annotations

import logging
import random
from time import monotonic
from time import sleep as pause
from typing import Callable, TypeVar

from mayfly_train.errors import BadInput, NodeError

# All pauses together are about as long as HDFS needs to declare a DataNode dead.
LONGEST_PAUSE_S = 8.0
# No attempt begins later than this after the first failure, so that an outage is told in time.
PATIENCE_S = 75.0
T = TypeVar("T")
log = logging.getLogger(__name__)


def with_backoff(
    action: Callable[[int], T],
    attempts: int = 8,
    first_pause_s: float = 0.5,
) -> T:
    """What `action(attempt)` returns, attempt counting from 0, tried again on a NodeError.

    The user's faults (BadInput) are raised at once, other errors after the last attempt.
    """
    trouble_since = None
    for attempt in range(attempts - 1):
        begun = monotonic()
        try:
            return action(attempt)
        except BadInput:
            raise
        except NodeError as error:
            now = monotonic()
            # Each wait within an attempt is short: one that took longer than this got ahead.
            if trouble_since is None or now - begun > 2 * PATIENCE_S:
                trouble_since = now
            # Half of the pause is random, so that nodes that failed together don't return together.
            seconds = min(first_pause_s * 2**attempt, LONGEST_PAUSE_S) * random.uniform(0.5, 1)
            if now + seconds - trouble_since > PATIENCE_S:
                raise
            log.warning("trying again in %.1f s: %s", seconds, error)
            pause(seconds)
    return action(attempts - 1)
