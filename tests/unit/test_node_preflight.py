"""Preflight: several nodes in one process, each on a loopback address of its own."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
import threading
import time
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.unit.train_fakes import FakeBoard
from tests.unit.train_fakes import cluster as make_cluster

from mayfly_train import hdfs, markers
from mayfly_train.cluster import Cluster, Node
from mayfly_train.errors import BadInput, NodeError
from mayfly_train.preflight import allreduce, checks, command, edges, meeting, sockets
from mayfly_train.preflight.checks import Surroundings
from mayfly_train.preflight.edges import (
    FULL_MESH_NODES,
    Offset,
    clock_faults,
    name_faults,
    offset_of,
    ports_of,
    ring_of,
    targets_of,
)
from mayfly_train.preflight.meeting import Caller, Host, NoAnswer
from mayfly_train.preflight.node import Limits, Preflight, note_of

# Patient, so that a busy machine is no fault; a test shortens what it waits to the end of.
LIMITS = Limits(first_answer=20, grace=10, settle=0.3, answer=5, stall=10, store=10, poll=0.1)


def nodes_of(workers: int, ps: int = 0, engine: str = "estimator", port: int = 2222) -> Cluster:
    """A cluster on 127.0.0.2, .3, …: workers w1, w2, … and parameter servers p1, …"""
    made = [Node(f"w{n + 1}", f"127.0.0.{n + 2}") for n in range(workers)]
    servers = [Node(f"p{n + 1}", f"127.0.0.{n + 2 + workers}") for n in range(ps)]
    return replace(make_cluster(), engine=engine, port=port, workers=tuple(made), ps=tuple(servers))


def large(workers: int, ps: int = 0) -> Cluster:
    made = tuple(Node(f"w{n}", f"10.{n >> 8}.{n & 255}.1") for n in range(workers))
    servers = tuple(Node(f"p{n}", f"10.{n >> 8}.{n & 255}.2") for n in range(ps))
    return replace(make_cluster(), workers=made, ps=servers)


def free_port() -> int:
    """A port with a free one after it, on all of loopback."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as first:
            port = first.getsockname()[1]
            try:
                with socket.create_server(("127.0.0.1", port + 1)):
                    return port
            except OSError:
                continue


class Board(FakeBoard):
    """Several nodes may write the same file at once, as in HDFS."""

    lock = threading.Lock()

    def write(self, name: str, data: bytes) -> None:
        with self.lock:
            super().write(name, data)


class Lab:
    """Runs the preflights of a cluster's nodes at once; `change` gives one other surroundings."""

    def __init__(self, directory: Path, workers: int = 3, **cluster) -> None:
        self.cluster = nodes_of(workers, port=free_port(), **cluster)
        self.board = Board(directory / "board")
        self.port = self.cluster.port
        self.changed: dict[str, dict] = {}
        self.clocks: dict[str, float] = {}
        self.clusters: dict[str, Cluster] = {}
        self.late: dict[str, float] = {}
        self.limits = LIMITS
        self.seconds = 0.0

    def change(self, name: str, **changes) -> None:
        self.changed[name] = changes

    def shorten(self, **limits: float) -> None:
        self.limits = replace(self.limits, **limits)

    def surroundings(self, node: Node) -> Surroundings:
        plain = Surroundings(
            board=self.board,
            store=lambda: None,
            bucket=(lambda: None) if node == self.cluster.workers[0] else None,
            interface=lambda _: "lo",
            resolve=lambda address: [address] if address.startswith("127.") else [],
            is_loopback=lambda address: address == "127.0.1.1",
            served=list,
            bind=node.address,
        )
        return replace(plain, **self.changed.get(node.name, {}))

    async def one(self, node: Node):
        await asyncio.sleep(self.late.get(node.name, 0))
        skew = self.clocks.get(node.name, 0.0)
        cluster = self.clusters.get(node.name, self.cluster)
        around = self.surroundings(node)
        return await Preflight(cluster, node, around, self.limits, lambda: time.time() + skew).run()

    def run(self, *absent: str) -> dict:
        return asyncio.run(self.all(*absent))

    def pass_all(self, *absent: str) -> dict:
        """Run, and require that nothing was found."""
        reports = self.run(*absent)
        assert {name: r.lines() for name, r in reports.items() if not r.ok} == {}
        return reports

    async def all(self, *absent: str) -> dict:
        async with namenode() as urls:
            self.cluster = replace(self.cluster, **urls)
            present = [node for node in self.cluster.nodes if node.name not in absent]
            started = time.monotonic()
            reports = await asyncio.gather(*map(self.one, present))
            self.seconds = time.monotonic() - started
        return {report.node: report for report in reports}

    def marker(self) -> dict:
        return markers.read_json(self.board, markers.FAILED)


