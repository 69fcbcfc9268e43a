"""Which TCP ports are free, and who holds those that are not."""

from __future__ import annotations

import errno
import socket
from collections.abc import Mapping

from mayfly.errors import UserError
from mayfly_train.preflight.sockets import holder_of


def port_setting(environ: Mapping[str, str], variable: str, default: int) -> int:
    """The port that `variable` names, or the default; raises UserError for what is no port."""
    text = environ.get(variable) or str(default)
    if not text.isdecimal() or not 0 < int(text) < 2**16:
        raise UserError(f"{variable} is not a port: {text!r}", "give a number from 1 to 65535")
    return int(text)


def require_free(address: str, port: int, variable: str) -> None:
    """Return when `port` can be listened on; raises UserError, which names its holder."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            where = f"port {port} on {address}"
            if error.errno != errno.EADDRINUSE:
                why = f"{where} cannot be listened at: {error.strerror}"
                raise UserError(why, f"set {variable} to another port") from None
            who = holder_of(port) or "a process that cannot be seen"
            advice = f"stop it, or set {variable} to a free port"
            raise UserError(f"{where} is taken: held by {who}", advice) from None


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
