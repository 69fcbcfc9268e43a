"""Fakes for the node library's tests: a board in a directory, and small clusters."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

from mayfly_train.cluster import Cluster, parse_cluster

DOCUMENT: dict[str, Any] = {
    "version": 1,
    "run": "demo-261128-120000-ab12",
    "run_uri": "s3://models/demo-261128-120000-ab12/",
    "engine": "estimator",
    "mode": "async",
    "steps": 1000,
    "batch_size": 128,
    "port": 2222,
    "nodes": {
        "ps": [{"name": "n1", "address": "10.0.0.1"}],
        "worker": [{"name": "n2", "address": "10.0.0.2"}, {"name": "n3", "address": "10.0.0.3"}],
    },
    "namenode": {"rpc": "hdfs://10.0.0.1:9000", "http": "http://10.0.0.1:9870"},
    "data_dir": "hdfs://10.0.0.1:9000/mayfly/data",
    "model_dir": "hdfs://10.0.0.1:9000/mayfly/demo/model",
    "status_dir": "/mayfly/demo/status",
    "program": {"path": "/opt/p/main.py", "directory": "/opt/p", "args": {"batch_size": 128}},
    "python": "/opt/mayfly/runtime/bin/python",
    "environment": {"CLASSPATH": "/a.jar:/b.jar"},
    "max_duration_s": 3600,
    "tensorboard": False,
}


def document(**changes: Any) -> dict[str, Any]:
    """A topology document with some top-level keys changed."""
    return {**copy.deepcopy(DOCUMENT), **changes}


def cluster(**changes: Any) -> Cluster:
    """A parsed cluster with some top-level keys of its document changed."""
    return parse_cluster(document(**changes))


def cluster_running(script: Path, **changes: Any) -> Cluster:
    """A cluster whose program is a script run by this Python."""
    program = {"path": str(script), "directory": str(script.parent), "args": {}}
    return cluster(program=program, python=sys.executable, **changes)


class FakeBoard:
    """The notice board in a local directory instead of HDFS."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)

    def names(self) -> list[str]:
        return sorted(p.name for p in self.directory.iterdir() if not p.name.startswith("."))

    def read(self, name: str) -> bytes | None:
        path = self.directory / name
        return path.read_bytes() if path.exists() else None

    def write(self, name: str, data: bytes) -> None:
        part = self.directory / f".{name}.part"
        part.write_bytes(data)
        part.rename(self.directory / name)


class FakeBucket:
    """The run's prefix in S3 as a dictionary."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.statuses: list[bytes] = []

    def write(self, path: str, data: bytes, content_type: str) -> None:
        self.objects[path] = data
        if path == "status.json":
            self.statuses.append(data)
