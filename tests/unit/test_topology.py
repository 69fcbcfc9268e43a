"""The topology document and what follows from it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from tests.unit.train_fakes import cluster, document

from mayfly_train import launch
from mayfly_train.cluster import ENGINES, load_cluster, parse_cluster
from mayfly_train.errors import BadInput
from mayfly_train.horovod_launch import parse_args
from mayfly_train.launch import program
from mayfly_train.machine import Machine
from mayfly_train.topology import (
    node_of,
    options,
    parse_task,
    placement,
    tasks_of,
    tf_config,
)

CLUSTER = {
    "chief": ["10.0.0.2:2222"],
    "worker": ["10.0.0.3:2222"],
    "ps": ["10.0.0.1:2222"],
}


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        ("ps-0", {"type": "ps", "index": 0}),
        ("chief-0", {"type": "chief", "index": 0}),
        ("worker-0", {"type": "worker", "index": 0}),
        ("evaluator-0", {"type": "evaluator", "index": 0}),
    ],
)
def test_tf_config_has_the_cluster_and_the_task_but_no_evaluator_in_it(task, expected):
    config = tf_config(cluster(), parse_task(task))
    assert config["cluster"] == CLUSTER
    assert config["task"] == expected


def test_one_worker_makes_no_worker_job():
    nodes = {"ps": document()["nodes"]["ps"], "worker": [{"name": "w", "address": "10.0.0.9"}]}
    config = tf_config(cluster(nodes=nodes), parse_task("chief-0"))
    assert config["cluster"] == {"ps": ["10.0.0.1:2222"], "chief": ["10.0.0.9:2222"]}


def test_each_node_has_its_tasks():
    assert [str(task) for task in tasks_of(cluster(), "n1")] == ["ps-0"]
    assert [str(task) for task in tasks_of(cluster(), "n2")] == ["chief-0", "evaluator-0"]
    assert [str(task) for task in tasks_of(cluster(), "n3")] == ["worker-0"]
    assert len(placement(cluster())) == 4


def test_unknown_node_and_task_are_named():
    with pytest.raises(BadInput, match="no node 'n9'"):
        tasks_of(cluster(), "n9")
    with pytest.raises(BadInput, match="no task worker-1 in this cluster"):
        node_of(cluster(), parse_task("worker-1"))


@pytest.mark.parametrize("text", ["", "chief", "chief-", "master-0", "ps-x", "ps--1"])
def test_bad_task_names(text):
    with pytest.raises(BadInput, match="unknown task"):
        parse_task(text)


def test_command_line_of_the_contract():
    words = program(cluster(mode="sync"))
    assert words == [
        "/opt/p/main.py",
        "--data-dir",
        "hdfs://10.0.0.1:9000/mayfly/data",
        "--job-dir",
        "hdfs://10.0.0.1:9000/mayfly/demo/model",
        "--train-steps",
        "1000",
        "--sync",
        "--batch-size",
        "128",
    ]
    assert "--sync" not in program(cluster())


def test_options():
    args = {"a_b": 1, "flag": True, "no": False, "none": None, "many": ["x", 2], "f": 0.5}
    assert options(args) == ["--a-b", "1", "--flag", "--many", "x", "--many", "2", "--f", "0.5"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 2}, "version is 2"),
        ({"engine": "mpi"}, "engine is 'mpi'"),
        ({"mode": "both"}, "mode is 'both' — known here: async, sync"),
        ({"steps": 0}, "steps is 0"),
        ({"steps": "many"}, "steps is 'many' — expected int"),
        ({"steps": True}, "steps is True — expected int"),
        ({"namenode": {"rpc": "hdfs://x"}}, "namenode.http is missing"),
        ({"nodes": {"ps": [], "worker": []}}, "nodes.worker is empty"),
        ({"nodes": {"worker": document()["nodes"]["worker"]}}, "nodes.ps is empty"),
        ({"nodes": {"ps": [{"name": "n"}], "worker": []}}, "address is missing"),
        (
            {"nodes": {"ps": document()["nodes"]["ps"], "worker": document()["nodes"]["ps"]}},
            "two nodes have one address: 10.0.0.1",
        ),
    ],
)
def test_a_wrong_document_is_refused_with_its_key(changes, message):
    with pytest.raises(BadInput, match=message):
        parse_cluster(document(**changes))


def test_load_names_the_file(tmp_path):
    path = tmp_path / "cluster.json"
    with pytest.raises(BadInput, match=r"cannot read .*cluster\.json"):
        load_cluster(path)
    path.write_text("{")
    with pytest.raises(BadInput, match=r"cluster\.json is not JSON"):
        load_cluster(path)
    path.write_text(json.dumps(document(steps=-1)))
    with pytest.raises(BadInput, match=r"cluster\.json: steps is -1"):
        load_cluster(path)
    path.write_text(json.dumps(document()))
    assert load_cluster(path).run_uri == "s3://models/demo-261128-120000-ab12"


# --- engine torch -----------------------------------------------------------------------------

TORCH = {"engine": "torch", "mode": "sync", "nodes": {"worker": document()["nodes"]["worker"]}}


SMALL = Machine("eth1", gpus=0, cores=2)


def start(task: str, machine: Machine = SMALL) -> tuple[str, dict]:
    """The command line and the environment of a task on a machine."""
    made = launch.ENGINES["torch"].launch(cluster(**TORCH), parse_task(task), lambda _: machine)
    return " ".join(made.words), dict(made.environment)


def test_every_engine_is_known_to_both_tables():
    assert set(launch.ENGINES) == set(ENGINES)


def test_torch_has_a_task_on_each_worker_and_no_other():
    placed = placement(cluster(**TORCH))
    assert {str(task): node.name for task, node in placed.items()} == {
        "chief-0": "n2",
        "worker-0": "n3",
    }
    with pytest.raises(BadInput, match="no parameter servers"):
        cluster(engine="torch")


def test_torchruns_nodes_meet_at_the_chief_which_keeps_the_store():
    words, _ = start("chief-0")
    assert "-m torch.distributed.run --nnodes 2 --nproc-per-node 1" in words
    assert "--rdzv-backend c10d --rdzv-endpoint 10.0.0.2:2222" in words
    assert "--rdzv-id demo-261128-120000-ab12 --max-restarts 3" in words
    assert "is_host=true" in words and "--local-addr 10.0.0.2" in words
    words, _ = start("worker-0")
    assert "--rdzv-endpoint 10.0.0.2:2222" in words
    assert "is_host=false" in words and "--local-addr 10.0.0.3" in words
    assert words.endswith(
        "/opt/p/main.py --data-dir hdfs://10.0.0.1:9000/mayfly/data "
        "--job-dir hdfs://10.0.0.1:9000/mayfly/demo/model --train-steps 1000 --batch-size 128"
    )


def test_a_machines_gpus_cores_and_interface_decide_the_processes():
    _, environment = start("worker-0")
    assert environment == {
        "GLOO_SOCKET_IFNAME": "eth1",
        "NCCL_SOCKET_IFNAME": "eth1",
        "OMP_NUM_THREADS": "2",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "50",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    words, environment = start("worker-0", Machine("ib0", gpus=4, cores=16))
    assert "--nproc-per-node 4" in words
    assert environment["OMP_NUM_THREADS"] == "4"


def test_tasks_of_the_estimator_need_no_look_at_the_machine():
    def look(_address: str) -> Machine:
        raise AssertionError

    made = launch.ENGINES["estimator"].launch(cluster(), parse_task("evaluator-0"), look)
    assert made.words[:4] == ["nice", "-n", "10", "/opt/mayfly/runtime/bin/python"]
    config = json.loads(made.environment["TF_CONFIG"])
    assert config["task"] == {"type": "evaluator", "index": 0}
    assert made.environment["TF_ENABLE_ONEDNN_OPTS"] == "1"


def test_a_job_may_turn_onednn_off():
    job = replace(cluster(), environment={"TF_ENABLE_ONEDNN_OPTS": "0"})
    made = launch.ENGINES["estimator"].launch(job, parse_task("worker-0"), lambda _: None)
    assert made.environment["TF_ENABLE_ONEDNN_OPTS"] == "0"


# --- engine horovod ---------------------------------------------------------------------------


def start_horovod(task: str, machine: Machine = SMALL, **changes) -> tuple[str, dict]:
    """The launcher's command line and environment of a task on a machine."""
    job = replace(cluster(**TORCH), **changes)
    made = launch.horovod(job, parse_task(task), lambda _: machine)
    return " ".join(made.words), dict(made.environment)


