"""What a node checks by itself: addresses, interface, and that HDFS and S3 do what they must."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import ipaddress
import os
import posixpath
import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from mayfly_train import hdfs, machine, markers
from mayfly_train.cluster import Cluster, Node
from mayfly_train.errors import BadInput, NodeError
from mayfly_train.markers import Board
from mayfly_train.preflight import sockets
from mayfly_train.preflight.edges import Fault
from mayfly_train.preflight.meeting import why

PROBE_BYTES = 1024
# A DataNode's own: WebHDFS sends clients to the first, hdfs-native and libhdfs use the second.
DATANODE_PORTS = (9864, 9866)

T = TypeVar("T")


@dataclass(frozen=True)
class Surroundings:
    """What the checks use of a node; tests put their own in its place.

    `store` and `bucket` write, read and delete, or raise NodeError; `bucket` is None where there
    are no keys. `interface` names the one on the way to an address, `served` the ports of HDFS'
    DataNode that are open here.
    """

    board: Board
    store: Callable[[], None]
    bucket: Callable[[], None] | None
    interface: Callable[[str], str]
    resolve: Callable[[str], list[str]]
    is_loopback: Callable[[str], bool]
    served: Callable[[], list[int]]
    bind: str = ""


def surroundings_of(cluster: Cluster, node: Node, keys: Path) -> Surroundings:
    """The real ones; the first worker's node has the keys to the bucket."""
    is_chief = node == cluster.workers[0]
    return Surroundings(
        board=markers.board_of(cluster),
        store=lambda: prove_store(cluster, node),
        bucket=(lambda: prove_bucket(cluster, keys)) if is_chief else None,
        interface=lambda address: machine.look(address).interface,
        resolve=resolve,
        is_loopback=lambda address: ipaddress.ip_address(address).is_loopback,
        served=lambda: served_at(resolve(node.address)),
    )


def prove_store(cluster: Cluster, node: Node) -> None:
    """Write, read and delete a file in HDFS, both ways that data go. Raises HdfsFailure."""
    store = hdfs.Hdfs(cluster.namenode_rpc, cluster.namenode_http, timeout_s=10)
    path = posixpath.join(cluster.status_dir, f"preflight-{node.name}.probe")
    data = os.urandom(PROBE_BYTES)
    store.write_bytes(path, data)
    for web in (True, False):
        if b"".join(store.read_chunks(path, web=web)) != data:
            raise hdfs.HdfsFailure(f"HDFS gives back other bytes than were written: {path}")
    store.delete(path)


def prove_bucket(cluster: Cluster, keys: Path) -> None:
    """Write, read and delete an object below the run's address. Raises S3Error."""
    s3 = importlib.import_module("mayfly_train.s3")  # slow to load, and needed on one node only
    client = s3.connect(s3.S3Settings.from_file(keys))
    probe = s3.parse_uri(cluster.run_uri).join("status", "preflight")
    data = os.urandom(PROBE_BYTES)
    s3.write_bytes(client, probe, data, "application/octet-stream")
    if s3.read_bytes(client, probe) != data:
        raise s3.S3Error(f"S3 gives back other bytes than were written: {probe}")
    s3.delete(client, probe)


def served_at(addresses: Iterable[str]) -> list[int]:
    """The ports of HDFS' DataNode that are open at these addresses of this node."""
    found = {port for address in addresses for port in sockets.listening(address)}
    return sorted(found & set(DATANODE_PORTS))


