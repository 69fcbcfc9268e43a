"""What each engine asks of a job, and what it sets aside: a table, and nothing that decides.

How its tasks are started stands in `mayfly_train.launch`, which kinds of tasks it has in
`mayfly_train.cluster`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

ASYNC, SYNC = "async", "sync"
ESTIMATOR, COMMAND = "estimator", "command"
IDX = {"source": "datasets/fashion-mnist-idx/", "format": "files"}


@dataclass(frozen=True)
class Engine:
    """One engine.

    `frameworks` are those that its programs may be written in, the first unless the job says
    otherwise; `modes` the same of modes. `ps` says whether it has parameter servers: True: at least
    one, False: none, None: as many as the job wants. `defaults` go below a job file that chooses
    the engine and no more, `why` completes the sentence of a refusal.
    """

    frameworks: tuple[str, ...]
    modes: tuple[str, ...]
    ps: bool | None
    why: str
    defaults: dict[str, Any] = field(default_factory=dict)


def _without_servers(program: str) -> dict[str, Any]:
    """What programs on IDX files without parameter servers want; none of ours writes events."""
    return {
        "nodes": {"ps": {"count": 0}},
        "trainer": {"mode": SYNC, "program": program},
        "data": IDX,
        "tensorboard": False,
    }


ENGINES = {
    ESTIMATOR: Engine(
        ("tensorflow",),
        (ASYNC, SYNC),
        ps=True,
        why="needs at least one parameter server",
    ),
    "torch": Engine(
        ("torch",),
        (SYNC,),
        ps=False,
        why="has no parameter servers and averages gradients at each step",
        defaults=_without_servers("builtin:mnist_lightning"),
    ),
    "tf-server": Engine(
        ("tensorflow",),
        (ASYNC, SYNC),
        ps=True,
        why="needs at least one parameter server",
        defaults={"trainer": {"program": "builtin:cifar10_server"}},
    ),
    COMMAND: Engine(
        ("torch", "tensorflow"),
        (SYNC, ASYNC),
        ps=None,
        why="runs one command on every node",
        defaults=_without_servers("builtin:mnist_lightning"),
    ),
}
LATER = ("horovod", "keras-ps", "mwms")

# The engines that each built-in program is written for; engine command runs anything.
PROGRAMS = {
    "builtin:cifar10": (ESTIMATOR,),
    "builtin:cifar10_server": ("tf-server",),
    "builtin:mnist_lightning": ("torch",),
    "builtin:cifar10_torch": ("torch",),
}
# Where a framework does not do for an engine, what is to be known.
FRAMEWORKS = {
    "tensorflow": "TensorFlow 2.15, the last release with tf.estimator",
    "torch": "PyTorch 2.13",
}
