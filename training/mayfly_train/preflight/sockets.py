"""Who listens at which port of this machine, as /proc tells.

Format: https://www.kernel.org/doc/Documentation/networking/proc_net_tcp.txt
"""

from __future__ import annotations

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
    """The process that listens at a port, as `name (pid 12)`; None when it cannot be seen."""
    links = {f"socket:[{inode}]" for _, number, inode in _listeners(proc) if number == port}
    if not links:
        return None
    for process in proc.glob("[0-9]*"):
        if _has_open(process, links):
            try:
                name = (process / "comm").read_text(encoding="utf-8").strip()
            except OSError:
                name = "a process"
            return f"{name} (pid {process.name})"
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


def _has_open(process: Path, links: set[str]) -> bool:
    try:
        return any(str(file.readlink()) in links for file in (process / "fd").iterdir())
    except OSError:  # it has ended, or is not ours to look at
        return False
