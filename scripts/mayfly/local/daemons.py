"""Start programs that outlive this process, and end exactly those again.

A pid alone may have passed to another program by the time it is read. So the record kept beside it
has the boot and the process' start time, and a process counts as ours only when both still agree.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mayfly.errors import MayflyError
from mayfly.local.host import last_line

PROC = Path("/proc")
POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Process:
    """One process, told apart from all others that had or will have its number."""

    pid: int
    started: int  # clock ticks after boot, field 22 of /proc/<pid>/stat (proc(5))
    boot: str

    def alive(self, proc: Path = PROC) -> bool:
        """Whether this very process still runs (a zombie does not)."""
        return identify(self.pid, proc) == self


def identify(pid: int, proc: Path = PROC) -> Process | None:
    """The process that has this number now, or None when there is none."""
    try:
        # The command's name, in parentheses, may hold blanks and parentheses itself.
        fields = (proc / str(pid) / "stat").read_text().rpartition(")")[2].split()
        boot = (proc / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None
    state, started = fields[0], int(fields[19])
    return None if state in "ZX" else Process(pid, started, boot)


@dataclass(frozen=True)
class Daemon:
    """A program of ours in the background, with its record and its log in one directory."""

    name: str
    directory: Path

    @property
    def pidfile(self) -> Path:
        return self.directory / f"{self.name}.pid"

    @property
    def log(self) -> Path:
        return self.directory / f"{self.name}.log"

    def process(self) -> Process | None:
        """The running process, or None when it ended, was never started, or the record is old."""
        try:
            record = Process(**json.loads(self.pidfile.read_text()))
        except (OSError, ValueError, TypeError):
            return None
        return record if record.alive() else None

    def start(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        """Start `command` in a session of its own, with its output in the log."""
        with self.log.open("ab") as log:
            self.log.chmod(0o600)
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=dict(environ),
                cwd=self.directory,
                start_new_session=True,
            )
        process = identify(child.pid)
        if process is None:
            raise MayflyError(f"{self.name} ended at once: {self.last_line()}", f"see {self.log}")
        self.pidfile.write_text(json.dumps(vars(process)))

    def wait(self, ready: Callable[[], bool], seconds: float) -> None:
        """Wait until `ready()`; raises MayflyError when the program ends or takes too long."""
        deadline = time.monotonic() + seconds
        while not ready():
            if self.process() is None:
                raise MayflyError(
                    f"{self.name} does not start: {self.last_line()}", f"see {self.log}"
                )
            if time.monotonic() > deadline:
                raise MayflyError(
                    f"{self.name} is not ready after {seconds:.0f} s", f"see {self.log}"
                )
            time.sleep(POLL_SECONDS)

    def stop(self, seconds: float = 20) -> bool:
        """End the process: politely, and after `seconds` by force. Returns whether it ran."""
        process = self.process()
        if process:
            os.kill(process.pid, signal.SIGTERM)
            if not _gone(process, seconds):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                _gone(process, seconds)
        self.pidfile.unlink(missing_ok=True)
        return process is not None

    def last_line(self) -> str:
        """The last line of the log that says something."""
        return last_line(self.log.read_text(errors="replace") if self.log.exists() else "")


def plain_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """What a daemon may know of the user's environment: where things are, not who may do what."""
    kept = (
        "PATH",
        "HOME",
        "LANG",
        "LC_ALL",
        "SSL_CERT_FILE",
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "NO_PROXY",
    )
    return {name: value for name, value in environ.items() if name.upper() in kept}


def _gone(process: Process, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while process.alive():
        if time.monotonic() > deadline:
            return False
        with contextlib.suppress(ChildProcessError):  # ours when this process started it
            os.waitpid(process.pid, os.WNOHANG)
        time.sleep(POLL_SECONDS / 2)
    return True