@asynccontextmanager
async def namenode():
    """Two open ports in the place of the NameNode's."""
    servers = [await asyncio.start_server(lambda r, w: w.close(), "127.0.0.1", 0) for _ in "rh"]
    rpc, http = (server.sockets[0].getsockname()[1] for server in servers)
    yield {
        "namenode_rpc": f"hdfs://127.0.0.1:{rpc}",
        "namenode_http": f"http://127.0.0.1:{http}",
    }
    for server in servers:
        server.close()


@pytest.fixture
def lab(tmp_path):
    return Lab(tmp_path)


def faults(report) -> list[str]:
    return [str(fault) for fault in report.faults]


# --- who tests what ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("engine", "first", "second"),
    [
        ("estimator", [2222], [2222]),
        ("mwms", [2222], [2222]),
        ("tf-server", [2222], [2222]),
        ("command", [2222], [2222]),
        ("keras-ps", [2222, 2223], [2222]),
        ("torch", [2222, 0], [2222, 0]),
        ("horovod", [2222, 0], [2222, 0]),
    ],
)
def test_ports_of_each_engine(engine, first, second):
    cluster = nodes_of(2, engine=engine)
    numbers = [[p.number for p in ports_of(cluster, node)] for node in cluster.workers]
    assert numbers == [first, second]


def test_rendezvous_is_on_the_first_worker_only():
    cluster = nodes_of(2, engine="torch")
    uses = [ports_of(cluster, node)[0].use for node in cluster.workers]
    assert uses == ["torchrun's rendezvous", "preflight"]


@pytest.mark.parametrize(("workers", "ps"), [(1, 0), (2, 1), (60, 4), (61, 4), (130, 3), (200, 0)])
def test_testers_are_the_inverse_of_targets(workers, ps):
    cluster = large(workers, ps)
    nodes = cluster.nodes
    targets = {node: set(targets_of(cluster, node)) for node in nodes}
    for node in nodes:
        assert set(edges.testers_of(cluster, node)) == {n for n in nodes if node in targets[n]}
        assert node not in targets[node]


def test_a_small_cluster_is_tested_whole_and_a_large_one_by_neighbours():
    small, big = large(FULL_MESH_NODES - 1, 1), large(9_990, 10)
    assert len(targets_of(small, small.workers[5])) == FULL_MESH_NODES - 1
    targets = targets_of(big, big.workers[5000])
    assert len(targets) == 8 + 10 + 1
    assert set(targets) > {*big.ps, big.workers[0], big.workers[4999], big.workers[5004]}
    assert len(edges.testers_of(big, big.ps[0])) == 9_999


@pytest.mark.parametrize("size", [1, 2, 64, 65, 129, 300])
def test_rings_part_the_nodes_evenly(size):
    cluster = large(size)
    rings = {ring_of(cluster, node) for node in cluster.workers}
    assert sorted(n.name for ring in rings for n in ring) == sorted(n.name for n in cluster.workers)
    lengths = [len(ring) for ring in rings]
    assert max(lengths) <= FULL_MESH_NODES
    assert max(lengths) - min(lengths) <= 1
    for node in cluster.workers:
        ring = ring_of(cluster, node)
        after = ring[(ring.index(node) + 1) % len(ring)]
        assert len(ring) == 1 or after in targets_of(cluster, node)


# --- clocks and names, as pure functions -------------------------------------------------------


def test_the_offset_is_measured_from_the_middle_of_question_and_answer():
    assert offset_of(100.0, 100.2, 105.1) == Offset(pytest.approx(5.0), pytest.approx(0.1))


def test_a_clock_is_judged_by_what_is_certain():
    a, b, c = nodes_of(3).workers
    assert clock_faults(a, {b: Offset(0.9, 0.0), c: Offset(-1.2, 0.3)}) == []
    (fault,) = clock_faults(a, {b: Offset(5.0, 0.01)})
    assert str(fault).startswith(
        "w1 (127.0.0.2) → w2 (127.0.0.3): its clock is 5.0 s ahead of ours"
    )
    (fault,) = clock_faults(a, {b: Offset(0.0, 0.01), c: Offset(-5.0, 0.01)})
    assert fault.peer == c
    (fault,) = clock_faults(a, {b: Offset(5.0, 0.01), c: Offset(5.1, 0.01)})
    assert fault.peer is None
    assert "its clock is 5.0 s behind of 2 other nodes'" in str(fault) or "behind" in str(fault)


