"""Who does what in a cluster, as pure functions of the topology document.

The first worker node runs `chief-0`, worker node i runs `worker-(i-1)`; where the chief does not
train, worker node i runs `worker-i`. Which further tasks there are depends on the engine. Rules of
TensorFlow 2.15's Estimator: `chief`, `worker` and `ps` make up the cluster; the evaluator gets the
cluster without standing in it, and runs beside the chief; the chief is not counted among the
workers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mayfly_train.cluster import CHIEF, ENGINES, EVALUATOR, PS, WORKER, Cluster, Node
from mayfly_train.errors import BadInput

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
    trainers = others if ENGINES[cluster.engine].chief_trains else cluster.workers
    placed = {Task(PS, index): node for index, node in enumerate(cluster.ps)}
    placed[Task(CHIEF, 0)] = chief
    placed.update((Task(WORKER, index), node) for index, node in enumerate(trainers))
    placed[Task(EVALUATOR, 0)] = chief
    return {task: node for task, node in placed.items() if task.kind in cluster.kinds}


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
        known = ", ".join(node.name for node in cluster.nodes)
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


def server_spec(cluster: Cluster) -> dict[str, list[str]]:
    """The jobs of a `tf.train.ClusterSpec` for scripts older than Estimator: ps, and all workers.

    They have no job of the chief: it is worker 0. Form:
    https://www.tensorflow.org/api_docs/python/tf/train/ClusterSpec
    """
    jobs = {PS: cluster.ps, WORKER: cluster.workers}
    return {job: _at_port(cluster, nodes) for job, nodes in jobs.items() if nodes}


def server_task(cluster: Cluster, task: Task) -> Task:
    """A task as `server_spec` counts: the chief is worker 0, and worker i is worker i + 1."""
    return task if task.kind == PS else Task(WORKER, node_rank(cluster, task))


def coordinator_config(cluster: Cluster, task: Task) -> dict[str, Any]:
    """TF_CONFIG for ParameterServerStrategy. Raises BadInput when there is no such task.

    Every worker node runs a worker. The coordinator (`chief`) is a task beside the first one's, at
    a port of its own, and `ps` are the parameter servers. Form:
    https://www.tensorflow.org/tutorials/distribute/parameter_server_training
    """
    coordinator = f"{cluster.workers[0].address}:{coordinator_port(cluster)}"
    jobs = {CHIEF: [coordinator], WORKER: _at_port(cluster, cluster.workers)}
    return _config_of(jobs | {PS: _at_port(cluster, cluster.ps)}, task)


def coordinator_port(cluster: Cluster) -> int:
    """The port of ParameterServerStrategy's coordinator, whose node has a worker at the other."""
    return cluster.port + 1


def mirrored_config(cluster: Cluster, task: Task) -> dict[str, Any]:
    """TF_CONFIG for MultiWorkerMirroredStrategy. Raises BadInput when there is no such task.

    A chief and workers, no other task. Form:
    https://www.tensorflow.org/tutorials/distribute/multi_worker_with_keras
    """
    chief, *others = cluster.workers
    return _config_of({CHIEF: _at_port(cluster, [chief]), WORKER: _at_port(cluster, others)}, task)


def _at_port(cluster: Cluster, nodes: Sequence[Node]) -> list[str]:
    return [f"{node.address}:{cluster.port}" for node in nodes]


def _config_of(jobs: Mapping[str, list[str]], task: Task) -> dict[str, Any]:
    """TF_CONFIG of one task of these jobs; a job without tasks does not stand in it."""
    if task.index >= len(jobs.get(task.kind, [])):
        known = ", ".join(str(Task(job, i)) for job, at in jobs.items() for i in range(len(at)))
        raise BadInput(f"no task {task} in this cluster — it has {known}")
    return {
        "cluster": {job: addresses for job, addresses in jobs.items() if addresses},
        "task": {"type": task.kind, "index": task.index},
    }


def node_rank(cluster: Cluster, task: Task) -> int:
    """The position of a task's node, workers first: 0 is the chief's."""
    return cluster.nodes.index(node_of(cluster, task))


def options(args: Mapping[str, Any], separator: str = "-") -> list[str]:
    """Options as words: true is a flag, false and null are nothing, a list repeats its option.

    `separator` stands for the underscores of a key: TensorFlow's own flags have them, too.
    """
    words: list[str] = []
    for key, value in args.items():
        option = f"--{key.replace('_', separator)}"
        for item in value if isinstance(value, list) else [value]:
            if item is True:
                words.append(option)
            elif item is not False and item is not None:
                words += [option, str(item)]
    return words
