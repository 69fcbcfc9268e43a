"""Who does what in a cluster, as pure functions of the topology document.

Rules of TensorFlow 2.15's Estimator: `chief`, `worker` and `ps` make up the cluster; the evaluator
gets the cluster without standing in it; the chief is not counted among the workers. So the first
worker node runs `chief-0` and `evaluator-0`, and worker node i runs `worker-(i-1)`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mayfly_train.cluster import Cluster, Node
from mayfly_train.errors import BadInput

PS, CHIEF, WORKER, EVALUATOR = "ps", "chief", "worker", "evaluator"
KINDS = (PS, CHIEF, WORKER, EVALUATOR)


@dataclass(frozen=True)
class Task:
    """One process of the training; written `kind-index`."""

    kind: str
    index: int

    def __str__(self) -> str:
        return f"{self.kind}-{self.index}"


def parse_task(text: str) -> Task:
    """The task that a text names, such as `ps-0`. Raises BadInput otherwise."""
    kind, _, index = text.rpartition("-")
    if kind not in KINDS or not index.isdecimal():
        raise BadInput(f"unknown task {text!r} — write one of {', '.join(KINDS)}, '-', an index")
    return Task(kind, int(index))


def placement(cluster: Cluster) -> dict[Task, Node]:
    """Every task and the node that runs it, in a fixed order."""
    chief, *others = cluster.workers
    placed = {Task(PS, index): node for index, node in enumerate(cluster.ps)}
    placed[Task(CHIEF, 0)] = chief
    placed.update((Task(WORKER, index), node) for index, node in enumerate(others))
    placed[Task(EVALUATOR, 0)] = chief
    return placed


def node_of(cluster: Cluster, task: Task) -> Node:
    """The node that runs a task. Raises BadInput when the cluster has no such task."""
    placed = placement(cluster)
    if task not in placed:
        known = ", ".join(map(str, placed))
        raise BadInput(f"no task {task} in this cluster — it has {known}")
    return placed[task]


def tasks_of(cluster: Cluster, node_name: str) -> list[Task]:
    """The tasks that a node runs. Raises BadInput when the cluster has no such node."""
    tasks = [task for task, node in placement(cluster).items() if node.name == node_name]
    if not tasks:
        known = ", ".join(node.name for node in cluster.ps + cluster.workers)
        raise BadInput(f"no node {node_name!r} in this cluster — it has {known}")
    return tasks


def tf_config(cluster: Cluster, task: Task) -> dict[str, Any]:
    """TF_CONFIG of a task. Raises BadInput when the cluster has no such task.

    Format: https://www.tensorflow.org/api_docs/python/tf/estimator/train_and_evaluate
    """
    node_of(cluster, task)
    addresses: dict[str, list[str]] = {}
    for member, node in placement(cluster).items():
        if member.kind != EVALUATOR:
            addresses.setdefault(member.kind, []).append(f"{node.address}:{cluster.port}")
    return {
        "environment": "cloud",
        "model_dir": cluster.model_dir,
        "cluster": addresses,
        "task": {"type": task.kind, "index": task.index},
    }


def command(cluster: Cluster) -> list[str]:
    """The program's command line, the same for every task (docs/programs.md)."""
    words = [cluster.python, cluster.program.path]
    words += ["--data-dir", cluster.data_dir, "--job-dir", cluster.model_dir]
    words += ["--train-steps", str(cluster.steps)]
    if cluster.mode == "sync":
        words.append("--sync")
    return words + options(cluster.program.args)


def options(args: Mapping[str, Any]) -> list[str]:
    """Options as words: true is a flag, false and null are nothing, a list repeats its option."""
    words: list[str] = []
    for key, value in args.items():
        option = f"--{key.replace('_', '-')}"
        for item in value if isinstance(value, list) else [value]:
            if item is True:
                words.append(option)
            elif item is not False and item is not None:
                words += [option, str(item)]
    return words