def test_an_address_that_means_two_machines_is_named():
    a, b, _ = nodes_of(3).workers
    ours, theirs = {"w1": ["10.0.0.1"], "x": ["1.1.1.1"]}, {"w1": ["10.0.0.9"], "y": ["2.2.2.2"]}
    (fault,) = name_faults(a, b, ours, theirs)
    assert "'w1' is 10.0.0.1 here and 10.0.0.9 there" in fault.line
    assert name_faults(a, b, ours, ours) == []


# --- whole preflights --------------------------------------------------------------------------


def test_all_is_well(lab):
    reports = lab.pass_all()
    assert lab.marker() is None
    for name, report in reports.items():
        document = report.document()
        assert json.loads(json.dumps(document)) == document
        assert len(document["edges"]) == 2
        assert document["allreduce"]["bytes"] == 4 << 20
        assert document["allreduce"]["slowest"]["mib_per_s"] > 0
        assert markers.read_json(lab.board, note_of(name))["ok"] is True
        assert "all-reduce at" in report.lines()[0]
    slowest = {json.dumps(r.allreduce["slowest"]) for r in reports.values()}
    assert len(slowest) == 1


def test_one_node_alone_needs_nobody(tmp_path):
    (report,) = Lab(tmp_path, workers=1).pass_all().values()
    assert report.edges == [] and report.allreduce is None


def test_no_connection_is_left_that_keeps_a_program_from_the_port(lab):
    lab.pass_all()
    for node in lab.cluster.nodes:
        with socket.socket() as program:  # without SO_REUSEADDR
            program.bind((node.address, lab.port))


@pytest.mark.parametrize("engine", ["keras-ps", "torch"])
def test_engines_with_more_ports_have_them_tested(tmp_path, engine):
    lab = Lab(tmp_path, workers=2, engine=engine)
    reports = lab.pass_all()
    ports = {edge["port"] for edge in reports["w2"].edges}
    assert lab.port in ports and len(ports) == 2
    assert engine == "torch" or lab.port + 1 in ports


def test_nodes_that_come_one_after_the_other_wait_for_each_other(lab):
    lab.late = {"w2": 0.4, "w3": 0.8}
    lab.pass_all()
    assert lab.seconds >= max(lab.late.values())


def test_a_peer_that_never_comes_is_the_failure(lab):
    lab.shorten(first_answer=1.5, grace=0.4)
    reports = lab.run("w3")
    assert not reports["w1"].ok and not reports["w2"].ok
    said = lab.marker()
    assert said["task"] == "preflight"
    assert "→ w3 (127.0.0.4) port" in said["message"]
    assert "no answer within" in said["message"] and "connection refused" in said["message"]
    assert said["log_tail"][0].startswith("preflight: ")


def test_a_port_in_use_names_its_holder(lab):
    second = lab.cluster.workers[1]
    with socket.create_server((second.address, lab.port)):
        reports = lab.run()
    (line,) = faults(reports["w2"])
    assert line.startswith(f"w2 (127.0.0.3) port {lab.port}: in use by ")
    assert f"(pid {os.getpid()}, in " in line
    assert lab.marker()["node"] == "w2"
    assert "the run has failed" in reports["w1"].lines()[0]


def test_peers_are_answered_while_the_holder_of_a_port_is_looked_for(monkeypatch):
    others_went_on = threading.Event()
    monkeypatch.setattr(
        sockets, "holder_of", lambda port: "held" if others_went_on.wait(10) else "blocked"
    )

    async def go():
        own, port = Node("w1", "127.0.0.1"), free_port()
        host = Host("r", own, {}, lambda _: {})
        with socket.create_server((own.address, port)):
            opening = asyncio.ensure_future(
                host.open(ports_of(nodes_of(1, port=port), own), own.address)
            )
            await asyncio.sleep(0)
            others_went_on.set()
            return await opening

    (fault,) = asyncio.run(go())
    assert "in use by held" in str(fault)


