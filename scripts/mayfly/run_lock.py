"""One process at a time works on a run: a file beside the ledger, locked while it does.

The lock is the kernel's (flock(2)): whoever dies, however, leaves it free. What the file says of
its holder is for people; it decides nothing.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from mayfly.errors import UserError

TRIES, PAUSE_S = 4, 0.1  # to step over a look of `holder`, and the end of a process just killed


class Busy(UserError):
    """A run that another process works on."""


@dataclass(frozen=True)
class Holder:
    """Who works on a run; nothing but the run is known of one that has not said so yet."""

    run: str
    pid: int | None = None
    command: str = "another command"
    host: str = ""
    since: str = ""

    def says(self) -> str:
        """Who it is, in words: `mayfly deploy, process 4711 since 2026-11-28T10:00:00Z`."""
        if self.pid is None:
            return self.command
        where = "" if self.host == socket.gethostname() else f" on {self.host}"
        return f"{self.command}, process {self.pid}{where} since {self.since}"


@contextmanager
def held(directory: Path, run: str, command: str, look: str = "mayfly status") -> Iterator[None]:
    """Keep every other process off a run while the block works on it, as `command`; `look` is
    what shows others how far it is.

    Raises Busy at once when another does, OSError when the file cannot be made.
    """
    path = _path(directory, run)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = _claim(path, run, look)
    try:
        with suppress(OSError):  # a full disk: the lock holds, only its holder's name is not known
            _sign(descriptor, Holder(run, os.getpid(), command, socket.gethostname(), _now()))
        yield
    finally:
        with suppress(OSError):
            path.unlink()  # it is still ours: who waits for it finds another file, and looks again
        os.close(descriptor)


def holder(directory: Path, run: str) -> Holder | None:
    """Return who works on a run now, None when nobody does; nobody is kept off by the look."""
    try:
        descriptor = os.open(_path(directory, run), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _read(descriptor, run)
    finally:
        os.close(descriptor)
    return None


def _path(directory: Path, run: str) -> Path:
    return directory / f"{run}.lock"


def _claim(path: Path, run: str, look: str) -> int:
    """Return the descriptor of the locked file. Raises Busy."""
    tries = 0
    while True:
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            found = _read(descriptor, run)
            os.close(descriptor)
            tries += 1
            if tries == TRIES:
                raise _busy(found, look) from None
            time.sleep(PAUSE_S)
            continue
        except OSError:  # a file system without locks
            os.close(descriptor)
            raise
        if _is_there(path, descriptor):
            return descriptor
        os.close(descriptor)  # its last holder has removed it between our two calls


def _is_there(path: Path, descriptor: int) -> bool:
    """Whether the path still leads to the open file."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _busy(found: Holder, look: str) -> Busy:
    ended = f"end it first: kill {found.pid}" if found.pid else "end it first"
    return Busy(
        f"run {found.run} is at work: {found.says()}",
        f"wait, `{look} {found.run}` shows how far it is; or {ended}",
    )


def _sign(descriptor: int, who: Holder) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(asdict(who)).encode(), 0)


def _read(descriptor: int, run: str) -> Holder:
    try:
        return Holder(**json.loads(os.pread(descriptor, 4096, 0)))
    except (OSError, ValueError, TypeError):
        return Holder(run)  # it has locked the file a moment ago, or its disk is full


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
