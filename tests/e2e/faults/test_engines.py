"""Other engines than the estimator on the same nodes: they train, and live through a kill."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from faults import frameworks
from faults.engines import all_ranks_agree, program_of
from faults.kills import kill_and_tell
from faults.test_training import succeeded

STEPS = 600  # so many that a fast machine is not done before the kill


def serve(lab) -> Any:
    """Start a run of TensorFlow's own servers."""
    program = lab.program("cifar10_server")
    return lab.train(steps=STEPS, engine="tf-server", program=program, program_args={})


def test_servers_train_and_a_killed_worker_comes_back(lab):
    run = serve(lab)
    run.at_told_step(60)
    status = kill_and_tell(run, "tf-server", "worker-0")
    succeeded(status)
    assert status["tasks"]["worker-0"]["attempts"] == 2
    assert status["accuracy"] > 0.5, "far from chance, which is 0.1"
    # The other worker may have told a step more by then.
    assert STEPS <= status["accuracy_step"] <= status["global_step"]


@pytest.mark.slow
@pytest.mark.parametrize("task", ["ps-0", "chief-0"])
def test_a_server_that_holds_the_step_is_killed(lab, task):
    run = serve(lab)
    run.at_told_step(100)
    status = kill_and_tell(run, "tf-server", task)
    succeeded(status)
    assert status["tasks"][task]["attempts"] == 2


# Engines that train on IDX files: built-in program and framework. A framework is installed
# once, so engines of the same one stand together.
BUILT_IN = {
    "horovod": ("mnist_horovod_keras", "tensorflow"),
    "keras-ps": ("mnist_keras_ps", "tensorflow2"),
    "mwms": ("mnist_mwms", "tensorflow2"),
    "command": ("mnist_lightning", "torch"),
    "torch": ("mnist_lightning", "torch"),
}
SLOW = ("command", "torch")  # torch is installed for them, which takes two minutes


@pytest.fixture(scope="module")
def idx(lab) -> Iterator[str]:
    """The IDX files' directory in the lab's HDFS; the lab has its own framework at the end."""
    yield frameworks.stage_idx(lab)
    frameworks.put_back(lab)


@pytest.mark.parametrize(
    "engine", [pytest.param(e, marks=pytest.mark.slow if e in SLOW else ()) for e in BUILT_IN]
)
def test_an_engine_trains(lab, idx, engine):
    program, framework = BUILT_IN[engine]
    frameworks.install(lab, framework, horovod=framework if engine == "horovod" else "")
    members = lab.document["nodes"]
    run = lab.train(
        steps=900,
        mode="async" if engine == "keras-ps" else "sync",
        engine=engine,
        data_dir=idx,
        nodes=members if engine == "keras-ps" else {**members, "ps": []},
        program=program_of(lab, engine, program),
        program_args={},
    )
    status = run.end(300)
    succeeded(status)
    assert status["accuracy"] > 0.75, "900 steps of 32; chance is 0.1"
    assert status["samples_seen"] == status["samples_processed"]
    assert run.read("manifest.json"), "the model is whole in the bucket"
    if engine == "horovod":
        all_ranks_agree(run, 2)
