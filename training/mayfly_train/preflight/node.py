"""One node's part in preflight, from its first open port to the report.

A node answers its peers until each of those that test it has said farewell, with what it found: so
nobody leaves before the others have seen it, and all know how it ended, with or without HDFS.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from mayfly_train import markers
from mayfly_train.cluster import Cluster, Node
from mayfly_train.errors import BadInput, NodeError
from mayfly_train.preflight import allreduce, checks, meeting
from mayfly_train.preflight.checks import Surroundings, in_thread
from mayfly_train.preflight.edges import (
    FULL_MESH_NODES,
    Fault,
    Offset,
    clock_faults,
    name_faults,
    offset_of,
    ports_of,
    ring_of,
    targets_of,
    testers_of,
)
from mayfly_train.preflight.meeting import Caller, Host, NoAnswer
from mayfly_train.topology import parse_task

LOG = logging.getLogger(__name__)
TASK = "preflight"
LONGEST_PAUSE_S = 2.0
T = TypeVar("T")


@dataclass(frozen=True)
class Limits:
    """How long things may take, in seconds.

    Nodes are configured at different times: `first_answer` is for a peer to appear at all, as long
    as torch's rendezvous waits; `grace` for one that is known to be up; `settle` for further faults
    to be found after the first; `answer` for one question, `stall` for data in the ring, `store`
    for HDFS or S3 to come up, and `store_answer` for one try of it.
    """

    first_answer: float = 600.0
    grace: float = 10.0
    settle: float = 5.0
    answer: float = 3.0
    stall: float = 10.0
    store: float = 30.0
    store_answer: float = 45.0
    poll: float = 2.0


@dataclass
class Report:
    """What a node has found; `given_up` is another node's fault that ended the whole."""

    run: str
    node: str
    nodes: int
    mesh: str
    targets: list[str]
    edges: list[dict[str, Any]] = field(default_factory=list)
    offsets: dict[str, float] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    interface: str | None = None
    allreduce: dict[str, Any] | None = None
    given_up: str | None = None
    begun: bool = False
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether the engine may start."""
        return not self.faults and self.given_up is None

    def document(self) -> dict[str, Any]:
        """The report as a document (its fields are described in docs/preflight.md)."""
        return {
            "version": 1,
            "run": self.run,
            "node": self.node,
            "ok": self.ok,
            "seconds": round(self.seconds, 2),
            "nodes": self.nodes,
            "mesh": self.mesh,
            "begun": self.begun,
            "targets": self.targets,
            "edges": self.edges,
            "clock_offsets_s": {name: round(s, 4) for name, s in self.offsets.items()},
            "interface": self.interface,
            "allreduce": self.allreduce,
            "faults": [fault.document() for fault in self.faults],
            "warnings": self.warnings,
            "given_up": self.given_up,
            "updated": markers.utc_now(),
        }

    def lines(self) -> list[str]:
        """The report in lines for people: what is wrong, or one line of what was seen."""
        lines = [fault.line for fault in self.faults]
        if self.given_up is not None and not lines:
            lines = [f"preflight: {self.node} gave up: {self.given_up}"]
        if self.ok:
            lines = [f"preflight: {', '.join(self._seen())}"]
        return lines + [f"preflight: warning: {text}" for text in self.warnings]

    def _seen(self) -> Iterable[str]:
        yield f"{self.nodes} node{'s' if self.nodes > 1 else ''}"
        if self.begun:
            yield "the run has begun without this one, its peers were not asked"
        yield f"{len(self.edges)} edges from {self.node}"
        if self.offsets:
            worst = max(map(abs, self.offsets.values()))
            yield f"clocks within {worst * 1000:.0f} ms"
        if self.allreduce:
            slowest = self.allreduce["slowest"]
            yield f"all-reduce at {self.allreduce['mib_per_s']} MiB/s"
            yield (
                f"slowest edge {slowest['from']} → {slowest['to']}"
                f" with {slowest['mib_per_s']} MiB/s"
            )
        yield f"{self.seconds:.1f} s"


class GivenUp(Exception):
    """Another node's faults have ended the run; `node` is its name."""

    def __init__(self, node: str, message: str, lines: list[str]) -> None:
        super().__init__(message)
        self.node, self.lines = node, lines