def test_a_closed_port_is_told_once_the_peer_is_known_to_be_up(tmp_path, monkeypatch):
    """The coordinator's port of keras-ps is refused by the first worker, and by nobody else."""
    lab = Lab(tmp_path, workers=3, engine="keras-ps")
    lab.shorten(grace=0.4)
    lab.cluster = replace(lab.cluster, workers=lab.cluster.workers)
    opened = Host.open

    async def forget_the_second(self, ports, bind=""):
        found = await opened(self, ports, bind)
        if len(ports) > 1:
            self._servers[1].close()
        return found

    monkeypatch.setattr(Host, "open", forget_the_second)
    reports = lab.run()
    closed = [name for name in ("w2", "w3") if reports[name].faults]
    assert closed
    line = faults(reports[closed[0]])[0]
    assert f"→ w1 (127.0.0.2) port {lab.port + 1}: connection refused — " in line


def test_another_run_is_not_taken_for_a_peer(lab):
    lab.shorten(first_answer=1.5, grace=0.4)
    lab.clusters["w3"] = replace(
        lab.cluster, run="other-261128-130000-cd34", workers=lab.cluster.workers
    )

    async def both():
        async with namenode() as urls:
            lab.clusters["w3"] = replace(lab.clusters["w3"], **urls)
            lab.change("w3", board=Board(lab.board.directory / "other"))
            return await lab.all()

    reports = asyncio.run(both())
    assert "run 'other-261128-130000-cd34' answers" in "\n".join(
        faults(reports["w1"]) + faults(reports["w2"])
    )
    assert "w3" in lab.marker()["message"]


def test_a_clock_that_is_off_is_named_by_its_own_node_or_its_peers(lab):
    lab.clocks["w2"] = 5.0
    reports = lab.run()
    said = [line for report in reports.values() for line in faults(report)]
    assert said
    assert all("5.0 s" in line for line in said)
    assert all(line.startswith("w2 (") or "→ w2 (" in line for line in said)


def test_a_name_that_is_loopback_is_refused(tmp_path):
    lab = Lab(tmp_path)
    first, second, third = lab.cluster.workers
    named = Node(second.name, "localhost")
    lab.cluster = replace(lab.cluster, workers=(first, named, third))
    trap = {"localhost": ["127.0.1.1"]}
    lab.change("w2", resolve=lambda a: trap.get(a, [a]), bind="127.0.0.1")
    lab.change("w1", resolve=lambda a: ["127.0.0.1"] if a == "localhost" else [a])
    lab.change("w3", resolve=lambda a: ["127.0.0.1"] if a == "localhost" else [a])
    reports = lab.run()
    assert any("'localhost' is loopback here, 127.0.1.1" in line for line in faults(reports["w2"]))
    assert "127.0.1.1" in lab.marker()["message"]


def test_two_nodes_that_mean_two_machines_by_one_address(lab):
    lab.change("w2", resolve=lambda a: ["127.9.9.9"] if a == "127.0.0.2" else [a])
    reports = lab.run()
    said = [line for report in reports.values() for line in faults(report)]
    assert any("'127.0.0.2' is" in line and "127.9.9.9" in line for line in said), said


def test_a_name_of_the_inventory_that_is_loopback_is_a_warning(lab):
    lab.change("w2", resolve=lambda a: ["127.0.1.1"] if a == "w2" else [a])
    reports = lab.pass_all()
    assert reports["w2"].lines()[1].startswith("preflight: warning: on w2, name 'w2' is 127.0.1.1")


def test_no_interface_but_loopback_is_a_fault(lab):
    def none(address):
        raise NodeError(f"rank 0 is {address!r}, and no interface has that — give its address")

    lab.change("w2", interface=none)
    (line,) = faults(lab.run()["w2"])
    assert line.endswith("and no interface has that — give its address")


def test_hdfs_that_refuses_is_told_by_peers_when_the_board_is_gone_too(lab):
    lab.shorten(store=0.3)

    class Gone(Board):
        def names(self):
            raise NodeError("cannot reach HDFS")

        read = write = lambda self, *_: self.names()

    def refused():
        raise hdfs.HdfsFailure("cannot reach HDFS at http://n:9870 for /x — is it running?")

    lab.change("w2", store=refused, board=Gone(lab.board.directory / "gone"))
    reports = lab.run()
    assert faults(reports["w2"]) == [
        "w2 (127.0.0.3): cannot reach HDFS at http://n:9870 for /x — is it running?"
    ]
    said = lab.marker()
    assert said["node"] == "w2"
    assert "w2 (127.0.0.3): cannot reach HDFS" in said["message"]


