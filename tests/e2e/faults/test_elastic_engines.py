"""Engines on nodes of their own, where each kind of task, and ranks, are killed.

Slow: an engine's nodes take minutes, and its part of the node image once more (Horovod for PyTorch
is compiled for it). What happened is left for the table in docs/engines.md (see `kills`).

MAYFLY_TEST_LAB may name a run of one engine whose kept nodes are used and left: choose the cases
that fit them by `-k`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from machine import nodes

from faults.engines import all_ranks_agree, program_of
from faults.kills import RANK, TASK, kill_and_tell
from faults.lab import Lab, attach, deploy

pytestmark = pytest.mark.slow
BATCH = 32
STEPS = 6000
HOROVOD_TORCH = ("--set", "trainer.program=builtin:mnist_horovod_torch")
# Nodes: the engine of their job, what is set beside it, and how many workers there are.
NODES: dict[str, tuple[str, tuple[str, ...], int]] = {
    "horovod": ("horovod", (), 2),
    "horovod-4": ("horovod", (), 4),
    "horovod-torch": ("horovod", HOROVOD_TORCH, 2),
    "keras-ps": ("keras-ps", (), 2),
    "mwms": ("mwms", (), 2),
    "torch": ("torch", (), 2),
}


@dataclass(frozen=True)
class Case:
    """What is trained on which nodes, and from which step on it may be killed.

    Lightning's program saves only at the end of an epoch, which is after 1,875 steps.
    """

    nodes: str
    engine: str
    program: str
    at_step: int = 1000


HOROVOD = Case("horovod", "horovod", "mnist_horovod_keras")
FOUR = Case("horovod-4", "horovod", "mnist_horovod_keras")
CASES = {
    "horovod": HOROVOD,
    "horovod (PyTorch)": Case("horovod-torch", "horovod", "mnist_horovod_torch"),
    "keras-ps": Case("keras-ps", "keras-ps", "mnist_keras_ps"),
    "mwms": Case("mwms", "mwms", "mnist_mwms"),
    "torch": Case("torch", "torch", "mnist_lightning", at_step=2500),
    "command": Case("torch", "command", "mnist_lightning", at_step=2500),
}
# Those of one kind of nodes stand together.
KILLS = [
    ("horovod", "worker-0", TASK),
    ("horovod", "chief-0", TASK),
    ("horovod", "worker-0", RANK),
    ("horovod", "chief-0", RANK),
    ("horovod (PyTorch)", "worker-0", TASK),
    ("keras-ps", "worker-1", TASK),
    ("keras-ps", "worker-0", TASK),
    ("keras-ps", "ps-0", TASK),
    ("keras-ps", "chief-0", TASK),
    ("mwms", "worker-0", TASK),
    ("mwms", "chief-0", TASK),
    ("torch", "worker-0", TASK),
    ("torch", "chief-0", TASK),
    ("torch", "worker-0", RANK),
    ("torch", "chief-0", RANK),
    ("command", "worker-0", TASK),
    ("command", "chief-0", TASK),
]


@pytest.fixture(scope="module")
def lab_of(platform, bucket) -> Iterator[Callable[[Case], Lab]]:
    """A function to a case's nodes; there is room for those of one kind at a time."""
    if kept := os.environ.get("MAYFLY_TEST_LAB"):
        lab = attach(platform, bucket, kept, nodes(platform))
        yield lambda _: lab
        return
    made: dict[str, Lab] = {}

    def nodes_of(case: Case) -> Lab:
        if case.nodes not in made:
            for other in list(made):
                made.pop(other).destroy()
            engine, settings, workers = NODES[case.nodes]
            made[case.nodes] = deploy(platform, bucket, engine, *settings, workers=workers)
        return made[case.nodes]

    yield nodes_of
    for lab in made.values():
        lab.destroy()


def start(lab: Lab, case: Case, steps: int):
    """Begin a training of the case."""
    program = program_of(lab, case.engine, case.program)
    return lab.train(steps, lab.document["mode"], engine=case.engine, program=program)


def test_four_ranks_end_with_equal_weights(lab_of):
    run = start(lab_of(FOUR), FOUR, steps=900)
    status = run.end(600)
    assert status["state"] == "succeeded", status["error"]
    assert status["samples_seen"] == status["samples_processed"] == 900 * BATCH
    assert status["accuracy"] > 0.75
    all_ranks_agree(run, 4)


def test_horovod_goes_on_without_a_node(lab_of):
    lab = lab_of(HOROVOD)
    run = start(lab, HOROVOD, STEPS)
    run.at_step(HOROVOD.at_step)
    lab.stop_for_good("worker-1", "mayfly-task@worker-0")
    status = run.end(600)
    assert status["state"] == "succeeded", status["error"]
    assert status["global_step"] == STEPS


@pytest.mark.parametrize(("engine", "task", "what"), KILLS)
def test_a_task_is_killed(lab_of, engine, task, what):
    case = CASES[engine]
    run = start(lab_of(case), case, STEPS)
    run.at_step(case.at_step)
    status = kill_and_tell(run, engine, task, what)
    assert status["state"] == "succeeded", status["error"]
    assert status["samples_seen"] == status["global_step"] * BATCH
    assert status["global_step"] >= STEPS
    assert status["accuracy"] > 0.8


def test_a_chief_that_dies_when_all_is_trained_ends_the_run_alone(lab_of):
    """The others have left by then, or leave: nobody waits for them."""
    case = CASES["mwms"]
    run = start(lab_of(case), case, steps=300)
    run.at_told_step(200)
    run.kill_once_told("chief-0", "evaluated_step=300")
    status = run.end(300)
    assert status["state"] == "succeeded", status["error"]
    assert status["tasks"]["chief-0"]["attempts"] == 2
    assert status["global_step"] == 300
    assert status["accuracy"] > 0.7
