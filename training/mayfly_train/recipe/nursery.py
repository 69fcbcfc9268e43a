"""The engine's processes of this machine, from outside: `dask_nursery` forks them.

Knows nothing of the engine, whose import takes a second.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

from mayfly_train.errors import NodeError
from mayfly_train.recipe import identity

END_S = 40.0  # until all that it has started must have ended


class Child:
    """A process that the nursery has forked, as far as others can look after it."""

    def __init__(self, pid: int, start: int) -> None:
        self.pid, self._start = pid, start

    def is_alive(self) -> bool:
        """Whether it has not ended yet."""
        fields = identity.stat(self.pid)
        return bool(fields) and int(fields[19]) == self._start and fields[0] != "Z"


class Nursery:
    """The nursery from outside: starts it, and asks it for children."""

    def __init__(self, log: Path, environ: Mapping[str, str] | None = None) -> None:
        """Its children's environment is this process's with `environ`, of which those that are
        empty are unset. Raises NodeError when it does not come up."""
        given = environ or {}
        kept = {name: value for name, value in os.environ.items() if name not in given}
        self.log = log
        with log.open("ab") as stream:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "mayfly_train.recipe.dask_nursery"),
                    *("--with-parent", str(os.getpid())),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stream,
                env={**kept, **{name: value for name, value in given.items() if value}},
                start_new_session=True,
            )
        self.pid = self._process.pid
        self._lock = threading.Lock()

    def start(self, program: str, words: list[str], log: Path) -> Child:
        """Start the scheduler or a worker. Raises NodeError when the nursery is gone."""
        ask, hear = self._process.stdin, self._process.stdout
        assert ask is not None and hear is not None, "it was started with pipes"
        wanted = {"program": program, "words": words, "log": str(log)}
        with self._lock:
            try:
                ask.write(json.dumps(wanted).encode() + b"\n")
                ask.flush()
                answer = hear.readline()
            except OSError:
                answer = b""
        if not answer:
            raise NodeError(f"the engine's {program} cannot be started here — see {self.log}")
        return Child(**json.loads(answer))

    def close(self) -> None:
        """End it, and with it all that it has started."""
        with contextlib.suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