def test_a_namenode_that_is_closed_is_an_edge(lab):
    lab.shorten(store=0.3)

    async def go():
        async with namenode() as urls:
            broken = {**urls, "namenode_http": f"http://127.0.0.1:{free_port()}"}
            nodes = lab.cluster.nodes
            lab.clusters = {nodes[1].name: replace(lab.cluster, **broken)}
            return await lab.all()

    (line,) = faults(asyncio.run(go())["w2"])
    assert "→ 127.0.0.1 port" in line and "connection refused" in line


def test_s3_is_checked_by_the_first_worker_alone(lab):
    def denied():
        raise BadInput("S3 access denied: s3://b/x — check the keys and what they may do")

    lab.change("w1", bucket=denied)
    reports = lab.run()
    assert faults(reports["w1"]) == [
        "w1 (127.0.0.2): S3 access denied: s3://b/x — check the keys and what they may do"
    ]
    assert reports["w2"].faults == []


def test_a_peer_that_accepts_and_says_nothing(lab):
    lab.shorten(grace=0.4, answer=0.3)
    third = lab.cluster.workers[2]
    markers.write_json(lab.board, note_of("w3"), {"ok": False})  # it is up, as far as is known
    with socket.create_server((third.address, lab.port)):
        reports = lab.run("w3")
    assert any(
        "accepts connections and says nothing" in line
        for report in reports.values()
        for line in faults(report)
    )


def test_a_run_that_has_begun_is_not_held_up_by_a_node_that_is_replaced(lab):
    lab.board.write("chief-0.json", b"{}")
    reports = lab.pass_all("w1", "w3")
    assert reports["w2"].begun


def test_a_run_that_has_failed_is_given_up_at_once(lab):
    markers.mark_failed(lab.board, "preflight", "w9", "w9: broken")
    reports = lab.run("w3")
    assert [r.given_up for r in reports.values()] == ["the run has failed: w9: broken"] * 2


def test_what_a_peer_serves_for_hdfs_is_connected_to(lab):
    lab.shorten(grace=0.4)
    closed = free_port()
    lab.change("w2", served=lambda: [closed])
    reports = lab.run()
    said = [line for report in reports.values() for line in faults(report)]
    assert any(f"→ w2 (127.0.0.3) port {closed}: connection refused" in line for line in said)


def test_eight_nodes(tmp_path):
    lab = Lab(tmp_path, workers=6, ps=2)
    reports = lab.pass_all()
    assert sum(len(report.edges) for report in reports.values()) == 56


# --- the all-reduce ----------------------------------------------------------------------------


async def ring(size: int, patience: float = 60, slow: int | None = None, wrong: bool = False):
    """Rings over socket pairs; the edge into rank `slow` carries nothing after a while."""
    pairs = [socket.socketpair() for _ in range(size)]  # pair r: from r - 1 to r
    before = [await asyncio.open_connection(sock=pair[1]) for pair in pairs]
    after = [await asyncio.open_connection(sock=pairs[(r + 1) % size][0]) for r in range(size)]
    names = [f"n{r}" for r in range(size)]
    rings = [allreduce.Ring(names, r, after[r], before[r], patience) for r in range(size)]
    if slow is not None:
        source = before[slow][0]

        async def starve(_):
            await asyncio.sleep(60)

        source.read = starve
    if wrong:
        rings[0]._part = lambda number: bytes(len(allreduce.Ring._part(rings[0], number)))
    try:
        return rings, await asyncio.gather(*(r.reduce() for r in rings), return_exceptions=True)
    finally:
        for _, writer in (*before, *after):
            writer.close()


@pytest.mark.parametrize("size", [2, 3, 8])
def test_all_nodes_get_the_sum_and_the_same_slowest_edge(size):
    _, results = asyncio.run(ring(size))
    assert {result.nodes for result in results} == {size}
    assert len({result.slowest for result in results}) == 1


def test_a_wrong_sum_is_seen():
    _, results = asyncio.run(ring(3, wrong=True))
    assert any(isinstance(result, allreduce.WrongSum) for result in results)


def test_a_stalled_edge_is_the_one_whose_sender_has_sent_more():
    rings, results = asyncio.run(ring(3, patience=0.5, slow=1))
    assert isinstance(results[1], allreduce.Stalled)
    assert rings[0].sent > rings[1].received


