"""Sums over all nodes by way of the first: what a distributed trainer needs, and no more.

Addresses and ranks are those of the environment, the same that torch.distributed reads.
"""

from __future__ import annotations

import os
import socket
import time

import numpy as np

PATIENCE_S = 120.0


class Exchange:
    """Connections between the first node and all others; a sum ends when all have given theirs."""

    def __init__(self) -> None:
        """Connect. Raises OSError when the first node is not to be reached."""
        self.rank = int(os.environ.get("RANK", "0"))
        self.size = int(os.environ.get("WORLD_SIZE", "1"))
        self._others: list[socket.socket] = []
        if self.size == 1:
            return
        address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        if self.rank == 0:
            with socket.create_server(address, backlog=self.size) as server:
                server.settimeout(PATIENCE_S)
                self._others = [server.accept()[0] for _ in range(self.size - 1)]
        else:
            self._others = [_connected(address)]
        for each in self._others:
            each.settimeout(PATIENCE_S)

    def total(self, values: np.ndarray) -> np.ndarray:
        """The sum over all nodes of arrays of one shape, float64."""
        if self.rank == 0:
            for each in self._others:
                values = values + _receive(each, values)
            for each in self._others:
                each.sendall(values.tobytes())
            return values
        self._others[0].sendall(np.ascontiguousarray(values).tobytes())
        return _receive(self._others[0], values)


def _connected(address: tuple[str, int]) -> socket.socket:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return socket.create_connection(address, timeout=PATIENCE_S)
        except ConnectionRefusedError:  # the first one is not there yet
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def _receive(other: socket.socket, like: np.ndarray) -> np.ndarray:
    data = bytearray()
    while len(data) < like.nbytes:
        piece = other.recv(like.nbytes - len(data))
        if not piece:
            raise ConnectionError("another node has ended")
        data += piece
    return np.frombuffer(bytes(data)).reshape(like.shape)
