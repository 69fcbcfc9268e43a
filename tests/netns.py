"""Machines in network namespaces: each with an address of its own on one switch. Needs root.

Run as a program it measures preflight: `python tests/netns.py NODES [--drop | --mtu | --slow]`.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PORT = 2222
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / name) for name in ("scripts", "training", ".")]

from tests.unit.train_fakes import FakeBoard, cluster  # noqa: E402

from mayfly_train import machine  # noqa: E402
from mayfly_train.cluster import Cluster, Node  # noqa: E402
from mayfly_train.preflight import checks  # noqa: E402
from mayfly_train.preflight.checks import Surroundings  # noqa: E402
from mayfly_train.preflight.node import Limits, Preflight  # noqa: E402

_number = itertools.count()  # a process may have several networks


def addresses(count: int) -> list[str]:
    return [f"10.77.0.{n + 2}" for n in range(count)]


class Network:
    """So many machines; a context manager that leaves nothing."""

    def __init__(self, count: int) -> None:
        self.prefix = f"mf{os.getpid()}-{next(_number)}"
        self.names = [f"{self.prefix}-n{n + 1}" for n in range(count)]

    def __enter__(self) -> Network:
        self.switch = f"{self.prefix}-switch"
        ip("netns", "add", self.switch)
        # In a namespace of its own, no rule of the machine's firewall sees the bridge.
        self.inside(self.switch, "ip", "link", "add", "br0", "type", "bridge")
        self.inside(self.switch, "ip", "link", "set", "br0", "up")
        for number, (name, address) in enumerate(zip(self.names, addresses(99), strict=False)):
            ip("netns", "add", name)
            pair = ("type", "veth", "peer", "name", f"port{number}", "netns", self.switch)
            self.inside(name, "ip", "link", "add", "eth0", *pair)
            self.inside(self.switch, "ip", "link", "set", f"port{number}", "master", "br0", "up")
            self.inside(name, "ip", "address", "add", f"{address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                self.inside(name, "ip", "link", "set", device, "up")
        return self

    def __exit__(self, *_: Any) -> None:
        for name in (*self.names, self.switch):
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)

    def inside(self, name: str, *command: str) -> None:
        """Run a command on a machine."""
        subprocess.run(["ip", "netns", "exec", name, *command], check=True)

    def preflight(
        self, directory: Path, grace: float = 10
    ) -> tuple[dict[str, dict[str, Any]], float]:
        """Every machine's report, and the seconds that all took with their processes' start."""
        started = time.monotonic()
        command = [sys.executable, __file__, str(len(self.names)), "--board", str(directory)]
        command += ["--grace", str(grace)]
        running = {
            name: subprocess.Popen(
                ["ip", "netns", "exec", name, *command, "--node", str(number)],
                stdout=subprocess.PIPE,
                text=True,
            )
            for number, name in enumerate(self.names)
        }
        outputs = {name: process.communicate()[0] for name, process in running.items()}
        reports = [json.loads(output) for output in outputs.values()]
        return {report["node"]: report for report in reports}, time.monotonic() - started


class SharedBoard(FakeBoard):
    """Written by several processes."""

    def write(self, name: str, data: bytes) -> None:
        part = self.directory / f".{name}.{os.getpid()}"
        part.write_bytes(data)
        part.rename(self.directory / name)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def topology(count: int) -> Cluster:
    nodes = tuple(Node(f"n{n + 1}", address) for n, address in enumerate(addresses(count)))
    head = nodes[0].address
    return replace(
        cluster(),
        workers=nodes,
        ps=(),
        port=PORT,
        namenode_rpc=f"hdfs://{head}:9000",
        namenode_http=f"http://{head}:9870",
    )


async def one_node(number: int, count: int, board: Path, grace: float) -> dict[str, Any]:
    """The preflight of the machine that this process is on; HDFS and S3 are left out."""
    made = topology(count)
    node = made.workers[number]
    around = Surroundings(
        board=SharedBoard(board),
        store=lambda: None,
        bucket=None,
        interface=lambda address: machine.look(address).interface,
        resolve=checks.resolve,
        is_loopback=lambda address: address.startswith("127."),
        served=lambda: checks.served_at([node.address]),
    )
    limits = Limits(grace=grace, answer=min(3.0, grace))
    return (await Preflight(made, node, around, limits).run()).document()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("nodes", type=int)
    parser.add_argument("--drop", action="store_true", help="n2 → n1 port 2222 is dropped")
    parser.add_argument("--mtu", action="store_true", help="large packets n2 → n3 are dropped")
    parser.add_argument("--slow", action="store_true", help="n2 → n3 has 16 Mbit/s")
    parser.add_argument("--node", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--grace", type=float, default=Limits().grace, help="seconds")
    parser.add_argument("--board", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.node is not None:
        # The NameNode's ports are connected to, no more.
        ears = [socket.create_server(("", port), backlog=99) for port in (9000, 9870)]
        print(json.dumps(asyncio.run(one_node(args.node, args.nodes, args.board, args.grace))))
        for ear in ears:
            ear.close()
        return
    with Network(args.nodes) as network, tempfile.TemporaryDirectory() as directory:
        if args.drop:
            drop(network)
        if args.mtu:
            drop_large(network)
        if args.slow:
            slow_down(network)
        reports, seconds = network.preflight(Path(directory), args.grace)
    for report in reports.values():
        print(json.dumps({**report, "edges": len(report["edges"]), "targets": None}))
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = (used.ru_utime + used.ru_stime) / args.nodes
    print(f"all: {seconds:.1f} s with the start of {args.nodes} processes, {cpu:.2f} s of CPU each")


def drop(network: Network) -> None:
    """The second machine's way to the first one's port 2222 is dropped, and no other."""
    source = ("-s", addresses(2)[1], "-p", "tcp", "--dport", str(PORT))
    network.inside(network.names[0], "iptables", "-A", "INPUT", *source, "-j", "DROP")


def drop_large(network: Network) -> None:
    """Packets of more than 1,000 bytes from the second machine to the third are dropped."""
    rule = ("-s", addresses(2)[1], "-m", "length", "--length", "1000:65535", "-j", "DROP")
    network.inside(network.names[2], "iptables", "-A", "INPUT", *rule)


def slow_down(network: Network) -> None:
    """What the second machine sends to the third has 16 Mbit/s."""
    for words in (
        "qdisc add dev eth0 root handle 1: htb default 1",
        "class add dev eth0 parent 1: classid 1:1 htb rate 10gbit",
        "class add dev eth0 parent 1: classid 1:3 htb rate 16mbit burst 32k",
        "filter add dev eth0 parent 1: protocol ip"
        f" u32 match ip dst {addresses(3)[2]}/32 flowid 1:3",
    ):
        network.inside(network.names[1], "tc", *words.split())


if __name__ == "__main__":
    main()