class Preflight:
    """One node's preflight; `run` returns its report."""

    def __init__(
        self,
        cluster: Cluster,
        node: Node,
        around: Surroundings,
        limits: Limits | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.cluster, self.node, self.around = cluster, node, around
        self.limits = limits or Limits()
        self.clock = clock
        nodes = cluster.nodes
        self.targets = targets_of(cluster, node)
        self.names = {other.name: other for other in nodes if other != node}
        mesh = "full" if len(nodes) <= FULL_MESH_NODES else "neighbours"
        self.report = Report(
            cluster.run, node.name, len(nodes), mesh, [peer.name for peer in self.targets]
        )
        self._resolved: dict[str, list[str]] = {}
        self._offsets: dict[Node, Offset] = {}
        self._noted: set[str] = set()

    async def run(self) -> Report:
        """Test everything, tell the others, and wait for what they say."""
        started = time.monotonic()
        self._resolved = await in_thread(
            lambda: checks.resolved(self.around, (self.node, *self.targets)), 60
        )
        self.host = Host(self.cluster.run, self.node, self.names, self._told)
        self.host.clock = self.clock
        self.caller = Caller(self.cluster.run, self.node, self.limits.answer, self.around.bind)
        coming = asyncio.ensure_future(self._note())
        try:
            await self._until_known()
        finally:
            await self.host.close()
        self.report.seconds = time.monotonic() - started
        await coming
        await self._note()
        return self.report

    async def _until_known(self) -> None:
        """Until this node knows how it ends: by its own faults, another's, or well for all."""
        own = asyncio.ensure_future(self._all())
        others = asyncio.ensure_future(self._watch_others())
        try:
            await asyncio.wait({own, others}, return_when=asyncio.FIRST_COMPLETED)
            if own.done():
                own.result()
            else:
                others.result()
        except GivenUp as ended:
            self.report.given_up = f"the run has failed: {ended}"
            await self._mark(ended.node, str(ended), ended.lines)
        finally:
            await _end(own, others)
        if self.report.faults:
            first, *more = self.report.faults
            message = f"{first}{f' (and {len(more)} more)' if more else ''}"
            lines = self.report.lines()[: markers.LOG_TAIL_LINES]
            await asyncio.gather(self._mark(self.node.name, message, lines), self._part(lines))

    async def _all(self) -> None:
        """The checks one after the other, each only when those before found nothing."""
        self.report.faults = await self._own_and_mesh()
        if self.report.faults:
            return
        if self.targets and not self.report.begun:
            self.report.faults = await self._all_reduce()
            if not self.report.faults:
                await self._farewells()

    # --- the node's own ---

    async def _own_and_mesh(self) -> list[Fault]:
        in_use = await self.host.open(ports_of(self.cluster, self.node), self.around.bind)
        self.report.begun = await self._has_begun()
        own = asyncio.ensure_future(self._own_checks())
        mesh = asyncio.ensure_future(self._mesh())
        try:
            faults = in_use + await own
            return faults or await mesh
        finally:
            await _end(own, mesh)

    async def _has_begun(self) -> bool:
        """Whether tasks have told of themselves: their nodes answer no preflight any more."""
        try:
            names = await in_thread(self.around.board.names, self.limits.store)
        except NodeError:
            return False  # whether HDFS works is checked elsewhere
        return any(map(_is_heartbeat, names))

    async def _own_checks(self) -> list[Fault]:
        found = await asyncio.gather(
            self._names(), self._interface(), self._store(), self._bucket()
        )
        return [fault for part in found for fault in part]

    async def _names(self) -> list[Fault]:
        if not self.names:
            return []
        near, around = (self.node, *self.targets), self.around
        self.report.warnings = await in_thread(
            lambda: checks.name_warnings(self.node, near, around), 60
        )
        return checks.address_faults(self.node, self._resolved, around.is_loopback)

    async def _interface(self) -> list[Fault]:
        if not self.names:
            return []
        first = self.cluster.workers[0].address
        try:
            self.report.interface = await in_thread(lambda: self.around.interface(first), 30)
        except NodeError as error:
            return [checks.interface_fault(self.node, error)]
        return []

    async def _store(self) -> list[Fault]:
        limits = self.limits
        closed = await checks.namenode_faults(self.cluster, self.node, limits.store, limits.answer)
        return closed or await checks.prove(
            "hdfs", self.node, self.around.store, limits.store, limits.store_answer
        )

    async def _bucket(self) -> list[Fault]:
        if self.around.bucket is None:
            return []
        return await checks.prove(
            "s3", self.node, self.around.bucket, self.limits.store, self.limits.store_answer
        )

    # --- the mesh ---

    def _told(self, peer: str) -> dict[str, Any]:
        """What a peer is told with the answer to its hello: only of itself and of us."""
        both = (self.node.address, self.names[peer].address)
        known = {a: meanings for a, meanings in self._resolved.items() if a in both}
        return {"resolved": known, "served": self.around.served()}

    async def _mesh(self) -> list[Fault]:
        """Test all targets at once. The first fault is not waited for longer than others settle."""
        if self.report.begun:
            return []
        found = await self._gather([self._meet(peer) for peer in self.targets])
        if found:
            return found
        self.report.offsets = {peer.name: o.seconds for peer, o in self._offsets.items()}
        return clock_faults(self.node, self._offsets)

    async def _gather(self, tests: list[Coroutine[Any, Any, list[Fault]]]) -> list[Fault]:
        pending = {asyncio.ensure_future(test) for test in tests}
        faults: list[Fault] = []
        try:
            while pending:
                wait = self.limits.settle if faults else None
                done, pending = await asyncio.wait(
                    pending, timeout=wait, return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    break
                faults += [fault for test in done for fault in test.result()]
        finally:
            await _end(*pending)
        return faults

    async def _meet(self, peer: Node) -> list[Fault]:
        """Everything between this node and one peer."""
        control = ports_of(self.cluster, peer)[0].number
        try:
            hello = await self._first_answer(peer, control)
        except NoAnswer as error:
            return [self._edge(peer, control, error)]
        faults = name_faults(self.node, peer, self._resolved, hello.get("resolved") or {})
        others = [port for port, _ in hello.get("ports") or [] if port != control]
        tests = [self._port(peer, port) for port in others]
        tests += [self._served(peer, port) for port in hello.get("served") or []]
        for found in await asyncio.gather(*tests, self._clock(peer, control)):
            faults += found
        return faults

    def _edge(self, peer: Node, port: int, error: NoAnswer) -> Fault:
        return Fault("port", self.node, error.reason, error.advice, peer, port)

    async def _first_answer(self, peer: Node, port: int) -> dict[str, Any]:
        """The answer to our hello. Raises NoAnswer when the peer is up and none comes, or never."""
        loop = asyncio.get_running_loop()
        end, pause = loop.time() + self.limits.first_answer, 0.1
        up_since = None
        while True:
            asked = loop.time()
            try:
                hello = await self.caller.ask(peer, port, meeting.HELLO)
            except NoAnswer as error:
                now = loop.time()
                if up_since is None and self._is_up(peer):
                    up_since = now
                if up_since is not None and now - up_since > self.limits.grace:
                    raise
                if now > end:
                    waited = f"no answer within {self.limits.first_answer:.0f} s"
                    reason = f"{waited}, the last time: {error.reason}"
                    raise NoAnswer(reason, "is the node up and configured?") from None
            else:
                self._tested(peer, port, loop.time() - asked)
                return hello
            await self._pause(peer, pause)
            pause = min(LONGEST_PAUSE_S, pause * 1.5)

    def _tested(self, peer: Node, port: int, seconds: float) -> None:
        edge = {"to": peer.name, "port": port, "ms": round(seconds * 1000, 1)}
        self.report.edges.append(edge)

    def _is_up(self, peer: Node) -> bool:
        """Whether a peer is known to be in preflight: it asked us, or it said so on the board."""
        return peer.name in self.host.met or peer.name in self._noted

    async def _pause(self, peer: Node, seconds: float) -> None:
        """Wait, but not when the peer appears meanwhile."""
        if self._is_up(peer):
            await asyncio.sleep(min(seconds, 0.5))
            return
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while loop.time() < end and not self._is_up(peer):
            await asyncio.sleep(0.05)

    async def _port(self, peer: Node, port: int) -> list[Fault]:
        started = asyncio.get_running_loop().time()
        try:
            await self._patiently(lambda: self.caller.ask(peer, port, meeting.HELLO))
        except NoAnswer as error:
            return [self._edge(peer, port, error)]
        self._tested(peer, port, asyncio.get_running_loop().time() - started)
        return []

    async def _patiently(self, question: Callable[[], Awaitable[T]]) -> T:
        """What a peer that is up answers. Raises NoAnswer when it does not within the grace."""
        loop = asyncio.get_running_loop()
        end = loop.time() + self.limits.grace
        while True:
            try:
                return await question()
            except NoAnswer:
                if loop.time() > end:
                    raise
            await asyncio.sleep(0.5)

    async def _served(self, peer: Node, port: int) -> list[Fault]:
        """A port that HDFS serves on the peer: it is connected to, no more."""
        loop = asyncio.get_running_loop()
        end = loop.time() + self.limits.grace
        while True:
            asked = loop.time()
            reason = await checks.connects(peer.address, port, self.limits.answer)
            if reason is None:
                self._tested(peer, port, loop.time() - asked)
                return []
            if loop.time() > end:
                advice = "HDFS' DataNode listens there: let the nodes reach each other"
                return [Fault("hdfs", self.node, reason, advice, peer, port)]
            await asyncio.sleep(0.5)

    async def _clock(self, peer: Node, port: int) -> list[Fault]:
        """Ask the peer's time; of several answers the one that took least counts."""
        try:
            offsets = await self._patiently(lambda: self._ask_time(peer, port))
        except NoAnswer as error:
            return [self._edge(peer, port, error)]
        self._offsets[peer] = min(offsets, key=lambda offset: offset.error)
        return []

    async def _ask_time(self, peer: Node, port: int) -> list[Offset]:
        streams = await self.caller.connect(peer, port)
        try:
            return [await self._offset(streams, peer) for _ in range(meeting.TIME_QUESTIONS)]
        finally:
            await meeting.close(streams[1])

    async def _offset(self, streams: meeting.Streams, peer: Node) -> Offset:
        sent = self.clock()
        answer = await self.caller.question(streams, peer, meeting.TIME)
        return offset_of(sent, self.clock(), float(answer.get("time") or 0.0))

    # --- the all-reduce ---

    async def _all_reduce(self) -> list[Fault]:
        ring = ring_of(self.cluster, self.node)
        rank = ring.index(self.node)
        if len(ring) == 1:
            return []
        before, after = ring[rank - 1], ring[(rank + 1) % len(ring)]
        port = ports_of(self.cluster, after)[0].number
        try:
            ahead = await self._patiently(lambda: self.caller.connect(after, port))
            # Asked once: a second question would put a second connection in its way.
            patient = replace(self.caller, patience=self.limits.grace)
            await patient.question(ahead, after, meeting.RING)
        except NoAnswer as error:
            return [self._edge(after, port, error)]
        # The node before may still be at its tests, or wait for a peer that has yet to come.
        behind = await self.host.ring.get()
        names = [node.name for node in ring]
        turn = allreduce.Ring(names, rank, ahead, behind, self.limits.stall)
        self.host.sent = lambda: turn.sent
        try:
            self.report.allreduce = (await turn.reduce()).document()
        except allreduce.WrongSum:
            advice = "data are changed on their way: look for what rewrites packets"
            return [Fault("allreduce", self.node, "the all-reduce's sum is wrong", advice)]
        except allreduce.Stalled as stalled:
            return await self._stalled(before, stalled)
        finally:
            behind[1].close()
            await meeting.close(ahead[1])
        return []

    async def _stalled(self, before: Node, stalled: allreduce.Stalled) -> list[Fault]:
        """The edge from the node before, when that has sent more than has come; else not ours."""
        port = ports_of(self.cluster, before)[0].number
        try:
            sent = int((await self.caller.ask(before, port, meeting.SENT)).get("sent") or 0)
        except NoAnswer:
            sent = 0  # it may have left because another node has failed
        if sent <= stalled.received:
            await asyncio.sleep(2 * self.limits.stall)  # the node whose edge it is tells us
        reason = f"the all-reduce stalled after {stalled.received} bytes: {stalled.reason}"
        advice = "large packets may be dropped on the way: compare the MTU of all interfaces"
        own_port = ports_of(self.cluster, self.node)[0].number
        fault = Fault("allreduce", before, reason, advice, self.node, own_port)
        return [fault]

    # --- what others say ---

    async def _watch_others(self) -> None:
        """Raises GivenUp when another node tells of its faults, itself or on the board."""
        while not self.host.trouble.done():
            with contextlib.suppress(NodeError):
                await self._read_board()
            await asyncio.wait({self.host.trouble}, timeout=self._interval())
        name, lines = self.host.trouble.result()
        raise GivenUp(name, lines[0].replace("preflight: ", "", 1), lines)

    def _interval(self) -> float:
        """Between two looks at the board, so that all nodes ask 200 times a second at most."""
        return max(self.limits.poll, len(self.names) / 200)

    async def _read_board(self) -> None:
        if len(self.names) < FULL_MESH_NODES:
            names = set(await in_thread(self.around.board.names, self.limits.store_answer))
            self._noted |= {name for name in self.names if note_of(name) in names}
            failed = markers.FAILED in names
        else:  # a listing of thousands of files is too much for thousands of nodes
            failed = True
        if failed:
            document = await in_thread(
                lambda: markers.read_json(self.around.board, markers.FAILED), 45
            )
            if document is not None:
                node = str(document.get("node") or "?")
                raise GivenUp(node, str(document.get("message")), [])

    async def _note(self) -> None:
        """Say on the board that this node is in preflight, or what it has found."""
        document = self.report.document()
        with contextlib.suppress(NodeError):
            await in_thread(
                lambda: markers.write_json(self.around.board, note_of(self.node.name), document),
                self.limits.store_answer,
            )

    async def _mark(self, node: str, message: str, lines: list[str]) -> None:
        """Make it the run's failure, unless it has one already."""
        try:
            await in_thread(
                lambda: markers.mark_failed(self.around.board, TASK, node, message, lines),
                self.limits.store_answer,
            )
        except NodeError as error:
            LOG.warning("preflight: the failure was not marked: %s", error)

    # --- the end ---

    async def _part(self, lines: list[str]) -> None:
        """Tell the faults to all who can hear it."""

        async def tell(peer: Node) -> None:
            port = ports_of(self.cluster, peer)[0].number
            with contextlib.suppress(NoAnswer):
                await self.caller.ask(peer, port, meeting.FAREWELL, faults=lines)

        met = {edge["to"] for edge in self.report.edges} | self.host.met
        await asyncio.gather(*(tell(self.names[name]) for name in met))

    async def _farewells(self) -> None:
        """Say that all is well, and go on answering until all who test us have said so."""
        await asyncio.gather(*(self._farewell(peer) for peer in self.targets))
        waiting = {peer.name for peer in testers_of(self.cluster, self.node)}
        end = asyncio.get_running_loop().time() + self.limits.first_answer
        while missing := sorted(waiting - self.host.parted):
            if asyncio.get_running_loop().time() > end:
                reason = f"it has not ended its tests within {self.limits.first_answer:.0f} s"
                advice = "see the journal of mayfly-preflight on that node"
                fault = Fault("peer", self.node, reason, advice, self.names[missing[0]])
                self.report.faults = [fault]
                return
            await asyncio.sleep(0.02)

    async def _farewell(self, peer: Node) -> None:
        """Tell one peer; one that has left has heard it, and only its answer was lost."""
        loop = asyncio.get_running_loop()
        port = ports_of(self.cluster, peer)[0].number
        end = loop.time() + self.limits.grace
        while loop.time() < end:
            with contextlib.suppress(NoAnswer):
                await self.caller.ask(peer, port, meeting.FAREWELL, faults=[])
                return
            if peer.name in self.host.parted:
                return
            await asyncio.sleep(0.2)


async def _end(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks until they have ended, whatever came of them.

    Once is not enough: before Python 3.12, `wait_for` drops a cancellation that comes together with
    what it waits for (https://bugs.python.org/issue37658).
    """
    while running := [task for task in tasks if not task.done()]:
        for task in running:
            task.cancel()
        await asyncio.wait(running, timeout=0.1)
    await asyncio.gather(*tasks, return_exceptions=True)


def _is_heartbeat(name: str) -> bool:
    """Whether a file on the board is what a task says of itself: `<task>.json`."""
    try:
        parse_task(name[: -len(".json")])
    except BadInput:
        return False
    return name.endswith(".json")


def note_of(node: str) -> str:
    """The name of a node's report on the board."""
    return f"preflight-{node}.json"
