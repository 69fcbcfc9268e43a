"""How far a node's staging or preprocessing is, written to S3 for whoever watches the run."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from mayfly_train.errors import NodeError
from mayfly_train.manifest import utc_now

log = logging.getLogger(__name__)


class StagingProgress:
    """Counts what is done, and hands the document to `put` now and then, from one thread.

    `about` says whose document it is.

    A context manager: leaving it writes the last document, with the error when there was one.
    Status that cannot be written is logged and does not stop the work.
    """

    def __init__(
        self,
        put: Callable[[dict[str, Any]], None],
        about: Mapping[str, Any],
        interval_s: float = 2,
    ):
        self._put, self._interval_s = put, interval_s
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._clock = time.monotonic()
        self._document: dict[str, Any] = {
            "version": 1,
            **about,
            "files_done": 0,
            "files_total": 0,
            "bytes_done": 0,
            "bytes_total": 0,
            "started": utc_now(),
            "finished": None,
            "seconds": 0.0,
            "error": None,
        }
        self._thread = threading.Thread(target=self._write_now_and_then, daemon=True)

    def set_total(self, files: int, size: int) -> None:
        """Say how much there is to do."""
        with self._lock:
            self._document.update(files_total=files, bytes_total=size)

    def add(self, size: int, files: int = 0) -> None:
        """Count bytes (negative when they have to be copied again) and whole files."""
        with self._lock:
            self._document["bytes_done"] += size
            self._document["files_done"] += files

    def set_done(self, files: int) -> None:
        """Say how many files are done, where others have a part in it."""
        with self._lock:
            self._document["files_done"] = files

    def document(self) -> dict[str, Any]:
        """What would be written now."""
        with self._lock:
            return {**self._document, "seconds": round(time.monotonic() - self._clock, 2)}

    def __enter__(self) -> StagingProgress:
        self._write()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join()
        with self._lock:
            self._document["finished"] = utc_now()
            if error is not None:
                self._document["error"] = str(error) or type(error).__name__
        self._write()

    def _write_now_and_then(self) -> None:
        while not self._ended.wait(self._interval_s):
            self._write()

    def _write(self) -> None:
        try:
            self._put(self.document())
        except NodeError as error:
            log.warning("cannot write the status: %s", error)
