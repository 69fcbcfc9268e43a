"""Who listens at which port of this machine, as /proc tells.

Format: https://www.kernel.org/doc/Documentation/networking/proc_net_tcp.txt
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

PROC = Path("/proc")
_LISTENING = "0A"


def listening(address: str, proc: Path = PROC) -> set[int]:
    """The TCP ports that somebody listens at, at this IPv4 address or at all."""
    own = socket.inet_aton(address)[::-1].hex().upper()  # as the kernel writes it, also in IPv6
    return {
        port for place, port, _ in _listeners(proc) if place.endswith(own) or not place.strip("0")
    }


def holder_of(port: int, proc: Path = PROC) -> str | None:
    """The process that listens at a port, as `name (pid 12, in its directory)`; None when it
    cannot be seen. Of several, the first started: a child has its parent's sockets until it execs.
    """
    links = {f"socket:[{inode}]" for _, number, inode in _listeners(proc) if number == port}
    if not links:
        return None  # nobody listens: no process is looked at
    holders = [process for process in proc.glob("[0-9]*") if links & set(_open_files(process))]
    for process in sorted(holders, key=_started):
        try:
            name = (process / "comm").read_text(encoding="utf-8", errors="replace").strip()
            return f"{name} (pid {process.name}, in {(process / 'cwd').readlink()})"
        except OSError:  # it has ended meanwhile
            continue
    return None


def _listeners(proc: Path) -> Iterator[tuple[str, int, str]]:
    """Address, port and socket inode of everything that listens, the address in hexadecimal."""
    for table in ("net/tcp", "net/tcp6"):
        try:
            lines = (proc / table).read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        for fields in map(str.split, lines):
            if fields[3] == _LISTENING:
                place, _, port = fields[1].rpartition(":")
                yield place, int(port, 16), fields[9]


def _open_files(process: Path) -> Iterator[str]:
    """What a process has open; nothing of one that has ended, or is not ours to look at."""
    try:
        files = list((process / "fd").iterdir())
    except OSError:
        return
    for file in files:
        with contextlib.suppress(OSError):  # it was closed meanwhile
            yield str(file.readlink())


def _started(process: Path) -> int:
    """When it was started, in clock ticks since boot (proc_pid_stat(5), field 22)."""
    try:
        return int((process / "stat").read_bytes().rpartition(b")")[2].split()[19])
    except OSError:
        return 0
