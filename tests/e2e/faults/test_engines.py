"""Other engines than the estimator on the same nodes: they train, and live through a kill."""

from __future__ import annotations

import time
from typing import Any

import pytest

from faults.test_training import succeeded

STEPS = 300


def serve(lab) -> Any:
    """Start a run of TensorFlow's own servers."""
    program = lab.program("cifar10_server")
    return lab.train(steps=STEPS, engine="tf-server", program=program, program_args={})


def test_servers_train_and_a_killed_worker_comes_back(lab):
    run = serve(lab)
    run.at_step(60)
    run.kill("worker-0")
    status = run.end(300)
    succeeded(status)
    assert status["tasks"]["worker-0"]["attempts"] == 2
    assert status["accuracy"] > 0.5, "far from chance, which is 0.1"
    assert status["accuracy_step"] == status["global_step"]


@pytest.mark.slow
@pytest.mark.parametrize("task", ["ps-0", "chief-0"])
def test_a_server_that_holds_the_step_is_killed(lab, task):
    run = serve(lab)
    run.at_step(100)
    killed = time.monotonic()
    run.kill(task)
    run.wait_until(lambda status: status["tasks"][task]["attempts"] == 2, 60)
    again = time.monotonic() - killed
    status = run.end(300)
    succeeded(status)
    redone = status["samples_processed"] - status["samples_seen"]
    print(f"tf-server, {task}: started again after {again:.0f} s, {redone} samples done twice")
