"""How the tasks of each engine are started: one table, command lines and environments as data."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mayfly_train import topology
from mayfly_train.cluster import EVALUATOR, Cluster
from mayfly_train.machine import Machine
from mayfly_train.topology import Task

# torchrun restarts all processes when one has failed. The first restart can meet an address of the
# old ones, so one is not enough.
MAX_RESTARTS = 3
# Nodes are not configured at the same time: the others wait this long for rank 0's store.
RENDEZVOUS_S = 600


Look = Callable[[str], Machine]  # `machine.look`: this node, seen from the way to an address


@dataclass(frozen=True)
class Launch:
    """A command line, and what it finds in its environment beside what all tasks do."""

    words: list[str]
    environment: Mapping[str, str]


@dataclass(frozen=True)
class Engine:
    """What the supervisor needs to know of an engine.

    `speaks_grpc`: its tasks answer at the cluster's port, and one that does not hangs.
    """

    launch: Callable[[Cluster, Task, Look], Launch]
    speaks_grpc: bool


def estimator(cluster: Cluster, task: Task, _look: Look) -> Launch:
    """TensorFlow's Estimator: the same command for every task, TF_CONFIG tells them apart."""
    words = [cluster.python, *program(cluster)]
    if task.kind == EVALUATOR:
        # It shares the chief's node: training comes first.
        words = ["nice", "-n", "10", *words]
    return Launch(
        words,
        {
            "TF_CONFIG": json.dumps(topology.tf_config(cluster, task)),
            # TensorFlow takes oneDNN by itself only where the CPU has AVX-512 VNNI or better; the
            # built-in program trains 1.8 times as fast with it on a CPU that has only AVX2.
            "TF_ENABLE_ONEDNN_OPTS": cluster.environment.get("TF_ENABLE_ONEDNN_OPTS", "1"),
        },
    )


def torch(cluster: Cluster, task: Task, look: Look) -> Launch:
    """PyTorch's torchrun on each node; they meet at the store that the chief's keeps.

    Options: https://docs.pytorch.org/docs/stable/elastic/run.html
    """
    rank, endpoint = topology.node_rank(cluster, task), cluster.workers[0].address
    machine = look(endpoint)
    rendezvous = {
        "is_host": str(rank == 0).lower(),  # not to be guessed from names and addresses
        "read_timeout": RENDEZVOUS_S,
        "join_timeout": RENDEZVOUS_S,
    }
    words = [cluster.python, "-m", "torch.distributed.run"]
    words += ["--nnodes", str(len(cluster.workers)), "--nproc-per-node", str(machine.processes)]
    words += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{endpoint}:{cluster.port}"]
    words += ["--rdzv-id", cluster.run, "--max-restarts", str(MAX_RESTARTS)]
    words += ["--rdzv-conf", ",".join(f"{key}={value}" for key, value in rendezvous.items())]
    words += ["--local-addr", topology.node_of(cluster, task).address]
    environment = {
        "GLOO_SOCKET_IFNAME": machine.interface,
        "NCCL_SOCKET_IFNAME": machine.interface,
        "OMP_NUM_THREADS": str(max(1, machine.cores // machine.processes)),
    }
    return Launch([*words, *program(cluster)], environment)


ENGINES = {
    "estimator": Engine(estimator, speaks_grpc=True),
    "torch": Engine(torch, speaks_grpc=False),
}


def program(cluster: Cluster) -> list[str]:
    """The program and its arguments, the same for every task (docs/programs.md)."""
    words = [cluster.program.path, "--data-dir", cluster.data_dir, "--job-dir", cluster.model_dir]
    words += ["--train-steps", str(cluster.steps)]
    if cluster.mode == "sync" and cluster.engine == "estimator":
        words.append("--sync")
    return words + topology.options(cluster.program.args)
