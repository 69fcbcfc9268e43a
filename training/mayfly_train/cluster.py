"""The topology document `/etc/mayfly/cluster.json`: read once, checked, and frozen.

Role `trainer` writes it on every node; all that a task needs to know about the cluster is derived
from it (see `topology`).
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mayfly_train.errors import BadInput

DEFAULT_PATH = Path("/etc/mayfly/cluster.json")
VERSION = 1
PS, CHIEF, WORKER, EVALUATOR = "ps", "chief", "worker", "evaluator"
MODES = ("async", "sync")
ONE_COMMAND = "command"


@dataclass(frozen=True)
class Shape:
    """The kinds of tasks that an engine has, and whether it can do without parameter servers.

    Where the chief does not train, there is a worker beside it.
    """

    kinds: tuple[str, ...]
    needs_ps: bool = False
    chief_trains: bool = True


# How each task is started stands in `launch`.
ENGINES = {
    "estimator": Shape((PS, CHIEF, WORKER, EVALUATOR), needs_ps=True),
    "torch": Shape((CHIEF, WORKER)),
    "tf-server": Shape((PS, CHIEF, WORKER), needs_ps=True),
    "horovod": Shape((CHIEF, WORKER)),
    "keras-ps": Shape((PS, CHIEF, WORKER), needs_ps=True, chief_trains=False),
    "mwms": Shape((CHIEF, WORKER)),
    ONE_COMMAND: Shape((PS, CHIEF, WORKER)),
}

_MISSING: Any = object()


@dataclass(frozen=True)
class Node:
    """A machine: its inventory name and the address that the others reach it at."""

    name: str
    address: str


@dataclass(frozen=True)
class Program:
    """What is trained: the file, the directory it runs in, and its own options.

    `args` maps an option to its value: `batch_size: 64` becomes `--batch-size 64`. `command` are
    the words that engine command runs on every node instead.
    """

    path: str
    directory: str
    args: Mapping[str, Any]
    command: tuple[str, ...] = ()


@dataclass(frozen=True)
class Cluster:
    """One run on one cluster. Nodes stand in the order that gives tasks their index."""

    run: str
    run_uri: str
    engine: str
    mode: str
    steps: int
    batch_size: int
    port: int
    ps: tuple[Node, ...]
    workers: tuple[Node, ...]
    namenode_rpc: str
    namenode_http: str
    data_dir: str
    model_dir: str
    status_dir: str
    program: Program
    python: str
    environment: Mapping[str, str]
    max_duration_s: int
    tensorboard: bool
    budget_s: int = 0  # counted from when the nodes were made; 0: no budget
    idle_s: int = 0  # without a step; 0: no such limit

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of tasks that this engine has."""
        return ENGINES[self.engine].kinds

    @property
    def nodes(self) -> tuple[Node, ...]:
        """All nodes, workers first: a node's position is its rank, 0 is the chief's."""
        return self.workers + self.ps


