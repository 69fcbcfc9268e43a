"""The run's notice board: small files in one HDFS directory that all nodes read and write.

`<task>.json` is a task's heartbeat, `<task>.log` the end of its log, `DONE` says that the chief has
succeeded, `FAILED` that the run has failed and why, `STOP` that a limit is reached and the chief is
to save and end, `STOPPED` that it has and all others are to end, `RESTART-<task>-<attempt>` that a
hung trainer is to start again, `run.json` is the coordinator's own memory.
"""

from __future__ import annotations

import json
import posixpath
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Protocol, TypeVar

from mayfly_train.cluster import Cluster
from mayfly_train.errors import NodeError
from mayfly_train.hdfs import Hdfs

T = TypeVar("T")

DONE, FAILED, MEMORY = "DONE", "FAILED", "run.json"
STOP, STOPPED = "STOP", "STOPPED"
LOG_DIR = Path("/var/log/mayfly")
PATIENCE_S = 30.0
LOG_TAIL_LINES = 40
LOG_TAIL_BYTES = 4 << 20


class Board(Protocol):
    """Small files by name. Methods raise NodeError when the store does not answer."""

    def names(self) -> list[str]:
        """The names of all files."""

    def read(self, name: str) -> bytes | None:
        """The content of a file, None when there is none."""

    def write(self, name: str, data: bytes) -> None:
        """Put a file; readers see the old content or the new, never a part."""


class HdfsBoard:
    """The board in HDFS, in one directory."""

    def __init__(self, hdfs: Hdfs, directory: str) -> None:
        self._hdfs = hdfs
        self._directory = directory
        self._made = False

    def names(self) -> list[str]:
        return [posixpath.basename(f.path) for f in self._hdfs.list_directory(self._directory)]

    def read(self, name: str) -> bytes | None:
        path = posixpath.join(self._directory, name)
        return self._hdfs.read_bytes(path) if self._hdfs.status(path) else None

    def write(self, name: str, data: bytes) -> None:
        if not self._made:
            self._hdfs.make_directory(self._directory)
            self._made = True
        self._hdfs.write_bytes(posixpath.join(self._directory, name), data)


class TimedBoard:
    """A board whose every call ends in time: HDFS' clients may wait for ever on a dropped link."""

    def __init__(self, board: Board, seconds: float = PATIENCE_S) -> None:
        self._board = board
        self._seconds = seconds

    def names(self) -> list[str]:
        return self._within(self._board.names)

    def read(self, name: str) -> bytes | None:
        return self._within(lambda: self._board.read(name))

    def write(self, name: str, data: bytes) -> None:
        self._within(lambda: self._board.write(name, data))

    def _within(self, call: Callable[[], T]) -> T:
        answer: Future[T] = Future()

        def work() -> None:
            try:
                answer.set_result(call())
            except BaseException as error:  # hdfs-native's panics are not Exceptions
                answer.set_exception(error)

        # A thread of its own, as one that hangs must hold up nobody else, not even the exit.
        threading.Thread(target=work, daemon=True).start()
        try:
            return answer.result(timeout=self._seconds)
        except NodeError:
            raise
        except FutureTimeout:
            raise NodeError(f"HDFS has not answered for {self._seconds:.0f} s") from None
        except BaseException as error:
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise
            raise NodeError(f"HDFS' client failed: {type(error).__name__}: {error}") from error


def board_of(cluster: Cluster) -> Board:
    """The board of a run."""
    hdfs = Hdfs(cluster.namenode_rpc, cluster.namenode_http, timeout_s=10)
    return TimedBoard(HdfsBoard(hdfs, cluster.status_dir))


def restart_marker(task: str, attempt: int) -> str:
    """The marker that asks one attempt of a task to start again."""
    return f"RESTART-{task}-{attempt}"


def read_json(board: Board, name: str) -> dict[str, Any] | None:
    """A document on the board, None when there is none or it is not one."""
    data = board.read(name)
    try:
        document = json.loads(data) if data else None
    except ValueError:
        return None
    return document if isinstance(document, dict) else None


def write_json(board: Board, name: str, document: dict[str, Any]) -> None:
    """Put a document on the board."""
    board.write(name, json.dumps(document).encode() + b"\n")


def mark_failed(
    board: Board, task: str, node: str, message: str, log_tail: Iterable[str] = ()
) -> None:
    """Leave the FAILED marker; the first one stays, as it is nearest to the cause."""
    if FAILED not in board.names():
        document = {"task": task, "node": node, "message": message, "log_tail": list(log_tail)}
        write_json(board, FAILED, {**document, "time": utc_now()})


def wait_for(board: Board, seconds: float) -> None:
    """Return once the board answers. Raises its NodeError when it does not in this time."""
    end = time.monotonic() + seconds
    while True:
        try:
            board.names()
        except NodeError:
            if time.monotonic() > end:
                raise
            time.sleep(2)
        else:
            return


def log_path(task: str) -> Path:
    """Where a task's output is kept on its node."""
    return LOG_DIR / f"{task}.log"


def log_end(path: Path, limit: int = LOG_TAIL_BYTES) -> bytes:
    """The last bytes of a log, from the start of a line; empty when there is none."""
    try:
        with path.open("rb") as file:
            start = max(0, file.seek(0, 2) - limit)
            file.seek(start)
            if start:
                file.readline()
            return file.read()
    except OSError:
        return b""


def log_tail(path: Path, lines: int = LOG_TAIL_LINES) -> list[str]:
    """The last lines of a log."""
    return log_end(path, limit=64 << 10).decode(errors="replace").splitlines()[-lines:]


def utc_now() -> str:
    """The time as ISO 8601 in UTC."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")
