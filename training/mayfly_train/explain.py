"""What each training process of a cluster is given: its command line, environment and settings.

The same functions that start the processes, with nothing started.
"""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from mayfly_train import machine, topology
from mayfly_train.cluster import DEFAULT_PATH, Cluster, load_cluster
from mayfly_train.launch import ENGINES, Look
from mayfly_train.supervise import child_environment
from mayfly_train.topology import Task


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `explain`."""
    parser.add_argument("task", nargs="?", help="such as worker-0; all tasks when absent")
    parser.add_argument("--cluster", type=Path, default=DEFAULT_PATH, help="topology document")
    parser.add_argument("--json", action="store_true", help="print a JSON document")


def run(args: argparse.Namespace) -> int:
    """Print what is asked for."""
    cluster = load_cluster(args.cluster)
    found = explain(cluster, chosen(cluster, args.task), machine.look)
    print(json.dumps({"tasks": found}, indent=1) if args.json else as_text(found))
    return 0


def chosen(cluster: Cluster, name: str | None) -> list[Task]:
    """The task of this name, or all. Raises BadInput when the cluster has no such task."""
    if name is None:
        return list(topology.placement(cluster))
    task = topology.parse_task(name)
    topology.node_of(cluster, task)
    return [task]


def explain(cluster: Cluster, tasks: Iterable[Task], look: Look) -> list[dict[str, Any]]:
    """What each of the tasks is given, as documents. `look` is this machine, seen by a task."""
    return [_explain(cluster, task, look) for task in tasks]


def _explain(cluster: Cluster, task: Task, look: Look) -> dict[str, Any]:
    node = topology.node_of(cluster, task)
    started = ENGINES[cluster.engine].launch(cluster, task, look)
    return {
        "task": str(task),
        "node": node.name,
        "address": node.address,
        "directory": cluster.program.directory,
        "command": started.words,
        "environment": {**child_environment(cluster, task, {}), **started.environment},
        "settings": started.settings,
    }


def as_text(documents: Sequence[dict[str, Any]]) -> str:
    """The documents for a reader; each line of a task can be pasted into a shell."""
    return "\n\n".join(_text(document) for document in documents)


def _text(document: dict[str, Any]) -> str:
    environment = sorted(document["environment"].items())
    lines = [f"# {document['task']} on {document['node']} ({document['address']})"]
    lines += [f"cd {shlex.quote(document['directory'])}"]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in environment]
    if document["settings"] is not None:
        lines += [f"# $MAYFLY_SETTINGS names a file with {json.dumps(document['settings'])}"]
    return "\n".join([*lines, shlex.join(document["command"])])