def load_cluster(path: Path = DEFAULT_PATH) -> Cluster:
    """The cluster in a file. Raises BadInput naming the file and what is wrong with it."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror} — role trainer writes it") from None
    except ValueError as error:
        raise BadInput(f"{path} is not JSON: {error} — run role trainer again") from None
    try:
        return parse_cluster(document)
    except BadInput as error:
        raise BadInput(f"{path}: {error}") from None


def parse_cluster(document: Any) -> Cluster:
    """The cluster in a parsed document. Raises BadInput naming the key that is wrong."""
    if _get(document, "version", int) != VERSION:
        raise BadInput(f"version is {document['version']} — this program reads version {VERSION}")
    cluster = Cluster(
        run=_get(document, "run", str),
        run_uri=_get(document, "run_uri", str).rstrip("/"),
        engine=_choice(document, "engine", tuple(ENGINES)),
        mode=_choice(document, "mode", MODES),
        steps=_positive(document, "steps"),
        batch_size=_positive(document, "batch_size"),
        port=_positive(document, "port"),
        ps=_nodes(document, "nodes.ps"),
        workers=_nodes(document, "nodes.worker"),
        namenode_rpc=_get(document, "namenode.rpc", str),
        namenode_http=_get(document, "namenode.http", str),
        data_dir=_get(document, "data_dir", str),
        model_dir=_get(document, "model_dir", str),
        status_dir=_get(document, "status_dir", str),
        program=Program(
            path=_get(document, "program.path", str),
            directory=_get(document, "program.directory", str),
            args=_get(document, "program.args", dict, {}),
            command=_words(document, "program.command"),
        ),
        python=_get(document, "python", str),
        environment={k: str(v) for k, v in _get(document, "environment", dict, {}).items()},
        max_duration_s=_positive(document, "max_duration_s"),
        tensorboard=_get(document, "tensorboard", bool, False),
        budget_s=_limit(document, "budget_s"),
        idle_s=_limit(document, "idle_s"),
    )
    _check_nodes(cluster)
    return cluster


def _check_nodes(cluster: Cluster) -> None:
    if not cluster.workers:
        raise BadInput("nodes.worker is empty — training needs at least one worker")
    if PS not in cluster.kinds and cluster.ps:
        raise BadInput(f"nodes.ps is not empty — engine {cluster.engine} has no parameter servers")
    shape = ENGINES[cluster.engine]
    alone = len(cluster.workers) == 1 and shape.chief_trains
    if shape.needs_ps and not cluster.ps and not alone:
        raise BadInput("nodes.ps is empty — several workers need a parameter server")
    if (cluster.engine == ONE_COMMAND) != bool(cluster.program.command):
        raise BadInput(f"program.command goes with engine {ONE_COMMAND}, and with no other")
    addresses = [node.address for node in cluster.nodes]
    twice = sorted({address for address in addresses if addresses.count(address) > 1})
    if twice:
        raise BadInput(f"two nodes have one address: {', '.join(twice)} — give each its own")
    loopback = [address for address in addresses if is_loopback(address)]
    if loopback and len(addresses) > 1:
        raise BadInput(
            f"{', '.join(loopback)} is loopback, where each node finds only itself — give the "
            "address on the nodes' network"
        )


def is_loopback(address: str) -> bool:
    """Whether an address, or the one name that always is, means the machine itself."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def _nodes(document: Any, key: str) -> tuple[Node, ...]:
    return tuple(
        Node(_get(item, "name", str), _get(item, "address", str))
        for item in _get(document, key, list, [])
    )


def _words(document: Any, key: str) -> tuple[str, ...]:
    words = _get(document, key, list, [])
    if not all(isinstance(word, str) for word in words):
        raise BadInput(f"{key} is {words!r} — expected words")
    return tuple(words)


def _positive(document: Any, key: str) -> int:
    value = _get(document, key, int)
    if value < 1:
        raise BadInput(f"{key} is {value} — it must be at least 1")
    return int(value)


def _limit(document: Any, key: str) -> int:
    value = _get(document, key, int, 0)
    if value < 0:
        raise BadInput(f"{key} is {value} — it must be at least 1, or 0 for no limit")
    return int(value)


def _choice(document: Any, key: str, known: tuple[str, ...]) -> str:
    value = _get(document, key, str)
    if value not in known:
        raise BadInput(f"{key} is {value!r} — known here: {', '.join(known)}")
    return str(value)


def _get(document: Any, dotted: str, kind: type, default: Any = _MISSING) -> Any:
    """The value under a dotted key, of one type; the default when it is not there."""
    value = document
    for key in dotted.split("."):
        value = value.get(key, _MISSING) if isinstance(value, dict) else _MISSING
    if value is _MISSING:
        if default is _MISSING:
            raise BadInput(f"{dotted} is missing — run role trainer again")
        return default
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise BadInput(f"{dotted} is {value!r} — expected {kind.__name__}")
    return value
