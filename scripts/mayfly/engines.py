"""What each engine asks of a job, and what it sets aside: tables.

How its tasks are started stands in `mayfly_train.launch`, which kinds of tasks it has in
`mayfly_train.cluster`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

ASYNC, SYNC = "async", "sync"
ESTIMATOR, HOROVOD, COMMAND = "estimator", "horovod", "command"
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
    HOROVOD: Engine(
        ("tensorflow", "torch"),
        (SYNC,),
        ps=False,
        why="has no parameter servers and averages gradients at each step",
        defaults=_without_servers("builtin:mnist_horovod_keras"),
    ),
    "keras-ps": Engine(
        ("tensorflow2",),
        (ASYNC,),
        ps=True,
        why="needs at least one parameter server, and its workers do not wait for each other",
        defaults={
            "trainer": {"program": "builtin:mnist_keras_ps"},
            "data": IDX,
            "tensorboard": False,
        },
    ),
    "mwms": Engine(
        ("tensorflow2",),
        (SYNC,),
        ps=False,
        why="has no parameter servers and averages gradients at each step",
        defaults=_without_servers("builtin:mnist_mwms"),
    ),
    COMMAND: Engine(
        ("torch", "tensorflow"),
        (SYNC, ASYNC),
        ps=None,
        why="runs one command on every node",
        defaults=_without_servers("builtin:mnist_lightning"),
    ),
}
# The engines that each built-in program is written for; engine command runs anything.
PROGRAMS = {
    "builtin:cifar10": (ESTIMATOR,),
    "builtin:cifar10_server": ("tf-server",),
    "builtin:mnist_horovod_keras": ("horovod",),
    "builtin:mnist_horovod_torch": ("horovod",),
    "builtin:mnist_keras_ps": ("keras-ps",),
    "builtin:mnist_mwms": ("mwms",),
    "builtin:mnist_lightning": ("torch",),
    "builtin:cifar10_torch": ("torch",),
}
# What each built-in program can read of what data.preprocess makes; the others read none of it.
TFRECORD, TENSORS = "tfrecord", "tensors"
PREPROCESSED = {
    "builtin:cifar10": TFRECORD,
    "builtin:cifar10_server": TFRECORD,
    "builtin:mnist_horovod_keras": TENSORS,
    "builtin:mnist_horovod_torch": TENSORS,
    "builtin:mnist_lightning": TENSORS,
}
# Programs that are written in another framework than the engine's first.
PROGRAM_FRAMEWORKS = {"builtin:mnist_horovod_torch": "torch"}
# Where a framework does not do for an engine, what is to be known.
FRAMEWORKS = {
    "tensorflow": "TensorFlow 2.15, the last release with tf.estimator",
    "tensorflow2": "TensorFlow 2.21 with Keras 3",
    "torch": "PyTorch 2.13",
}


def image_extras(engine: str, framework: str) -> tuple[str, ...]:
    """What the node image of CLOUD=local needs for a job beside what all nodes have."""
    horovod = (f"horovod-{framework}",) if engine == HOROVOD else ()
    return ("tensorflow2", *horovod) if framework == "tensorflow2" else horovod
