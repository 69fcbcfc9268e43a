"""A ring all-reduce over plain sockets: the sum of all nodes' data, and the bandwidth of edges.

Rule of the ring: P. Patarasuk, X. Yuan, Bandwidth optimal all-reduce algorithms for clusters of
workstations, 2009. Data are 64-bit lanes that cannot overflow, so that one long integer is a whole
vector and needs no numpy.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from mayfly_train.preflight.meeting import Streams, why

LANES, LANE_BYTES = 1 << 19, 8  # 4 MiB
BURST_BYTES = 1 << 20
_PIECE_BYTES = 1 << 16
MIB = 1 << 20


class Stalled(Exception):
    """Nothing has come over the edge from the node before for too long, or it has ended."""

    def __init__(self, received: int, reason: str) -> None:
        super().__init__(reason)
        self.received, self.reason = received, reason


class WrongSum(Exception):
    """The data that came round are not the sum of what the nodes put in."""


@dataclass(frozen=True)
class Edge:
    """A directed edge and what it carried, in MiB/s."""

    start: str
    end: str
    mib_per_s: float

    def document(self) -> dict[str, Any]:
        """The edge as a document."""
        return {"from": self.start, "to": self.end, "mib_per_s": round(self.mib_per_s, 1)}


@dataclass(frozen=True)
class Result:
    """What an all-reduce has shown: its own bandwidth (data by time), and the slowest edge."""

    nodes: int
    seconds: float
    slowest: Edge

    def document(self) -> dict[str, Any]:
        """The result as a document."""
        size = LANES * LANE_BYTES
        return {
            "nodes": self.nodes,
            "bytes": size,
            "seconds": round(self.seconds, 4),
            "mib_per_s": round(size / MIB / self.seconds, 1),
            "slowest": self.slowest.document(),
        }


class Ring:
    """One node's place in the ring: sends to the next node, receives from the one before.

    `sent` and `received` count bytes; a byte that was sent and never received names the edge.
    """

    def __init__(
        self, names: list[str], rank: int, after: Streams, before: Streams, patience: float
    ) -> None:
        self._names, self._rank, self._size = names, rank, len(names)
        self._writer, self._reader = after[1], before[0]
        self._patience = patience
        self.sent = self.received = 0

    async def reduce(self) -> Result:
        """All of it. Raises Stalled or WrongSum."""
        own = await self._incoming_edge()
        started = perf_counter()
        await self._sum()
        seconds = perf_counter() - started
        return Result(self._size, seconds, await self._slowest(own))

    async def _incoming_edge(self) -> Edge:
        """The bandwidth of the edge from the node before: first byte to last, all at once."""
        _, rate = await self._exchange(bytes(BURST_BYTES), BURST_BYTES)
        return Edge(self._names[self._rank - 1], self._names[self._rank], rate)

    async def _sum(self) -> None:
        parts = [self._part(number) for number in range(self._size)]
        steps = [(step, True) for step in range(self._size - 1)]
        steps += [(step, False) for step in range(-1, self._size - 2)]
        for step, adds in steps:
            out, into = (self._rank - step) % self._size, (self._rank - step - 1) % self._size
            came, _ = await self._exchange(parts[out], len(parts[into]))
            parts[into] = _add(parts[into], came) if adds else came
        total = (self._size * (self._size + 1) // 2).to_bytes(LANE_BYTES, "little")
        if b"".join(parts) != total * LANES:
            raise WrongSum

    def _part(self, number: int) -> bytes:
        """A part of this node's data: rank + 1 in every lane."""
        lanes = LANES * (number + 1) // self._size - LANES * number // self._size
        return (self._rank + 1).to_bytes(LANE_BYTES, "little") * lanes

    async def _slowest(self, edge: Edge) -> Edge:
        """The slowest of all nodes' edges, handed round."""
        for _ in range(self._size - 1):
            line = json.dumps([edge.start, edge.end, edge.mib_per_s]).encode().ljust(1024)
            came, _ = await self._exchange(line, len(line))
            edge = min(edge, Edge(*json.loads(came)), key=lambda item: item.mib_per_s)
        return edge

    async def _exchange(self, data: bytes, size: int) -> tuple[bytes, float]:
        sending = asyncio.ensure_future(self._send(data))
        try:
            came = await self._receive(size)
            await asyncio.wait_for(sending, 3 * self._patience)
        except asyncio.TimeoutError:
            raise Stalled(self.received, "the node after takes no data") from None
        finally:
            sending.cancel()
        return came

    async def _send(self, data: bytes) -> None:
        view = memoryview(data)
        try:
            for start in range(0, len(data), _PIECE_BYTES):
                piece = view[start : start + _PIECE_BYTES]
                self._writer.write(piece)
                self.sent += len(piece)
                await self._writer.drain()
        except OSError:
            # The node after names this edge if it is at fault; we wait for the node before.
            await asyncio.sleep(2 * self._patience)
            raise Stalled(self.received, "the node after has closed the connection") from None

    async def _receive(self, size: int) -> tuple[bytes, float]:
        """So many bytes, and how fast they came once the first had, in MiB/s."""
        pieces: list[bytes] = []
        left, started = size, 0.0
        while left:
            try:
                reading = self._reader.read(min(left, _PIECE_BYTES))
                piece = await asyncio.wait_for(reading, self._patience)
            except asyncio.TimeoutError:
                raise Stalled(self.received, f"no data for {self._patience:.0f} s") from None
            except OSError as error:
                raise Stalled(self.received, why(error)) from None
            if not piece:
                raise Stalled(self.received, "the connection was closed")
            started = started if pieces else perf_counter()
            pieces.append(piece)
            left -= len(piece)
            self.received += len(piece)
        seconds = max(perf_counter() - started, 1e-6)
        return b"".join(pieces), max(1, size - len(pieces[0])) / MIB / seconds


def _add(left: bytes, right: bytes) -> bytes:
    """The sums of all lanes."""
    total = int.from_bytes(left, "little") + int.from_bytes(right, "little")
    return total.to_bytes(len(left), "little")
