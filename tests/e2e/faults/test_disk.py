"""Disks that are full. Each is a small file system of its own, never the machine's disk."""

from __future__ import annotations

import time

import pytest

LIMIT_S = 180
pytestmark = pytest.mark.slow


def test_no_room_for_logs_on_the_chiefs_node(lab):
    run = lab.train(steps=300)
    run.at_step(60)
    lab.fill("worker-0", "/var/log/mayfly")
    status = run.wait_until(lambda status: status["disk_full"], 90)
    assert status["disk_full"] == [lab.names["worker-0"]]
    assert run.end(300)["state"] == "succeeded"


def test_no_room_for_state_on_the_chiefs_node(lab):
    run = lab.train(steps=300)
    run.at_step(60)
    lab.fill("worker-0", "/var/lib/mayfly/tasks")
    run.kill("chief-0")
    status = run.end(300)
    assert status["state"] == "succeeded", status["error"]
    assert status["tasks"]["chief-0"]["attempts"] == 2


def test_no_room_for_hdfs_on_the_chiefs_node(lab):
    """Blocks go to the other nodes, or the run says why it cannot go on."""
    run = lab.train(steps=300)
    run.at_step(60)
    lab.sh("worker-0", "systemctl stop hdfs-datanode")
    lab.fill("worker-0", "/var/lib/mayfly/hdfs")
    lab.sh("worker-0", "systemctl start hdfs-datanode")
    started = time.monotonic()
    status = run.end(400)
    print(f"{status['state']} after {time.monotonic() - started:.0f} s: {status['error']}")
    assert status["state"] == "succeeded" or status["error"]["message"]