def test_every_launcher_of_horovod_knows_all_nodes_in_rank_order_and_itself():
    for task, name in (("chief-0", "n2"), ("worker-0", "n3")):
        words, _ = start_horovod(task)
        assert words.startswith("/opt/mayfly/runtime/bin/python /")
        assert "horovod_launch.py --run demo-261128-120000-ab12" in words
        assert f"--node n2=10.0.0.2 --node n3=10.0.0.3 --me {name} --port 2222 --slots 1" in words
        assert "--restarts 3 --assemble 600 --save 50 --min-nodes 1" in words
        assert "--memory /var/lib/mayfly/tasks/demo-261128-120000-ab12/horovod.json" in words
        assert words.endswith(
            "-- /opt/mayfly/runtime/bin/python /opt/p/main.py "
            "--data-dir hdfs://10.0.0.1:9000/mayfly/data "
            "--job-dir hdfs://10.0.0.1:9000/mayfly/demo/model --train-steps 1000 --batch-size 128"
        )


def test_the_launcher_takes_the_command_line_that_it_is_given():
    words, _ = start_horovod("worker-0", Machine("ib0", gpus=4, cores=16))
    args = parse_args(words.split(" ")[2:])
    assert args.nodes == {"n2": "10.0.0.2", "n3": "10.0.0.3"}
    assert (args.me, args.port, args.slots, args.min_nodes) == ("n3", 2222, 4, 1)
    assert (args.restarts, args.assemble, args.save) == (3, 600.0, 50.0)
    assert args.words[1] == "/opt/p/main.py"


def test_horovods_ranks_use_the_interface_and_share_the_cores():
    _, environment = start_horovod("worker-0", Machine("ib0", gpus=4, cores=16))
    assert environment == {
        "HOROVOD_GLOO_IFACE": "ib0",
        "NCCL_SOCKET_IFNAME": "ib0",
        "OMP_NUM_THREADS": "4",
        "TF_ENABLE_ONEDNN_OPTS": "1",
    }


def test_a_job_may_want_more_nodes_to_go_on_with():
    words, _ = start_horovod("chief-0", environment={"MAYFLY_MIN_NODES": "2"})
    assert "--min-nodes 2" in words