# --- answers -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (b"220 smtp ready\r\n", "something else answers"),
        (b"", "something else answers"),
        (b'{"mayfly-preflight": 1, "run": "x", "node": "b"}\n', "run 'x' answers"),
        (b'{"mayfly-preflight": 1, "run": "r", "node": "c"}\n', "node 'c' answers"),
        (None, "says nothing"),
    ],
)
def test_strangers_are_told_from_peers(answer, says):
    async def go():
        async def serve(reader, writer):
            await reader.readline()
            if answer is None:
                await asyncio.sleep(1)
            else:
                writer.write(answer)
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        try:
            await Caller("r", Node("a", "127.0.0.1"), 0.3).ask(
                Node("b", "127.0.0.1"), port, meeting.HELLO
            )
        finally:
            server.close()

    with pytest.raises(NoAnswer) as caught:
        asyncio.run(go())
    assert says in caught.value.reason and caught.value.advice


def test_an_unknown_node_is_told_nothing():
    async def go():
        own, port = Node("b", "127.0.0.1"), free_port()
        host = Host("r", own, {"a": Node("a", "x")}, lambda _: {"resolved": {"secret": []}})
        assert await host.open(ports_of(nodes_of(1, port=port), own), "127.0.0.1") == []
        answer = await Caller("r", Node("z", "127.0.0.1"), 1).ask(own, port, meeting.HELLO)
        await host.close()
        assert "resolved" not in answer and host.met == set()

    asyncio.run(go())


def test_an_address_that_is_unknown():
    with pytest.raises(NoAnswer) as caught:
        asyncio.run(Caller("r", Node("a", "x"), 2).connect(Node("b", "no.such.invalid"), 1))
    assert "unknown" in caught.value.reason


# --- /proc -------------------------------------------------------------------------------------


