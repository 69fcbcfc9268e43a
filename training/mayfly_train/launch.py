"""How the tasks of each engine are started: one table, command lines and environments as data."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from mayfly_train import topology
from mayfly_train.cluster import CHIEF, EVALUATOR, ONE_COMMAND, PS, WORKER, Cluster
from mayfly_train.machine import Machine
from mayfly_train.topology import Task

# How often all processes start again within a start of the launcher, when one of them has failed.
MAX_RESTARTS = 3
# What ranks have, from SIGTERM on, to save: the supervisor gives 60 s to their launcher, and
# torchrun by itself 30 s to them.
RANKS_SAVE_S = 50
# Nodes are not configured at the same time: the others wait this long for rank 0's store.
RENDEZVOUS_S = 600
# Where a node's own commands are, as Debian's init sets it for services.
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
HOROVOD_LAUNCHER = "horovod_launch.py"
TASKS_DIR = PurePosixPath("/var/lib/mayfly/tasks")  # the supervisors' state


Look = Callable[[str], Machine]  # `machine.look`: this node, seen from the way to an address


@dataclass(frozen=True)
class Launch:
    """A command line, and what it finds in its environment beside what all tasks do.

    `settings` is a document that the supervisor writes before the start, to a file which the
    program finds by MAYFLY_SETTINGS; None: no such file.
    """

    words: list[str]
    environment: Mapping[str, str]
    settings: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Engine:
    """What the supervisor needs to know of an engine.

    `servers` are the kinds of tasks that answer gRPC at the cluster's port: one that does not
    hangs. `asked` are those that do nothing but what the chief asks: nobody needs them after it.
    """

    launch: Callable[[Cluster, Task, Look], Launch]
    servers: tuple[str, ...] = ()
    asked: tuple[str, ...] = ()


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
            **onednn(cluster),
        },
    )


def onednn(cluster: Cluster) -> dict[str, str]:
    """TensorFlow takes oneDNN by itself only where the CPU has AVX-512 VNNI or better.

    With it on a CPU that has only AVX2, cifar10 trains 1.8 times as fast (TensorFlow 2.15), and
    mnist_mwms's CNN takes a quarter less processor time (2.21; its MLP as much as without).
    """
    return {"TF_ENABLE_ONEDNN_OPTS": cluster.environment.get("TF_ENABLE_ONEDNN_OPTS", "1")}


def tf_server(cluster: Cluster, task: Task, _look: Look) -> Launch:
    """TensorFlow's servers, for scripts older than Estimator: a ClusterSpec, a job and an index.

    The script is told in the flags that such scripts have, in a file and in its environment.
    """
    spec, own = topology.server_spec(cluster), topology.server_task(cluster, task)
    hosts = {"ps_hosts": spec.get(PS, []), "worker_hosts": spec[WORKER]}
    joined = {key: ",".join(addresses) for key, addresses in hosts.items()}
    place = {"job_name": own.kind, "task_index": own.index}
    where = {"data_dir": cluster.data_dir, "job_dir": cluster.model_dir}
    flags = {**joined, **place, **where, "train_steps": cluster.steps}
    flags["sync"] = cluster.mode == "sync"
    words = [cluster.python, cluster.program.path]
    words += topology.options({**flags, **cluster.program.args}, separator="_")
    environment = {key.upper(): str(value) for key, value in {**joined, **place}.items()}
    return Launch(words, {**environment, **onednn(cluster)}, {**hosts, **place, **where})


def keras_ps(cluster: Cluster, task: Task, _look: Look) -> Launch:
    """ParameterServerStrategy of Keras 3: the same command for coordinator, workers and servers."""
    config = topology.coordinator_config(cluster, task)
    return Launch(
        [cluster.python, *program(cluster)], {"TF_CONFIG": json.dumps(config), **onednn(cluster)}
    )


def mwms(cluster: Cluster, task: Task, _look: Look) -> Launch:
    """MultiWorkerMirroredStrategy: the same command for chief and workers.

    Keras 3 does not train under it; `tf.keras` is tf-keras with this setting (TensorFlow 2.16 on).
    https://keras.io/getting_started/#tensorflow--keras-2-backwards-compatibility
    """
    legacy = cluster.environment.get("TF_USE_LEGACY_KERAS", "1")
    config = topology.mirrored_config(cluster, task)
    return Launch(
        [cluster.python, *program(cluster)],
        {"TF_CONFIG": json.dumps(config), "TF_USE_LEGACY_KERAS": legacy, **onednn(cluster)},
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
        **_torchrun_settings(),
    }
    return Launch([*words, *program(cluster)], environment)


def _torchrun_settings() -> dict[str, str]:
    """What torchrun reads from its environment.

    How long it waits for its processes after it has sent SIGTERM on to them (LaunchConfig in
    torch/distributed/launcher/api.py; a restart's SIGTERM has its 30 s all the same).
    And a store of their own for the ranks of each start: in the one that they share otherwise
    (elastic/rendezvous/dynamic_rendezvous.py) they find addresses of the start before, and a
    torchrun that was started again waits for ever to be told where it is.
    """
    return {
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(RANKS_SAVE_S),
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }


def command(cluster: Cluster, task: Task, look: Look) -> Launch:
    """Anything else: the user's words on every node, with the cluster in the environment."""
    machine, rank = look(cluster.workers[0].address), topology.node_rank(cluster, task)
    own, nodes = topology.node_of(cluster, task), [node.address for node in cluster.nodes]
    runtime = str(PurePosixPath(cluster.python).parent)
    environment = {
        "PATH": f"{runtime}:{SYSTEM_PATH}",
        "TF_CONFIG": json.dumps(topology.tf_config(cluster, task)),
        **_mayfly_names(cluster, own.address, rank, machine),
        **_torchrun_names(cluster, rank, machine),
        **_skypilot_names(cluster, nodes, rank, machine),
        **_horovod_names(nodes, rank, own.address),
    }
    return Launch(list(cluster.program.command), environment)


def _mayfly_names(cluster: Cluster, own: str, rank: int, machine: Machine) -> dict[str, str]:
    return {
        "MAYFLY_NODE_RANK": str(rank),
        "MAYFLY_NUM_NODES": str(len(cluster.nodes)),
        "MAYFLY_NODE_ADDRESS": own,
        "MAYFLY_WORKER_ADDRESSES": ",".join(node.address for node in cluster.workers),
        "MAYFLY_PS_ADDRESSES": ",".join(node.address for node in cluster.ps),
        "MAYFLY_PORT": str(cluster.port),
        "MAYFLY_INTERFACE": machine.interface,
        "MAYFLY_GPUS": str(machine.gpus),
        "MAYFLY_DATA_DIR": cluster.data_dir,
        "MAYFLY_JOB_DIR": cluster.model_dir,
        "MAYFLY_TRAIN_STEPS": str(cluster.steps),
        "MAYFLY_BATCH_SIZE": str(cluster.batch_size),
        "GLOO_SOCKET_IFNAME": machine.interface,
        "NCCL_SOCKET_IFNAME": machine.interface,
    }


def _torchrun_names(cluster: Cluster, rank: int, machine: Machine) -> dict[str, str]:
    """As for one process on each node; a torchrun in the command sets its own for more.

    https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables
    """
    return {
        "MASTER_ADDR": cluster.workers[0].address,
        "MASTER_PORT": str(cluster.port),
        "WORLD_SIZE": str(len(cluster.nodes)),
        "RANK": str(rank),
        "NODE_RANK": str(rank),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "NPROC_PER_NODE": str(machine.processes),
        **_torchrun_settings(),
    }


def _skypilot_names(
    cluster: Cluster, nodes: list[str], rank: int, machine: Machine
) -> dict[str, str]:
    """https://docs.skypilot.co/en/latest/running-jobs/environment-variables.html"""
    return {
        "SKYPILOT_NODE_IPS": "\n".join(nodes),
        "SKYPILOT_NODE_RANK": str(rank),
        "SKYPILOT_NUM_NODES": str(len(nodes)),
        "SKYPILOT_NUM_GPUS_PER_NODE": str(machine.gpus),
        "SKYPILOT_TASK_ID": cluster.run,
    }


def _horovod_names(nodes: list[str], rank: int, own: str) -> dict[str, str]:
    """What horovodrun gives to the ranks of one process on each node (runner/gloo_run.py)."""
    size = str(len(nodes))
    return {
        "HOROVOD_HOSTNAME": own,
        "HOROVOD_HOSTS": ",".join(f"{address}:1" for address in nodes),
        "HOROVOD_RANK": str(rank),
        "HOROVOD_SIZE": size,
        "HOROVOD_LOCAL_RANK": "0",
        "HOROVOD_LOCAL_SIZE": "1",
        "HOROVOD_CROSS_RANK": str(rank),
        "HOROVOD_CROSS_SIZE": size,
    }


def horovod(cluster: Cluster, task: Task, look: Look) -> Launch:
    """Horovod's ranks, started by a launcher on each node; they meet at the chief's.

    Nodes run no commands on each other: see `horovod_launch`, which the runtime's Python runs.
    """
    machine = look(cluster.workers[0].address)
    words = [cluster.python, str(machine.package / HOROVOD_LAUNCHER), "--run", cluster.run]
    for node in cluster.workers:
        words += ["--node", f"{node.name}={node.address}"]
    words += ["--me", topology.node_of(cluster, task).name, "--port", str(cluster.port)]
    words += ["--slots", str(machine.processes), "--restarts", str(MAX_RESTARTS)]
    words += ["--assemble", str(RENDEZVOUS_S), "--save", str(RANKS_SAVE_S)]
    words += ["--min-nodes", cluster.environment.get("MAYFLY_MIN_NODES", "1")]
    words += ["--memory", str(TASKS_DIR / cluster.run / "horovod.json")]
    environment = {
        "HOROVOD_GLOO_IFACE": machine.interface,
        "NCCL_SOCKET_IFNAME": machine.interface,
        "OMP_NUM_THREADS": str(max(1, machine.cores // machine.processes)),
        **onednn(cluster),
    }
    return Launch([*words, "--", cluster.python, *program(cluster)], environment)


ENGINES = {
    "estimator": Engine(estimator, servers=(PS, CHIEF, WORKER)),
    "torch": Engine(torch),
    "horovod": Engine(horovod),
    "keras-ps": Engine(keras_ps, servers=(PS, WORKER), asked=(PS, WORKER)),
    "mwms": Engine(mwms, servers=(CHIEF, WORKER)),
    "tf-server": Engine(tf_server, servers=(PS, CHIEF, WORKER)),
    ONE_COMMAND: Engine(command),
}


def program(cluster: Cluster) -> list[str]:
    """The program and its arguments, the same for every task (docs/programs.md)."""
    words = [cluster.program.path, "--data-dir", cluster.data_dir, "--job-dir", cluster.model_dir]
    words += ["--train-steps", str(cluster.steps)]
    if cluster.mode == "sync" and cluster.engine == "estimator":
        words.append("--sync")
    return words + topology.options(cluster.program.args)
