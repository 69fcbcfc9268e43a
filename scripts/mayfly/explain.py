"""What a job's training processes would be given, before there is any node."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

from mayfly.engines import COMMAND
from mayfly.errors import UserError
from mayfly.juicefs import MODEL_DIR
from mayfly.role_vars import data_dir
from mayfly.spec import JUICEFS, ClusterSpec
from mayfly_train.cluster import Cluster, parse_cluster
from mayfly_train.errors import BadInput
from mayfly_train.explain import chosen, explain
from mayfly_train.machine import Machine

# Addresses of documentation (RFC 5737): nobody takes them for a node's.
NETWORK = "192.0.2"
MOST_NODES = 250
CORES = 2
RUN = "a-run"
# Where role agent installs the package, with Debian 12's Python.
PACKAGE = PurePosixPath("/opt/mayfly/agent/lib/python3.11/site-packages/mayfly_train")


def explain_job(spec: ClusterSpec, task: str | None) -> dict[str, Any]:
    """What each task, or one, would be given. Raises UserError when the job has no such task."""
    count = spec.count("ps") + spec.count("worker")
    if count > MOST_NODES:
        raise UserError(
            f"{count} nodes are too many to explain",
            f"give fewer than {MOST_NODES}: what a task gets follows the same rules",
        )
    cluster = example(spec)
    try:
        tasks = chosen(cluster, task)
    except BadInput as error:
        raise UserError(str(error)) from None
    found = explain(cluster, tasks, lambda _: Machine("eth0", 0, CORES, PACKAGE))
    return {"engine": cluster.engine, "example": True, "tasks": found}


def example(spec: ClusterSpec) -> Cluster:
    """The cluster that role trainer would write for this job, with addresses that are examples."""
    trainer = spec.trainer
    ps = [_node("ps", index, index + 1) for index in range(spec.count("ps"))]
    workers = [_node("worker", i, len(ps) + i + 1) for i in range(spec.count("worker"))]
    hdfs = f"{(ps or workers)[0]['address']}"
    in_hdfs = f"hdfs://{hdfs}:9000/mayfly/{RUN}/model"
    git = trainer.program.startswith("git+")
    directory = "/opt/mayfly/programs" + (f"/user/{trainer.directory}" if git else "")
    file = trainer.entrypoint if git else f"{trainer.program.removeprefix('builtin:')}.py"
    return parse_cluster(
        {
            "version": 1,
            "run": RUN,
            "run_uri": f"s3://bucket/{RUN}/",
            "engine": trainer.engine,
            "mode": trainer.mode,
            "steps": trainer.steps,
            "batch_size": trainer.batch_size,
            "port": 2222,
            "nodes": {"ps": ps, "worker": workers},
            "namenode": {"rpc": f"hdfs://{hdfs}:9000", "http": f"http://{hdfs}:9870"},
            "data_dir": f"hdfs://{hdfs}:9000{data_dir(spec)}",
            "model_dir": MODEL_DIR if spec.store == JUICEFS else in_hdfs,
            "status_dir": f"/mayfly/{RUN}/status",
            "program": {
                "path": f"{directory}/{file or ''}",
                "directory": directory,
                "args": trainer.args,
                "command": list(trainer.command or ()) if trainer.engine == COMMAND else [],
            },
            "environment": trainer.environment,
            "python": "/opt/mayfly/runtime/bin/python",
            "max_duration_s": spec.limits.max_duration,
            "tensorboard": spec.tensorboard,
        }
    )


def _node(kind: str, index: int, number: int) -> dict[str, str]:
    return {"name": f"{kind}-{index}", "address": f"{NETWORK}.{number}"}
