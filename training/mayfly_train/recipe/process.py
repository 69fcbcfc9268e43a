"""One command in a process group of its own, which ends with everything that it has started."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from mayfly_train.recipe import identity, slots

ATTEMPT = "MAYFLY_ATTEMPT"  # in the environment of all that an attempt starts
WORKER = "MAYFLY_WORKER"  # whose attempt it is, as `identity` names it
GRACE_S = 5.0  # from TERM to KILL
RUNNING, SLOTS, OUTPUTS = "running", "slots", "outputs"  # below a node's scratch directory
_LOOK_S = 0.2  # how often someone who may want an end is asked
_NOT_FOUND, _NOT_EXECUTABLE = 127, 126  # as shells report it
_PR_SET_CHILD_SUBREAPER, _PR_SET_PDEATHSIG, _PR_SET_NAME = 36, 1, 15


@dataclass(frozen=True)
class Ended:
    """How a command ended. `why` is empty, or the reason for which we ended it."""

    exit_code: int
    why: str = ""


@dataclass(frozen=True)
class Command:
    """What is run, where, and what it leaves its output in."""

    words: Sequence[str]
    directory: Path
    environment: Mapping[bytes, bytes]
    """In bytes: text would be encoded anew for each process."""
    stdout: IO[bytes]
    stderr: IO[bytes]
    attempt: str
    """What ATTEMPT in the environment says."""


def run(
    command: Command,
    deadline: float | None,
    ask: Callable[[], str],
    note: Callable[[int], None] | None = None,
) -> Ended:
    """Run to the end, or until `ask` gives a reason to end it, or the monotonic clock's deadline.

    Whatever of its group is left then gets TERM, and KILL after GRACE_S. `note` is told the
    group, for whoever cleans up after a killed worker.
    """
    try:
        process = subprocess.Popen(
            list(command.words),
            cwd=command.directory,
            env=command.environment,
            stdin=subprocess.DEVNULL,
            stdout=command.stdout,
            stderr=command.stderr,
            start_new_session=True,
        )
    except OSError as error:
        return _not_started(command, error)
    why = "worker"  # stands when an exception ends us
    try:
        if note is not None:
            note(process.pid)
        why = _wait(process, deadline, ask)
    finally:
        if why:
            end_group(process.pid, process)
    code = process.wait()
    end_group(process.pid)
    _end_escaped(command.attempt)
    return Ended(code, why)


def _not_started(command: Command, error: OSError) -> Ended:
    """A program that is missing is the command's fault; no memory or no process is the node's."""
    if isinstance(error, (FileNotFoundError, PermissionError, NotADirectoryError)) or (
        error.errno == 8  # noqa: PLR2004 (ENOEXEC)
    ):
        text = f"cannot run {command.words[0]!r}: {error.strerror}\n"
        command.stderr.write(text.encode())
        command.stderr.flush()
        missing = isinstance(error, FileNotFoundError)
        return Ended(_NOT_FOUND if missing else _NOT_EXECUTABLE)
    raise error


def _wait(process: subprocess.Popen[bytes], deadline: float | None, ask: Callable[[], str]) -> str:
    """Wait for the leader; the reason for not waiting longer, empty when it has ended."""
    with _ends(process) as wait:
        while not wait(_LOOK_S):
            if deadline is not None and time.monotonic() > deadline:
                return "timeout"
            if why := ask():
                return why
    return ""


@contextlib.contextmanager
def _ends(process: subprocess.Popen[bytes]) -> Any:
    """A function that waits so many seconds and says whether the process has ended.

    A pidfd wakes up at once, where Popen.wait sleeps in growing steps.
    """
    try:
        descriptor = os.pidfd_open(process.pid)
    except (OSError, AttributeError):

        def by_sleeping(seconds: float) -> bool:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(seconds)
            return process.returncode is not None

        yield by_sleeping
        return
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        yield lambda seconds: bool(poll.poll(seconds * 1000))
    finally:
        os.close(descriptor)


def end_group(
    group: int, leader: subprocess.Popen[bytes] | None = None, grace_s: float = GRACE_S
) -> None:
    """TERM to a process group, and KILL to what is left of it after a while; returns when it is
    gone. The leader, which is our child, is reaped here when it is given."""
    if not _signal(group, signal.SIGTERM):
        return
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline:
        if leader is not None:
            leader.poll()
        _reap(group)
        if not _signal(group, 0):
            return
        time.sleep(0.02)
    while _signal(group, signal.SIGKILL):
        if leader is not None:
            leader.poll()
        _reap(group)
        if all(_state_of(pid) in ("", "Z") for pid in _members(group)):
            return  # dead, though someone outside of the group has not reaped them
        time.sleep(0.02)


def _signal(group: int, number: int) -> bool:
    """Send a signal; False when nobody of the group is left."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _reap(group: int) -> None:
    """Reap adopted children of this group: a zombie would count as one who is left."""
    with contextlib.suppress(ChildProcessError):
        for pid in children():
            if _group_of(pid) == group and _state_of(pid) == "Z" and pid != group:
                os.waitpid(pid, os.WNOHANG)


