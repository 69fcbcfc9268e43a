"""Which TCP ports are free, and who holds those that are not."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from pathlib import Path

from mayfly.errors import UserError

LISTEN = "0A"  # state of a listening socket in /proc/net/tcp (include/net/tcp_states.h)


def port_setting(environ: Mapping[str, str], variable: str, default: int) -> int:
    """The port that `variable` names, or the default; raises UserError for what is no port."""
    text = environ.get(variable) or str(default)
    if not text.isdecimal() or not 0 < int(text) < 2**16:
        raise UserError(f"{variable} is not a port: {text!r}", "give a number from 1 to 65535")
    return int(text)


def require_free(address: str, port: int, variable: str) -> None:
    """Return when `port` can be listened on; raises UserError that names its holder otherwise."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            who = holder(port) or error.strerror
            raise UserError(
                f"port {port} on {address} is taken: {who}",
                f"stop it, or set {variable} to a free port",
            ) from None


def free_ports(count: int, address: str = "127.0.0.1") -> list[int]:
    """Return `count` ports that nothing listens on now."""
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind((address, 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()


def holder(port: int, proc: Path = Path("/proc")) -> str | None:
    """`held by name (pid N, in its directory)` of the process that listens on `port`, or None when
    it cannot be seen. The directory tells another checkout's services from others."""
    wanted = {f"socket:[{inode}]" for inode in _listening_inodes(port, proc)}
    if not wanted:
        return None
    for process in proc.iterdir():
        if process.name.isdecimal() and _holds(process, wanted):
            name = (process / "comm").read_text().strip()
            return f"held by {name} (pid {process.name}{_place(process)})"
    return "held by a process of another user"


def _place(process: Path) -> str:
    try:
        return f", in {(process / 'cwd').readlink()}"
    except OSError:
        return ""


def _listening_inodes(port: int, proc: Path) -> set[str]:
    inodes = set()
    for table in ("net/tcp", "net/tcp6"):
        try:
            rows = (proc / table).read_text().splitlines()[1:]
        except OSError:
            continue
        for row in rows:
            fields = row.split()
            if fields[3] == LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add(fields[9])
    return inodes


def _holds(process: Path, wanted: set[str]) -> bool:
    try:
        return any(str(fd.readlink()) in wanted for fd in (process / "fd").iterdir())
    except OSError:
        return False
