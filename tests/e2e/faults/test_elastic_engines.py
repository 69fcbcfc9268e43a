"""Horovod and current TensorFlow's strategies: a kill of each kind of task, on nodes of their own.

Slow: an engine's nodes take minutes, and its part of the node image once more. What happened is
printed, for docs/engines.md.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from faults.lab import Lab, deploy

pytestmark = pytest.mark.slow
BATCH = 32
STEPS = 6000
PROGRAMS = {
    "horovod": "mnist_horovod_keras",
    "keras-ps": "mnist_keras_ps",
    "mwms": "mnist_mwms",
}
KILLS = [
    ("horovod", "worker-0"),
    ("horovod", "chief-0"),
    ("keras-ps", "worker-1"),
    ("keras-ps", "worker-0"),
    ("keras-ps", "ps-0"),
    ("keras-ps", "chief-0"),
    ("mwms", "worker-0"),
    ("mwms", "chief-0"),
]


@pytest.fixture(scope="module")
def labs(platform, bucket) -> Iterator[dict[str, Lab]]:
    """The nodes of the engine that is tested now; there is room for one at a time."""
    made: dict[str, Lab] = {}
    yield made
    for lab in made.values():
        lab.destroy()


def lab_of(labs: dict[str, Lab], engine: str, platform, bucket) -> Lab:
    if engine not in labs:
        for other in list(labs):
            labs.pop(other).destroy()
        labs[engine] = deploy(platform, bucket, engine)
    return labs[engine]


@pytest.mark.parametrize(("engine", "task"), KILLS)
def test_a_task_is_killed(labs, engine, task, platform, bucket):
    lab = lab_of(labs, engine, platform, bucket)
    program = lab.program(PROGRAMS[engine])
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
    print(json.dumps({"engine": engine, "killed": task, "redone": redone, "attempts": attempts}))


def test_horovod_goes_on_without_a_node(labs, platform, bucket):
    lab = lab_of(labs, "horovod", platform, bucket)
    run = lab.train(steps=STEPS, mode="sync", program=lab.program(PROGRAMS["horovod"]))
    run.at_step(1000)
    lab.stop_for_good("worker-1", "mayfly-task@worker-0")
    status = run.end(600)
    assert status["state"] == "succeeded", status["error"]
    assert status["global_step"] == STEPS
