"""A store that is away for minutes, as an S3 server may be, ends nothing: it is asked again."""

from __future__ import annotations

import errno
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from mayfly_train.errors import BadInput, NodeError
from mayfly_train.recipe.store import Store
from mayfly_train.s3 import NotFound, S3Error

# A server that is started again, a lost route or a wrong policy is mended by then. Whoever waits
# longer pays for nodes on which nothing can finish.
PATIENCE_S = 600.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 15.0
_ASK_S = 0.2
T = TypeVar("T")


def may_return(error: NodeError) -> bool:
    """Whether a store may do later what it does not now. Keys and rights may come back, too; not
    an object that is not there, nor room on a disk."""
    cause = error.__cause__
    if isinstance(error, NotFound) or isinstance(cause, FileNotFoundError):
        return False
    return not isinstance(cause, OSError) or cause.errno not in (errno.ENOSPC, errno.EDQUOT)


def is_away(error: NodeError) -> bool:
    """Whether an S3 server is not reached or has trouble; what the user can set right is not."""
    return isinstance(error, S3Error) and not isinstance(error, BadInput)


class Patience:
    """Tries again what fails with a NodeError, with pauses that grow."""

    def __init__(
        self, ask: Callable[[], object] = lambda: "", say: Callable[[str], object] = lambda _: None
    ) -> None:
        """`ask` gives a reason to wait no longer; `say` is told that something waits, and that it
        waits no more."""
        self._ask, self._say = ask, say

    def __call__(
        self,
        action: Callable[..., T],
        *words: object,
        passes: Callable[[NodeError], bool] = may_return,
    ) -> T:
        """What the action returns at last. Raises its NodeError when that does not pass, after
        PATIENCE_S, and when there is a reason to wait no longer."""
        since, failures = 0.0, 0
        while True:
            try:
                found = action(*words)
            except NodeError as error:
                since = since or time.monotonic()
                if not passes(error) or self._ask() or time.monotonic() - since > PATIENCE_S:
                    raise
                if not failures:
                    minutes = f"{PATIENCE_S / 60:g} minutes"
                    self._say(f"the store is asked again for {minutes}: {error}")
                # Half of it is random, so that many nodes do not come back together.
                pause_s = min(FIRST_PAUSE_S * 2 ** min(failures, 10), LONGEST_PAUSE_S)
                self._pause(pause_s * random.uniform(0.5, 1))
                failures += 1
                continue
            if failures:
                self._say("the store answers again")
            return found

    def _pause(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not self._ask() and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, _ASK_S))


class PatientStore:
    """A store that is asked again until it does what it is asked for."""

    def __init__(self, store: Store, patience: Patience) -> None:
        self._store, self._patience = store, patience
        self.address = store.address

    def read(self, name: str) -> bytes | None:
        return self._patience(self._store.read, name)

    def write(self, name: str, data: bytes) -> None:
        self._patience(self._store.write, name, data)

    def create(self, name: str, data: bytes) -> bool:
        """As the protocol says; False also for one of ours whose answer was lost."""
        return self._patience(self._store.create, name, data)

    def upload(self, name: str, path: Path) -> None:
        self._patience(self._store.upload, name, path)

    def download(self, name: str, path: Path) -> None:
        self._patience(self._store.download, name, path)

    def age(self, name: str) -> float | None:
        return self._patience(self._store.age, name)

    def delete(self, name: str) -> None:
        self._patience(self._store.delete, name)

    def names(self, prefix: str) -> list[str]:
        return self._patience(self._store.names, prefix)