def _end_escaped(attempt: str) -> None:
    """Kill what has left the group by a session of its own; an adopter sees it as its child.

    The children of those that are killed become ours, and are looked for in turn.
    """
    while attempt and (found := [pid for pid in children() if _attempt_of(pid) == attempt]):
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def adopt_orphans() -> None:
    """Let orphans of our descendants become our children instead of init's (Linux)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_with_parent(parent: int) -> None:
    """Get TERM when the thread that has started this process ends, even by kill -9 (Linux).

    `parent` is who that was: it may have ended before this line, and others adopted us.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)


def name_thread(name: str) -> None:
    """What `ps` and `top` call this process, 15 characters of it (Linux)."""
    text = ctypes.create_string_buffer(name.encode())
    ctypes.CDLL(None).prctl(_PR_SET_NAME, text, 0, 0, 0)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def kill_orphans(scratch: Path) -> int:
    """Kill what workers, which are dead themselves, have left on this node, and remove their
    slots and what they were fetching; how many process groups there were.

    Records name groups. What left its group, or was started so late that its worker died before
    it could record it, is known by its environment.
    """
    killed = 0
    attempts: set[str] = set()
    for record in (scratch / RUNNING).glob("*"):
        with contextlib.suppress(ValueError, OSError):
            worker, groups = slots.read_records(record)
            if identity.is_here(worker):
                if not identity.is_gone(worker):
                    continue
                attempts.update(attempt for _, attempt in groups)
                killed += sum(_kill_group(group, attempt) for group, attempt in groups)
            for slot in (scratch / SLOTS).glob(f"{record.name}.*"):
                shutil.rmtree(slot, ignore_errors=True)
            record.unlink(missing_ok=True)
    for path in (scratch / OUTPUTS).glob("*/*/.*"):
        if slots.is_left(path):
            shutil.rmtree(path, ignore_errors=True)
    for pid in _pids():
        has = _environment_of(pid)
        if has.get(ATTEMPT) in attempts or _is_orphan(has):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
    return killed


def _kill_group(group: int, attempt: str) -> bool:
    """Kill a recorded group, if it is still of the attempt."""
    if any(_attempt_of(pid) == attempt for pid in _members(group)):
        return _signal(group, signal.SIGKILL)
    return False


def _is_orphan(environment: Mapping[str, str]) -> bool:
    """Whether a process with this environment is of a worker that has ended."""
    with contextlib.suppress(ValueError):
        return WORKER in environment and identity.is_gone(environment[WORKER])
    return False


def children() -> list[int]:
    """Our children, those that the main thread has: it is the one that adopts."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children", "rb") as stream:  # noqa: PTH123
            return [int(pid) for pid in stream.read().split()]
    except OSError:
        return []


def _members(group: int) -> list[int]:
    return [pid for pid in _pids() if _group_of(pid) == group]


def _pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def _attempt_of(pid: int) -> str:
    return _environment_of(pid).get(ATTEMPT, "")


def _environment_of(pid: int) -> dict[str, str]:
    """Our own variables among those that a process was started with."""
    try:
        items = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    pairs = (item.decode(errors="replace").partition("=") for item in items)
    return {name: value for name, _, value in pairs if name in (ATTEMPT, WORKER)}


def _group_of(pid: int) -> int:
    fields = identity.stat(pid)
    return int(fields[2]) if fields else 0


def _state_of(pid: int) -> str:
    fields = identity.stat(pid)
    return fields[0] if fields else ""
