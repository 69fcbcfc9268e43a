"""How the tasks of current TensorFlow's engines are started: keras-ps and mwms."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from tests.unit.train_fakes import cluster

from mayfly_train import launch
from mayfly_train.errors import BadInput
from mayfly_train.launch import Launch
from mayfly_train.machine import Machine
from mayfly_train.topology import parse_task


def look(_address: str) -> Machine:
    """These engines need not know the machine."""
    raise AssertionError


def config(made: Launch) -> dict[str, Any]:
    return json.loads(made.environment["TF_CONFIG"])


@pytest.mark.parametrize("task", ["chief-0", "worker-0", "worker-1", "ps-0"])
def test_every_worker_node_has_a_worker_and_the_coordinator_a_port_of_its_own(task):
    made = config(launch.keras_ps(cluster(), parse_task(task), look))
    assert made["cluster"] == {
        "chief": ["10.0.0.2:2223"],
        "worker": ["10.0.0.2:2222", "10.0.0.3:2222"],
        "ps": ["10.0.0.1:2222"],
    }
    kind, index = task.split("-")
    assert made["task"] == {"type": kind, "index": int(index)}


@pytest.mark.parametrize("task", ["chief-0", "worker-0"])
def test_mirrored_workers_have_a_chief_among_them_and_no_servers(task):
    made = config(launch.mwms(replace(cluster(), ps=()), parse_task(task), look))
    assert made["cluster"] == {"chief": ["10.0.0.2:2222"], "worker": ["10.0.0.3:2222"]}
    assert made["task"]["type"] == task.split("-")[0]


def test_a_mirrored_chief_alone_is_a_cluster_without_workers():
    alone = replace(cluster(), ps=(), workers=cluster().workers[:1])
    made = config(launch.mwms(alone, parse_task("chief-0"), look))
    assert made["cluster"] == {"chief": ["10.0.0.2:2222"]}


@pytest.mark.parametrize(
    ("start", "task", "known"),
    [
        (launch.keras_ps, "worker-2", "it has chief-0, worker-0, worker-1, ps-0"),
        (launch.keras_ps, "evaluator-0", "no task evaluator-0"),
        (launch.mwms, "worker-1", "it has chief-0, worker-0"),
        (launch.mwms, "ps-0", "no task ps-0"),
    ],
)
def test_a_task_that_there_is_not_is_refused(start, task, known):
    with pytest.raises(BadInput, match=known):
        start(cluster(), parse_task(task), look)


@pytest.mark.parametrize("start", [launch.keras_ps, launch.mwms])
def test_all_tasks_run_the_program_with_the_same_words(start):
    words = [start(cluster(), parse_task(task), look).words for task in ("chief-0", "worker-0")]
    assert words[0] == words[1]
    assert words[0][:2] == ["/opt/mayfly/runtime/bin/python", "/opt/p/main.py"]
    assert "--sync" not in words[0]


def test_tf_keras_is_for_mirrored_workers_alone():
    assert (
        "TF_USE_LEGACY_KERAS"
        not in launch.keras_ps(cluster(), parse_task("ps-0"), look).environment
    )
    assert (
        launch.mwms(cluster(), parse_task("chief-0"), look).environment["TF_USE_LEGACY_KERAS"]
        == "1"
    )


@pytest.mark.parametrize("start", [launch.keras_ps, launch.mwms])
def test_a_job_may_set_what_the_launcher_sets(start):
    own = {"TF_ENABLE_ONEDNN_OPTS": "0", "TF_USE_LEGACY_KERAS": "0"}
    made = start(replace(cluster(), environment=own), parse_task("chief-0"), look).environment
    assert made["TF_ENABLE_ONEDNN_OPTS"] == "0"
    assert made.get("TF_USE_LEGACY_KERAS", "0") == "0"
