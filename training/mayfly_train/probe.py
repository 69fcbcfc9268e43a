"""Whether a program's gRPC server still speaks: a stopped or deadlocked one accepts, and is silent.

The kernel takes up connections for a process that hangs, so connecting proves nothing. A server of
HTTP/2 sends its SETTINGS frame first of all (RFC 9113, 3.4), so its absence does.
"""

from __future__ import annotations

import socket
import threading
import time

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
FRAME_HEADER_BYTES, TYPE_AT, SETTINGS = 9, 3, 4
INTERVAL_S = 5.0

SPEAKS, SILENT, ABSENT = "speaks", "silent", "absent"


def ask(address: tuple[str, int], timeout: float) -> str:
    """One look at a server: it speaks, is silent, or is absent (nobody listens, or not gRPC)."""
    try:
        with socket.create_connection(address, timeout) as connection:
            connection.sendall(PREFACE)
            header = b""
            while len(header) < FRAME_HEADER_BYTES:
                part = connection.recv(FRAME_HEADER_BYTES - len(header))
                if not part:
                    return ABSENT
                header += part
    except TimeoutError:
        return SILENT
    except OSError:
        return ABSENT
    return SPEAKS if header[TYPE_AT] == SETTINGS else ABSENT


class Pulse(threading.Thread):
    """Asks a server again and again; `silent_for` says for how long it has not answered.

    A server that has never answered, or that has gone, is not judged: programs need not have one.
    """

    def __init__(self, address: tuple[str, int], interval: float = INTERVAL_S) -> None:
        super().__init__(daemon=True)
        self._address = address
        self._interval = interval
        self._spoke: float | None = None
        self._end = threading.Event()

    def silent_for(self) -> float:
        """Seconds since the last answer of a server that accepts connections and says nothing."""
        spoke = self._spoke
        return time.monotonic() - spoke if spoke is not None else 0.0

    def stop(self) -> None:
        """Ask no more."""
        self._end.set()

    def run(self) -> None:
        while not self._end.wait(self._interval):
            answer = ask(self._address, self._interval)
            if answer == SPEAKS:
                self._spoke = time.monotonic()
            elif answer == ABSENT:
                self._spoke = None
