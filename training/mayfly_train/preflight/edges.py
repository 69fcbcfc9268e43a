"""Who tests which port of whom, and what a finding is called: pure functions of the topology."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from mayfly_train.cluster import Cluster, Node

# Up to this many nodes each tests all others: 64 make 4,032 edges, 10,000 would make 10^8.
FULL_MESH_NODES = 64
NEIGHBOURS = 4  # on either side, in the ring of all nodes, where there are more
CLOCK_S = 1.0

# Who uses the cluster's port, by engine (see `launch`); the pair is (first worker, other nodes).
_TENSORFLOW = ("TensorFlow's server", "TensorFlow's server")
_USES = {
    "torch": ("torchrun's rendezvous", "preflight"),
    "horovod": ("Horovod's rendezvous", "preflight"),
    "command": ("the command", "the command"),
}
# Engines whose processes also send their data from and to ports that the kernel chooses.
_GLOO = ("torch", "horovod")
# One that runs a coordinator on the first worker's node, beside a worker.
_COORDINATOR = ("keras-ps",)


@dataclass(frozen=True)
class Port:
    """A TCP port and who uses it; number 0 is one that the kernel chooses, told when met."""

    number: int
    use: str


def ports_of(cluster: Cluster, node: Node) -> tuple[Port, ...]:
    """The ports of a node that others reach while the engine runs, first the one to meet at.

    Every node is met at the cluster's port, also one on which the engine leaves it alone.
    """
    is_first = node == cluster.workers[0]
    uses = _USES.get(cluster.engine, _TENSORFLOW)
    ports = [Port(cluster.port, uses[0 if is_first else 1])]
    if cluster.engine in _COORDINATOR and is_first:
        ports.append(Port(cluster.port + 1, "the coordinator"))
    if cluster.engine in _GLOO:
        ports.append(Port(0, "a sample of gloo's ports"))
    return tuple(ports)


# --- who tests whom ----------------------------------------------------------------------------


def targets_of(cluster: Cluster, node: Node) -> tuple[Node, ...]:
    """The nodes that a node tests: all others, or in a large cluster some.

    Those are its neighbours, the next one in its all-reduce, and those that all talk to anyway:
    parameter servers and the first worker.
    """
    nodes = cluster.nodes
    if len(nodes) <= FULL_MESH_NODES:
        return tuple(other for other in nodes if other != node)
    wanted = {*_neighbours(nodes, node), *_central(cluster), _beside(cluster, node, 1)} - {node}
    return tuple(other for other in nodes if other in wanted)


def testers_of(cluster: Cluster, node: Node) -> tuple[Node, ...]:
    """The nodes that test a node: those that have it among their targets."""
    nodes = cluster.nodes
    if len(nodes) <= FULL_MESH_NODES or node in _central(cluster):
        return tuple(other for other in nodes if other != node)
    wanted = {*_neighbours(nodes, node), _beside(cluster, node, -1)} - {node}
    return tuple(other for other in nodes if other in wanted)


def ring_of(cluster: Cluster, node: Node) -> tuple[Node, ...]:
    """The nodes that a node makes an all-reduce with, in order: all, or a part of like size."""
    nodes = cluster.nodes
    parts = -(-len(nodes) // FULL_MESH_NODES)
    own = nodes.index(node) * parts // len(nodes)
    return tuple(other for n, other in enumerate(nodes) if n * parts // len(nodes) == own)


def _central(cluster: Cluster) -> tuple[Node, ...]:
    return (cluster.workers[0], *cluster.ps)


def _neighbours(nodes: tuple[Node, ...], node: Node) -> set[Node]:
    rank = nodes.index(node)
    steps = range(-NEIGHBOURS, NEIGHBOURS + 1)
    return {nodes[(rank + step) % len(nodes)] for step in steps} - {node}


def _beside(cluster: Cluster, node: Node, step: int) -> Node:
    ring = ring_of(cluster, node)
    return ring[(ring.index(node) + step) % len(ring)]


# --- findings ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """Something that keeps the engine from working: of a node, or on its way to a peer."""

    check: str
    node: Node
    reason: str
    advice: str
    peer: Node | None = None
    port: int | None = None

    def __str__(self) -> str:
        where = _called(self.node)
        if self.peer is not None:
            where = f"{where} → {_called(self.peer)}"
        if self.port is not None:
            where = f"{where} port {self.port}"
        return f"{where}: {self.reason} — {self.advice}"

    @property
    def line(self) -> str:
        """The finding as one line of output."""
        return f"preflight: {self}"

    def document(self) -> dict[str, Any]:
        """The finding as a document; of a node itself, `to` is null."""
        return {
            "check": self.check,
            "from": self.node.name,
            "to": self.peer.name if self.peer else None,
            "port": self.port,
            "reason": self.reason,
            "advice": self.advice,
        }


def _called(node: Node) -> str:
    return node.name if node.name == node.address else f"{node.name} ({node.address})"


@dataclass(frozen=True)
class Offset:
    """How far a peer's clock is ahead of ours, in seconds, and how wrong that may be."""

    seconds: float
    error: float


def offset_of(sent: float, answered: float, theirs: float) -> Offset:
    """The offset from one question: when we sent it, when its answer came, and their clock.

    The answer was made somewhere between the two, by Cristian's rule in their middle (F. Cristian,
    Probabilistic clock synchronization, 1989).
    """
    return Offset(theirs - (sent + answered) / 2, (answered - sent) / 2)


def clock_faults(node: Node, offsets: Mapping[Node, Offset], limit: float = CLOCK_S) -> list[Fault]:
    """Peers whose clock differs by more than `limit` seconds for certain.

    When that is most of several peers, it is our own clock.
    """
    advice = "set the clocks: systemd-timesyncd or chrony on every node"
    wrong = {peer: o for peer, o in offsets.items() if abs(o.seconds) - o.error > limit}
    if len(offsets) > 1 and 2 * len(wrong) > len(offsets):
        own = -median(offset.seconds for offset in wrong.values())
        others = f"of {len(wrong)} other nodes'"
        return [Fault("clock", node, f"its clock is {_ahead(own)} {others}", advice)]
    return [
        Fault("clock", node, f"its clock is {_ahead(offset.seconds)} of ours", advice, peer)
        for peer, offset in wrong.items()
    ]


def _ahead(seconds: float) -> str:
    return f"{abs(seconds):.1f} s {'ahead' if seconds > 0 else 'behind'}"


def name_faults(
    node: Node, peer: Node, ours: Mapping[str, list[str]], theirs: Mapping[str, list[str]]
) -> list[Fault]:
    """Addresses that both nodes have resolved, and that mean different machines to them."""
    return [
        Fault(
            "name",
            node,
            f"{address!r} is {' '.join(ours[address])} here and {' '.join(theirs[address])} there",
            "make /etc/hosts and DNS the same on all nodes, or give IP addresses",
            peer,
        )
        for address in sorted(set(ours) & set(theirs))
        if sorted(ours[address]) != sorted(theirs[address])
    ]
