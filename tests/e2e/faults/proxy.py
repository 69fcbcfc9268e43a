"""A TCP proxy that cuts connections: each one after a random number of bytes, so many in all."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
import time
from dataclasses import dataclass
from types import TracebackType
from urllib.parse import urlsplit

READ_BYTES = 1 << 16
RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER: the peer sees a reset, not an end


@dataclass(frozen=True)
class Cuts:
    """How many connections are cut, and after at most how many bytes.

    The same seed gives the same numbers.
    """

    seed: int
    count: int
    most_bytes: int


class CuttingProxy:
    """Stands before a server, on an address that nodes reach, while the context lasts.

    While cuts are left, a connection lives for a random number of bytes, up and down together;
    later ones live for ever. `pace` bounds the bytes per second of each connection.
    """

    def __init__(self, server_url: str, address: str, cuts: Cuts | None = None, pace: int = 0):
        cuts = cuts or Cuts(0, 0, 0)
        server = urlsplit(server_url)
        assert server.hostname and server.port
        self._server = (server.hostname, server.port)
        self._random, self._most_bytes = random.Random(cuts.seed), cuts.most_bytes
        self._lock, self._left = threading.Lock(), cuts.count
        self._listener = socket.create_server((address, 0))
        self._sockets: set[socket.socket] = {self._listener}
        self.url = f"http://{address}:{self._listener.getsockname()[1]}"
        self.pace = pace
        self.done = 0

    def __enter__(self) -> CuttingProxy:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for one in list(self._sockets):
            self._close(one)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:  # closed: the context has ended
                return
            try:
                server = socket.create_connection(self._server, timeout=10)
            except OSError:
                client.close()
                continue
            server.settimeout(None)
            self._sockets |= {client, server}
            pair = _Pair(self, client, server, self._life())
            for source, target in ((client, server), (server, client)):
                threading.Thread(target=pair.carry, args=(source, target), daemon=True).start()

    def _life(self) -> int | None:
        """After how many bytes the next connection is cut, None for never."""
        with self._lock:
            if not self._left:
                return None
            self._left -= 1
            return self._random.randrange(1, self._most_bytes)

    def count_cut(self) -> None:
        """One more connection was cut."""
        with self._lock:
            self.done += 1

    def give_back(self) -> None:
        """A connection ended before its cut: another will be cut."""
        with self._lock:
            self._left += 1

    def _close(self, one: socket.socket) -> None:
        with contextlib.suppress(OSError):
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads from it
        one.close()
        self._sockets.discard(one)


class _Pair:
    """A client's connection and the server's, which end together."""

    def __init__(
        self, proxy: CuttingProxy, client: socket.socket, server: socket.socket, life: int | None
    ):
        self._proxy, self._pair, self._life = proxy, (client, server), life
        self._lock, self._over = threading.Lock(), False

    def carry(self, source: socket.socket, target: socket.socket) -> None:
        """Carry bytes one way until an end closes or the connection's life is over."""
        with contextlib.suppress(OSError):
            while data := source.recv(READ_BYTES):
                allowed = self._allowed(len(data))
                target.sendall(data[:allowed])
                if self._proxy.pace:
                    time.sleep(allowed / self._proxy.pace)
                if allowed < len(data):
                    self._end(cut=True)
                    return
        self._end(cut=False)

    def _allowed(self, size: int) -> int:
        with self._lock:
            if self._life is None:
                return size
            allowed = min(size, self._life)
            self._life -= allowed
            return allowed

    def _end(self, cut: bool) -> None:
        with self._lock:
            if self._over:
                return
            self._over = True
        if cut:
            self._proxy.count_cut()
        elif self._life is not None:
            self._proxy.give_back()
        for one in self._pair:
            self._proxy._close(one)
