"""Horovod and current TensorFlow's strategies: a kill of each kind of task, on nodes of their own.

Slow: an engine's nodes take minutes, and its part of the node image once more (Horovod for PyTorch
is compiled for it). What happened is printed, for docs/engines.md.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from faults.engines import all_ranks_agree
from faults.lab import Lab, deploy

pytestmark = pytest.mark.slow
BATCH = 32
STEPS = 6000
# Nodes: the engine of their job, what is set beside it, and how many workers there are.
HOROVOD_TORCH = ("--set", "trainer.program=builtin:mnist_horovod_torch")
NODES: dict[str, tuple[str, tuple[str, ...], int]] = {
    "horovod": ("horovod", (), 2),
    "horovod-torch": ("horovod", HOROVOD_TORCH, 2),
    "horovod-4": ("horovod", (), 4),
    "keras-ps": ("keras-ps", (), 2),
    "mwms": ("mwms", (), 2),
}
PROGRAMS = {
    "horovod": "mnist_horovod_keras",
    "horovod-torch": "mnist_horovod_torch",
    "horovod-4": "mnist_horovod_keras",
    "keras-ps": "mnist_keras_ps",
    "mwms": "mnist_mwms",
}
KILLS = [
    ("horovod", "worker-0"),
    ("horovod", "chief-0"),
    ("horovod-torch", "worker-0"),
    ("keras-ps", "worker-1"),
    ("keras-ps", "worker-0"),
    ("keras-ps", "ps-0"),
    ("keras-ps", "chief-0"),
    ("mwms", "worker-0"),
    ("mwms", "chief-0"),
]


@pytest.fixture(scope="module")
def labs(platform, bucket) -> Iterator[dict[str, Lab]]:
    """The nodes that are tested now; there is room for those of one kind at a time."""
    made: dict[str, Lab] = {}
    yield made
    for lab in made.values():
        lab.destroy()


def lab_of(labs: dict[str, Lab], nodes: str, platform, bucket) -> Lab:
    if nodes not in labs:
        for other in list(labs):
            labs.pop(other).destroy()
        engine, settings, workers = NODES[nodes]
        labs[nodes] = deploy(platform, bucket, engine, *settings, workers=workers)
    return labs[nodes]


def test_four_ranks_end_with_equal_weights(labs, platform, bucket):
    lab = lab_of(labs, "horovod-4", platform, bucket)
    run = lab.train(steps=900, mode="sync", program=lab.program(PROGRAMS["horovod-4"]))
    status = run.end(600)
    assert status["state"] == "succeeded", status["error"]
    assert status["samples_seen"] == status["samples_processed"] == 900 * BATCH
    assert status["accuracy"] > 0.75
    all_ranks_agree(run, 4)


def test_horovod_goes_on_without_a_node(labs, platform, bucket):
    lab = lab_of(labs, "horovod", platform, bucket)
    run = lab.train(steps=STEPS, mode="sync", program=lab.program(PROGRAMS["horovod"]))
    run.at_step(1000)
    lab.stop_for_good("worker-1", "mayfly-task@worker-0")
    status = run.end(600)
    assert status["state"] == "succeeded", status["error"]
    assert status["global_step"] == STEPS


@pytest.mark.parametrize(("nodes", "task"), KILLS)
def test_a_task_is_killed(labs, nodes, task, platform, bucket):
    lab = lab_of(labs, nodes, platform, bucket)
    program = lab.program(PROGRAMS[nodes])
    run = lab.train(steps=STEPS, mode=lab.document["mode"], program=program)
    run.at_step(1000)
    run.kill(task)
    status = run.end(600)
    assert status["state"] == "succeeded", status["error"]
    assert status["samples_seen"] == status["global_step"] * BATCH
    assert status["global_step"] >= STEPS
    assert status["accuracy"] > 0.8
    redone = (status["samples_processed"] - status["samples_seen"]) // BATCH
    attempts = {name: one["attempts"] for name, one in status["tasks"].items()}
    print(json.dumps({"engine": nodes, "killed": task, "redone": redone, "attempts": attempts}))
