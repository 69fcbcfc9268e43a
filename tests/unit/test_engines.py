"""Every engine, on clusters of every shape: who does what, and what each process is told."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tests.unit.train_fakes import cluster, document

from mayfly import engines
from mayfly.explain import explain_job
from mayfly.spec import load_spec
from mayfly_train import launch, topology
from mayfly_train.cluster import CHIEF, ENGINES, PS, WORKER, Cluster, parse_cluster
from mayfly_train.errors import BadInput
from mayfly_train.explain import as_text, explain
from mayfly_train.launch import Launch
from mayfly_train.machine import Machine

ROOT = Path(__file__).resolve().parents[2]
SHAPES = [(0, 1), (1, 1), (1, 2), (2, 5), (3, 17), (0, 4), (1, 200)]
MACHINE = Machine("eth1", gpus=0, cores=2)


def made(engine: str, ps: int, workers: int, **changes) -> Cluster | None:
    """A cluster of this shape, None when the engine has none."""
    shape = ENGINES[engine]
    if (ps and PS not in shape.kinds) or (shape.needs_ps and not ps):
        return None
    words = ["train", "--fast"] if engine == "command" else []
    return cluster(
        engine=engine,
        nodes={
            "ps": [{"name": f"p{i}", "address": f"10.1.0.{i}"} for i in range(ps)],
            "worker": [{"name": f"w{i}", "address": f"10.2.0.{i}"} for i in range(workers)],
        },
        program={**document()["program"], "command": words},
        **changes,
    )


ALL = [
    pytest.param(found, id=f"{engine}-{ps}-{workers}")
    for engine in ENGINES
    for ps, workers in SHAPES
    if (found := made(engine, ps, workers))
]


def launched(job: Cluster, machine: Machine = MACHINE) -> dict[str, Launch]:
    """What every task of a cluster is started with."""
    start = launch.ENGINES[job.engine].launch
    return {str(task): start(job, task, lambda _: machine) for task in topology.placement(job)}


# --- what holds for all ------------------------------------------------------------------------


@pytest.mark.parametrize("job", ALL)
def test_every_task_stands_exactly_once_and_indices_are_dense(job):
    placed = topology.placement(job)
    of_nodes = [task for node in job.nodes for task in topology.tasks_of(job, node.name)]
    assert sorted(map(str, of_nodes)) == sorted(map(str, placed))
    for kind in job.kinds:
        indices = sorted(task.index for task in placed if task.kind == kind)
        assert indices == list(range(len(indices)))
    beside = 0 if ENGINES[job.engine].chief_trains else 1
    assert sum(task.kind in (CHIEF, WORKER) for task in placed) == len(job.workers) + beside


@pytest.mark.parametrize("job", ALL)
def test_every_node_has_a_rank_of_its_own_and_the_chief_the_first(job):
    ranks = {topology.node_rank(job, task): node for task, node in topology.placement(job).items()}
    assert sorted(ranks) == list(range(len(job.nodes)))
    assert ranks[0] == job.workers[0]


@pytest.mark.parametrize("job", ALL)
def test_all_tasks_see_the_same_cluster_and_no_loopback(job):
    seen = set()
    for started in launched(job).values():
        text = " ".join([*started.words, *started.environment.values()])
        assert not re.search(r"\b127\.|localhost", text)
        config = json.loads(started.environment.get("TF_CONFIG", "{}")).get("cluster")
        hosts = [started.environment.get(name) for name in ("PS_HOSTS", "WORKER_HOSTS")]
        size = started.environment.get("WORLD_SIZE")
        seen.add(json.dumps([config, hosts, size], sort_keys=True))
    assert len(seen) == 1


@pytest.mark.parametrize("job", ALL)
def test_no_two_tasks_are_started_as_the_same_one(job):
    starts = [json.dumps([s.words, dict(s.environment)]) for s in launched(job).values()]
    assert len(set(starts)) == len(starts) or job.engine == "torch"  # torchrun gives out ranks


@pytest.mark.parametrize("address", ["127.0.1.1", "::1", "localhost"])
def test_loopback_is_refused_once_there_are_two_nodes(address):
    alone = {"worker": [{"name": "w0", "address": address}]}
    assert parse_cluster(document(engine="torch", nodes=alone)).workers[0].address == address
    two = {"worker": [{"name": "w0", "address": "10.0.0.1"}, {"name": "w1", "address": address}]}
    with pytest.raises(BadInput, match="is loopback, where each node finds only itself"):
        parse_cluster(document(engine="torch", nodes=two))


# --- engine tf-server --------------------------------------------------------------------------


def test_scripts_older_than_estimator_are_told_in_their_own_flags():
    started = launched(made("tf-server", 1, 2))
    words = " ".join(started["worker-0"].words)
    assert "--ps_hosts 10.1.0.0:2222 --worker_hosts 10.2.0.0:2222,10.2.0.1:2222" in words
    assert "--job_name worker --task_index 1" in words
    assert words.endswith("--train_steps 1000 --batch_size 128")
    assert "--job_name worker --task_index 0" in " ".join(started["chief-0"].words)
    assert "--job_name ps --task_index 0" in " ".join(started["ps-0"].words)
    assert "--sync" in launched(made("tf-server", 1, 2, mode="sync"))["chief-0"].words


def test_they_find_the_same_in_a_file_and_in_the_environment():
    started = launched(made("tf-server", 2, 3))["worker-1"]
    assert started.settings["worker_hosts"] == [f"10.2.0.{i}:2222" for i in range(3)]
    assert (started.settings["job_name"], started.settings["task_index"]) == ("worker", 2)
    assert started.environment["PS_HOSTS"] == "10.1.0.0:2222,10.1.0.1:2222"
    assert (started.environment["JOB_NAME"], started.environment["TASK_INDEX"]) == ("worker", "2")


# --- engine command ----------------------------------------------------------------------------


def test_a_command_runs_on_every_node_with_the_cluster_under_known_names():
    started = launched(made("command", 1, 2), Machine("ib0", gpus=4, cores=16))
    assert {tuple(one.words) for one in started.values()} == {("train", "--fast")}
    worker, ps = started["worker-0"].environment, started["ps-0"].environment
    assert (worker["RANK"], worker["NODE_RANK"], worker["WORLD_SIZE"]) == ("1", "1", "3")
    assert ps["RANK"] == "2", "workers come first"
    assert (worker["MASTER_ADDR"], worker["MASTER_PORT"]) == ("10.2.0.0", "2222")
    assert worker["NPROC_PER_NODE"] == worker["SKYPILOT_NUM_GPUS_PER_NODE"] == "4"
    assert worker["SKYPILOT_NODE_IPS"].splitlines() == ["10.2.0.0", "10.2.0.1", "10.1.0.0"]
    assert worker["HOROVOD_HOSTS"] == "10.2.0.0:1,10.2.0.1:1,10.1.0.0:1"
    assert worker["MAYFLY_INTERFACE"] == "ib0"
    assert worker["PATH"].startswith("/opt/mayfly/runtime/bin:/usr/local/sbin")


def test_every_name_that_a_command_finds_is_documented():
    text = (ROOT / "docs/engines.md").read_text()
    names = launched(made("command", 1, 2))["chief-0"].environment
    assert [name for name in names if f"`{name}`" not in text] == []


def test_a_command_without_its_engine_and_the_engine_without_one():
    with pytest.raises(BadInput, match="program.command goes with engine command"):
        cluster(program={**document()["program"], "command": ["x"]})
    with pytest.raises(BadInput, match="program.command goes with engine command"):
        cluster(engine="command")


# --- explain, and the control side's table ------------------------------------------------------


def test_both_sides_know_the_same_engines():
    assert set(engines.ENGINES) == set(ENGINES)
    for name, engine in engines.ENGINES.items():
        shape = ENGINES[name]
        assert (engine.ps is False) == (PS not in shape.kinds)
        assert (engine.ps is True) == shape.needs_ps


def test_every_builtin_program_is_in_the_table():
    files = {f"builtin:{path.stem}" for path in (ROOT / "training/programs").glob("*.py")}
    assert set(engines.PROGRAMS) == files


@pytest.mark.parametrize("engine", engines.ENGINES)
def test_each_engines_own_job_is_explained(engine):
    spec = load_spec(None, {"engine": engine, "cloud": "local"}, {})
    document = explain_job(spec, None)
    tasks = [task["task"] for task in document["tasks"]]
    assert "chief-0" in tasks and len(tasks) >= spec.count("worker")
    text = as_text(document["tasks"])
    assert "192.0.2.1" in text
    assert spec.trainer.program.removeprefix("builtin:") in text
    assert str(ROOT) not in text  # paths are those of a node


def test_what_is_explained_is_what_is_started():
    job = made("estimator", 1, 2)
    (found,) = explain(job, [topology.parse_task("worker-0")], lambda _: MACHINE)
    started = launched(job)["worker-0"]
    assert found["command"] == started.words
    assert found["environment"].items() >= started.environment.items()
    assert found["node"] == "w1"
