"""What names one process and no other: its number alone may mean another one by tomorrow.

Numbers of processes are of one boot and one PID namespace (pid_namespaces(7)); a host's name says
neither: two machines may share one, and a machine that was booted again keeps it.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path


@functools.lru_cache(maxsize=1)
def space() -> str:
    """Boot and PID namespace that this process is in; elsewhere its numbers say nothing."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}.{os.stat('/proc/self/ns/pid').st_ino}"  # noqa: PTH116 (a link that leads nowhere)


def own() -> str:
    """This process: number, start time and space."""
    return f"{os.getpid()} {start_time(os.getpid())} {space()}"


def is_here(identity: str) -> bool:
    """Whether a process is, or was, of this boot and namespace. Raises ValueError for no name."""
    return _parts(identity)[2] == space()


def is_gone(identity: str) -> bool:
    """Whether a process of this boot and namespace has ended; one of elsewhere has not, for all
    that can be seen from here. Raises ValueError for what names none."""
    pid, started, where = _parts(identity)
    return where == space() and start_time(pid) != started


def start_time(pid: int) -> int:
    """When a process was started, in clock ticks since boot; 0 when there is none.

    With the pid it names one process and no later one (proc_pid_stat(5), field 22).
    """
    fields = stat(pid)
    return int(fields[19]) if fields else 0


def stat(pid: int) -> list[str]:
    """The fields of proc_pid_stat(5) after the name, which may hold blanks and brackets; empty
    when there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return []
    # The kernel cuts a name after 15 bytes, also within a character.
    return text.decode(errors="replace").rpartition(")")[2].split()


def _parts(identity: str) -> tuple[int, int, str]:
    pid, started, where = identity.split()
    return int(pid), int(started), where
