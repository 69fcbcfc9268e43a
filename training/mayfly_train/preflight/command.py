"""`preflight`: test this node's ways to all others before an engine starts on them.

A run that has passed on this node is not tested again: its peers are busy training by then.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import shutil
import socket
import sys
from pathlib import Path
from typing import Any

from mayfly_train import markers
from mayfly_train.cluster import DEFAULT_PATH, Cluster, Node, load_cluster
from mayfly_train.errors import BadInput, NodeError
from mayfly_train.preflight.checks import resolve, surroundings_of
from mayfly_train.preflight.node import TASK, Preflight
from mayfly_train.supervise import ENDED_FILE

STATE_FILE = Path("/var/lib/mayfly/preflight.json")
KEYS = Path("/etc/mayfly/s3.env")
USER = "mayfly"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `preflight`."""
    parser.add_argument("--cluster", type=Path, default=DEFAULT_PATH, help="topology document")
    parser.add_argument("--node", help="this node's name (default: the one with our address)")
    parser.add_argument("--env-file", type=Path, default=KEYS, help="file of AWS_* lines")
    parser.add_argument("--state-file", type=Path, default=STATE_FILE, help="the last report")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def run(args: argparse.Namespace) -> int:
    """Test this node. Returns 0, or 1 after one line for each thing that is wrong."""
    cluster = load_cluster(args.cluster)
    node = own_node(cluster, args.node)
    document = passed_before(args.state_file, cluster.run)
    if document is None:
        around = surroundings_of(cluster, node, args.env_file)
        try:
            report = asyncio.run(Preflight(cluster, node, around).run())
        except Exception as error:
            # The tasks do not start, and nobody else would say why.
            message = f"preflight itself ended with {type(error).__name__}: {error}"
            with contextlib.suppress(NodeError):
                markers.mark_failed(around.board, TASK, node.name, message)
            raise
        document = report.document()
        _keep(args.state_file, document)
        if not report.ok:
            _mark_ended(cluster)
        lines = report.lines()
    else:
        lines = [f"preflight: run {cluster.run} has passed on this node before"]
    if args.json:
        print(json.dumps(document, indent=1))
    else:
        print("\n".join(lines), file=sys.stderr)
    return 0 if document["ok"] else 1


def own_node(cluster: Cluster, name: str | None) -> Node:
    """This node among the cluster's, by name or by address. Raises BadInput."""
    nodes = cluster.nodes
    known = ", ".join(node.name for node in nodes)
    if name is not None:
        found = [node for node in nodes if node.name == name]
    else:
        found = [node for node in nodes if any(map(_is_local, resolve(node.address)))]
    if len(found) != 1:
        what = (
            f"no node {name!r}" if name else f"{len(found)} nodes have an address of this machine"
        )
        raise BadInput(f"{what} in this cluster — name one with --node: {known}")
    return found[0]


def _is_local(address: str) -> bool:
    """Whether this machine has an address: only then a socket can be bound to it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
        return True


def passed_before(path: Path, run: str) -> dict[str, Any] | None:
    """The report of a preflight that this run has passed on this node, None when there is none."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    passed = isinstance(document, dict) and document.get("run") == run and document.get("ok")
    return document if passed else None


def _keep(path: Path, document: dict[str, Any]) -> None:
    part = path.with_suffix(".part")
    with contextlib.suppress(OSError):  # without it, it is tested again after a restart
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        part.replace(path)


def _mark_ended(cluster: Cluster) -> None:
    """Start the dead-man's clock, as the tasks would: they never start now."""
    text = json.dumps({"run": cluster.run, "time": markers.utc_now()})
    with contextlib.suppress(OSError, LookupError):
        ENDED_FILE.write_text(text, encoding="utf-8")
        shutil.chown(ENDED_FILE, USER, USER)  # a later run's supervisor removes it