def resolve(address: str) -> list[str]:
    """The IPv4 addresses of a name, sorted; none when it has none."""
    try:
        found = socket.getaddrinfo(address, None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError:
        return []
    return sorted({str(item[4][0]) for item in found})


async def in_thread(call: Callable[[], T], seconds: float) -> T:
    """What a call that blocks returns. Raises NodeError when it does not return in time."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def tell(put: Callable[[Any], None], value: Any) -> None:
        with contextlib.suppress(asyncio.InvalidStateError):
            put(value)

    def work() -> None:
        try:
            put, value = answer.set_result, call()  # type: tuple[Callable[[Any], None], Any]
        except BaseException as error:  # hdfs-native's panics are not Exceptions
            put, value = answer.set_exception, error
        with contextlib.suppress(RuntimeError):  # nobody waits any more
            loop.call_soon_threadsafe(tell, put, value)

    # A thread of its own, as one that hangs must not hold up the exit.
    threading.Thread(target=work, daemon=True).start()
    try:
        return await asyncio.wait_for(answer, seconds)
    except asyncio.TimeoutError:
        raise NodeError(f"no answer within {seconds:.0f} s") from None


def resolved(around: Surroundings, nodes: Iterable[Node]) -> dict[str, list[str]]:
    """What the addresses of these nodes mean here."""
    return {node.address: around.resolve(node.address) for node in nodes}


def address_faults(
    node: Node, found: Mapping[str, list[str]], is_loopback: Callable[[str], bool]
) -> list[Fault]:
    """Addresses of nodes that mean nothing here, or this machine's loopback."""
    faults = []
    for address, meanings in found.items():
        looped = [meaning for meaning in meanings if is_loopback(meaning)]
        if not meanings:
            faults.append(_name_fault(node, f"{address!r} is unknown", "check DNS and /etc/hosts"))
        elif looped:
            advice = "remove that line from /etc/hosts, or give the address on the nodes' network"
            reason = f"{address!r} is loopback here, {looped[0]}"
            faults.append(_name_fault(node, reason, advice))
    return faults


def name_warnings(node: Node, nodes: Iterable[Node], around: Surroundings) -> list[str]:
    """Inventory names that are loopback here.

    No fault: engines are given addresses, and most names of an inventory mean nothing to anybody.
    """
    return [
        f"on {node.name}, name {other.name!r} is {found}, loopback: a program that goes by names"
        " and not by addresses finds itself there"
        for other in nodes
        if other.name != other.address
        for found in around.resolve(other.name)
        if around.is_loopback(found)
    ]


def _name_fault(node: Node, reason: str, advice: str) -> Fault:
    return Fault("name", node, reason, advice)


async def namenode_faults(
    cluster: Cluster, node: Node, limit: float, attempt: float
) -> list[Fault]:
    """The NameNode's ports that cannot be connected to within `limit` seconds."""
    found = await asyncio.gather(
        *(
            _reach(cluster, node, url, limit, attempt)
            for url in (cluster.namenode_rpc, cluster.namenode_http)
        )
    )
    return [fault for fault in found if fault is not None]


async def _reach(
    cluster: Cluster, node: Node, url: str, limit: float, attempt: float
) -> Fault | None:
    place = urlsplit(url)
    host, port = place.hostname or "", place.port or 0
    peer = next((n for n in cluster.nodes if n.address == host), Node(host, host))
    end = asyncio.get_running_loop().time() + limit
    while (reason := await connects(host, port, attempt)) is not None:
        if asyncio.get_running_loop().time() > end:
            advice = "HDFS' NameNode is to listen there: systemctl status hdfs-namenode"
            return Fault("hdfs", node, reason, advice, peer, port)
        await asyncio.sleep(0.5)
    return None


async def connects(host: str, port: int, attempt: float) -> str | None:
    """Why a port cannot be connected to, None when it can."""
    try:
        opening = asyncio.open_connection(host, port, family=socket.AF_INET)
        _, writer = await asyncio.wait_for(opening, attempt)
    except asyncio.TimeoutError:
        return f"no connection within {attempt:.0f} s"
    except OSError as error:
        return why(error)
    writer.close()
    return None


async def prove(
    check: str, node: Node, call: Callable[[], None], limit: float, attempt: float
) -> list[Fault]:
    """Whether HDFS or S3 does what it must, tried again while it may come up."""
    end = asyncio.get_running_loop().time() + limit
    while True:
        try:
            await in_thread(call, attempt)
            return []
        except NodeError as error:
            reason, _, advice = str(error).partition(" — ")
            if isinstance(error, BadInput) or asyncio.get_running_loop().time() > end:
                return [Fault(check, node, reason, advice or "see its log on the node")]
            await asyncio.sleep(1)


def interface_fault(node: Node, error: NodeError) -> Fault:
    """The fault of a node that has no interface on the way to the first worker."""
    reason, _, advice = str(error).partition(" — ")
    return Fault("interface", node, reason, advice)