def test_the_holder_of_a_port_is_found(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as mine:
        port = mine.getsockname()[1]
        assert f"(pid {os.getpid()}, in {Path.cwd()})" in sockets.holder_of(port)
        assert port in sockets.listening("127.0.0.1")
        assert port not in sockets.listening("127.0.0.2")
    assert sockets.holder_of(port) is None
    assert sockets.holder_of(port, tmp_path) is None


def test_of_a_process_and_its_child_the_first_started_holds_a_port(tmp_path):
    """Numbers of processes wrap: a child between fork and exec may have the lower one."""
    (tmp_path / "net").mkdir()
    (tmp_path / "net/tcp").write_text("head\n 0: 0100007F:2688 00000000:0000 0A 0:0 0:0 0 0 0 11\n")
    for pid, started in ((5, 700), (90, 300)):
        process = tmp_path / str(pid)
        (process / "fd").mkdir(parents=True)
        (process / "fd/1").write_text("no link: it was closed while the others were read")
        (process / "fd/3").symlink_to("socket:[11]")
        (process / "stat").write_text(f"{pid} (a) b) S {'0 ' * 18}{started} 0\n")
        (process / "comm").write_text("server\n")
        (process / "cwd").symlink_to("/srv")
    assert sockets.holder_of(0x2688, tmp_path) == "server (pid 90, in /srv)"


def test_ports_are_seen_at_all_addresses_and_in_ipv6(tmp_path):
    head = "  sl  local_address rem_address   st tx_queue tr tm->when retrnsmt   uid  timeout inode"
    mapped = "0000000000000000FFFF00000300000A"  # ::ffff:10.0.0.3
    (tmp_path / "net").mkdir()
    (tmp_path / "net/tcp").write_text(
        f"{head}\n 0: 00000000:2688 00000000:0000 0A 0:0 0:0 0 0 0 11\n"
        " 1: 0300000A:268A 0400000A:0000 01 0:0 0:0 0 0 0 12\n"
    )
    (tmp_path / "net/tcp6").write_text(
        f"{head}\n 0: {mapped}:2689 {'0' * 32}:0000 0A 0:0 0:0 0 0 0 13\n"
    )
    assert sockets.listening("10.0.0.3", tmp_path) == {0x2688, 0x2689}
    assert sockets.listening("10.0.0.9", tmp_path) == {0x2688}


# --- HDFS, S3, threads -------------------------------------------------------------------------


def test_s3_is_written_read_and_deleted(client, tmp_path, monkeypatch):
    client.create_bucket(Bucket="models")
    keys = tmp_path / "s3.env"
    keys.write_text('AWS_ACCESS_KEY_ID="a"\nAWS_SECRET_ACCESS_KEY="b"\n')
    checks.prove_bucket(make_cluster(), keys)
    assert "Contents" not in client.list_objects_v2(Bucket="models")
    with pytest.raises(NodeError, match="no such bucket"):
        checks.prove_bucket(replace(make_cluster(), run_uri="s3://none/x"), keys)


def test_hdfs_is_written_read_both_ways_and_deleted(monkeypatch):
    files, ways = {}, []

    def read(path, web):
        ways.append(web)
        return [files[path]]

    fake = SimpleNamespace(write_bytes=files.__setitem__, read_chunks=read, delete=files.pop)
    monkeypatch.setattr(hdfs, "Hdfs", lambda *_, **__: fake)
    checks.prove_store(make_cluster(), Node("n2", "10.0.0.2"))
    assert files == {} and ways == [True, False]


def test_a_call_that_hangs_is_given_up():
    with pytest.raises(NodeError, match="no answer within 0 s"):
        asyncio.run(checks.in_thread(lambda: time.sleep(0.5), 0.05))


# --- the command -------------------------------------------------------------------------------


def test_a_run_that_has_passed_is_not_tested_again(tmp_path):
    path = tmp_path / "preflight.json"
    assert command.passed_before(path, "r1") is None
    path.write_text(json.dumps({"run": "r1", "ok": True}))
    assert command.passed_before(path, "r1") == {"run": "r1", "ok": True}
    assert command.passed_before(path, "r2") is None
    path.write_text(json.dumps({"run": "r1", "ok": False}))
    assert command.passed_before(path, "r1") is None
    path.write_text("[]")
    assert command.passed_before(path, "r1") is None


def test_a_node_knows_itself_by_name_or_address():
    cluster = replace(
        nodes_of(1), ps=(Node("far", "192.0.2.1"),), workers=(Node("w1", "127.0.0.2"),)
    )
    assert command.own_node(cluster, None).name == "w1"
    assert command.own_node(cluster, "far").name == "far"
    with pytest.raises(BadInput, match="no node 'x' in this cluster — name one with --node: w1"):
        command.own_node(cluster, "x")
    with pytest.raises(BadInput, match="2 nodes have an address of this machine"):
        command.own_node(nodes_of(2), None)


@pytest.fixture
def command_line(tmp_path, monkeypatch, lab):
    """The arguments of a preflight of w1 that meets nobody, and what it would print."""
    monkeypatch.setattr(command, "ENDED_FILE", tmp_path / "ended")
    monkeypatch.setattr(command, "load_cluster", lambda path: lab.cluster)
    monkeypatch.setattr(command, "surroundings_of", lambda c, node, keys: lab.surroundings(node))
    return SimpleNamespace(
        cluster=None, node="w1", env_file=None, state_file=tmp_path / "state.json", json=False
    )


def test_the_command_says_what_is_wrong_and_keeps_it(lab, command_line, capsys):
    markers.mark_failed(lab.board, "preflight", "w9", "w9: broken")
    assert command.run(command_line) == 1
    assert capsys.readouterr().err == "preflight: w1 gave up: the run has failed: w9: broken\n"
    assert json.loads(command_line.state_file.read_text())["ok"] is False
    assert (
        json.loads((command_line.state_file.parent / "ended").read_text())["run"] == lab.cluster.run
    )


def test_a_preflight_that_breaks_is_the_runs_failure_too(lab, command_line, monkeypatch):
    def broken(*_):
        raise KeyError("x")

    monkeypatch.setattr(command, "Preflight", broken)
    with pytest.raises(KeyError):
        command.run(command_line)
    assert lab.marker()["message"] == "preflight itself ended with KeyError: 'x'"


def test_the_command_passes_and_remembers(lab, command_line, capsys):
    async def served():
        async with namenode() as urls:
            lab.cluster = replace(lab.cluster, **urls, workers=lab.cluster.workers[:1])
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(None, command.run, command_line)

    command_line.json = True
    assert asyncio.run(served()) == 0
    assert json.loads(capsys.readouterr().out)["ok"] is True
    command_line.json = False
    assert command.run(command_line) == 0
    assert "has passed on this node before" in capsys.readouterr().err


def test_linger_is_what_the_kernel_takes():
    with socket.socket() as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
