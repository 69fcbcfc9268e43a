"""How two nodes talk in preflight: lines of JSON over TCP, each naming the run and both nodes.

A question is `{"mayfly-preflight": 1, "run", "from", "to", "verb"}`, its answer
`{"mayfly-preflight": 1, "run", "node"}` with what the verb asks for. What another run, another node
or a stranger answers is none.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import socket
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mayfly_train.cluster import Node
from mayfly_train.preflight import sockets
from mayfly_train.preflight.edges import Fault, Port

MARK, VERSION = "mayfly-preflight", 1
HELLO, TIME, RING, SENT, FAREWELL = "hello", "time", "ring", "sent", "farewell"
IDLE_S = 60.0  # after which a peer's open connection is closed
CLOSING_S = 0.5
TIME_QUESTIONS = 3  # the one that took least counts

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Told = Callable[[str], Mapping[str, Any]]


class NoAnswer(Exception):
    """A peer was not reached, or what answers is not the peer: why, and what to do."""

    def __init__(self, reason: str, advice: str) -> None:
        super().__init__(reason)
        self.reason, self.advice = reason, advice


# --- answering ---------------------------------------------------------------------------------


class Host:
    """This node's ports: answers peers of the same run, and remembers what they have said.

    `told` is what a peer's hello is answered with, `sent` how many bytes went to the ring.
    `parted` are peers that found nothing wrong, `trouble` is the first one that did and its lines.
    """

    def __init__(self, run: str, node: Node, peers: Mapping[str, Node], told: Told) -> None:
        self._run, self._node, self._peers, self._told = run, node, peers, told
        self._servers: list[asyncio.AbstractServer] = []
        self._writers: set[asyncio.StreamWriter] = set()
        self.clock: Callable[[], float] = time.time
        self.ports: list[Port] = []
        self.met: set[str] = set()
        self.parted: set[str] = set()
        self.trouble: asyncio.Future[tuple[str, list[str]]] = asyncio.Future()
        self.ring: asyncio.Queue[Streams] = asyncio.Queue()
        self.sent: Callable[[], int] = lambda: 0

    async def open(self, ports: tuple[Port, ...], bind: str = "") -> list[Fault]:
        """Listen at these ports, on all addresses as engines do. Returns what is in the way."""
        faults = []
        for port in ports:
            listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            # As TensorFlow and torch do; a port that somebody listens at stays refused.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind((bind, port.number))
                listener.listen(1024)
            except OSError as error:
                listener.close()
                # All of /proc is searched, and peers are to be answered meanwhile.
                faults.append(await asyncio.to_thread(self._not_free, port, error))
                continue
            self._servers.append(await asyncio.start_server(self._serve, sock=listener))
            self.ports.append(Port(listener.getsockname()[1], port.use))
        return faults

    def _not_free(self, port: Port, error: OSError) -> Fault:
        reason = error.strerror or str(error)
        if error.errno == errno.EADDRINUSE:
            holder = sockets.holder_of(port.number)
            reason = f"in use by {holder or 'a process that cannot be seen'}"
        advice = f"end it: the port is needed for {port.use}"
        return Fault("port", self._node, reason, advice, port=port.number)

    async def close(self) -> None:
        """Listen no more, let peers read their answers, and drop what is still open."""
        for server in self._servers:
            server.close()
        end = time.monotonic() + CLOSING_S
        while self._writers and time.monotonic() < end:
            await asyncio.sleep(0.01)
        while not self.ring.empty():
            self._writers.add(self.ring.get_nowait()[1])
        for writer in list(self._writers):
            writer.transport.abort()
        await asyncio.sleep(0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        # The peer closes first, so nothing is lost; and no connection in TIME_WAIT keeps a
        # program without SO_REUSEADDR from the port.
        linger = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        try:
            while line := await asyncio.wait_for(reader.readline(), IDLE_S):
                question = _parse(line)
                writer.write(_line(self._answer(question)))
                await writer.drain()
                if self._is_ours(question) and question.get("verb") == RING:
                    self._writers.discard(writer)
                    await self.ring.put((reader, writer))
                    return
        except (OSError, ValueError, asyncio.TimeoutError, asyncio.CancelledError):
            pass
        writer.close()
        self._writers.discard(writer)

    def _is_ours(self, question: Mapping[str, Any]) -> bool:
        return question.get("run") == self._run and question.get("from") in self._peers

    def _answer(self, question: Mapping[str, Any]) -> dict[str, Any]:
        answer = {MARK: VERSION, "run": self._run, "node": self._node.name}
        if not self._is_ours(question):
            return answer
        peer, verb = str(question["from"]), question.get("verb")
        self.met.add(peer)
        if verb == HELLO:
            answer["ports"] = [[port.number, port.use] for port in self.ports]
            answer.update(self._told(peer))
        elif verb == TIME:
            answer["time"] = self.clock()
        elif verb == SENT:
            answer["sent"] = self.sent()
        elif verb == FAREWELL:
            lines = [str(fault) for fault in question.get("faults") or []]
            if not lines:
                self.parted.add(peer)
            elif not self.trouble.done():
                self.trouble.set_result((peer, lines))
        return answer


def _line(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document).encode() + b"\n"


def _parse(line: bytes) -> dict[str, Any]:
    """The document in a line. Raises ValueError when it is not one of ours."""
    document = json.loads(line)
    if not isinstance(document, dict) or document.get(MARK) != VERSION:
        raise ValueError("not of preflight")
    return document


# --- asking ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Caller:
    """Asks the peers of one run in the name of one node; `patience` is for one answer, in s."""

    run: str
    node: Node
    patience: float
    bind: str = ""

    async def ask(self, peer: Node, port: int, verb: str, **more: Any) -> dict[str, Any]:
        """One question on a connection of its own. Raises NoAnswer."""
        streams = await self.connect(peer, port)
        try:
            return await self.question(streams, peer, verb, **more)
        finally:
            await close(streams[1])

    async def connect(self, peer: Node, port: int) -> Streams:
        """A connection to a peer. Raises NoAnswer."""
        own = (self.bind, 0) if self.bind else None
        opening = asyncio.open_connection(peer.address, port, family=socket.AF_INET, local_addr=own)
        try:
            return await asyncio.wait_for(opening, self.patience)
        except asyncio.TimeoutError:
            raise NoAnswer(
                f"no connection within {self.patience:.0f} s",
                "a firewall or security group drops it: let the nodes reach each other there",
            ) from None
        except OSError as error:
            raise _refused(error) from None

    async def question(
        self, streams: Streams, peer: Node, verb: str, **more: Any
    ) -> dict[str, Any]:
        """One question on a connection that is open. Raises NoAnswer."""
        reader, writer = streams
        names = {"run": self.run, "from": self.node.name, "to": peer.name}
        try:
            writer.write(_line({MARK: VERSION, **names, "verb": verb, **more}))
            answer = _parse(await asyncio.wait_for(reader.readline(), self.patience))
        except asyncio.TimeoutError:
            raise NoAnswer(
                f"accepts connections and says nothing for {self.patience:.0f} s",
                "something hangs there: look with ss -tlnp on that node",
            ) from None
        except OSError as error:
            raise _refused(error) from None
        except ValueError:
            raise NoAnswer(
                "something else answers", "end it: look with ss -tlnp on that node"
            ) from None
        return self._checked(answer, peer)

    def _checked(self, answer: dict[str, Any], peer: Node) -> dict[str, Any]:
        if answer.get("run") != self.run:
            raise NoAnswer(
                f"run {answer.get('run')!r} answers", "two runs share the node: destroy the other"
            )
        if answer.get("node") != peer.name:
            raise NoAnswer(
                f"node {answer.get('node')!r} answers", "two nodes have one address: check it"
            )
        return answer


def _refused(error: OSError) -> NoAnswer:
    if isinstance(error, ConnectionRefusedError):
        return NoAnswer(
            "connection refused", "nothing listens there, or a firewall rejects it: look there"
        )
    if isinstance(error, socket.gaierror):
        return NoAnswer(why(error), "check DNS and /etc/hosts on this node")
    return NoAnswer(why(error), "check addresses, routes and the network between the two")


def why(error: OSError) -> str:
    """The reason in an error of a socket: asyncio's own text names the address, and no reason."""
    if isinstance(error, socket.gaierror):
        return f"its address is unknown: {error.strerror}"
    known = os.strerror(error.errno) if error.errno else str(error) or type(error).__name__
    return known.lower()


async def close(writer: asyncio.StreamWriter) -> None:
    """Close a connection, whatever has become of it."""
    with contextlib.suppress(OSError):
        writer.close()
        await writer.wait_closed()
