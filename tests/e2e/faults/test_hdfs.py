"""HDFS' daemons that die, and what becomes of a training on it."""

from __future__ import annotations

import time

import pytest

LIMIT_S = 180
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("node", ["worker-0", "worker-1"])
def test_a_datanode_is_killed_and_stays_away(lab, node):
    run = lab.train(steps=400)
    run.at_step(60)
    lab.stop_for_good(node, "hdfs-datanode")
    started = time.monotonic()
    status = run.end(400)
    print(f"{status['state']} after {time.monotonic() - started:.0f} s: {status['error']}")
    assert status["state"] == "succeeded", status["error"]


def test_the_namenode_is_restarted(lab):
    run = lab.train(steps=400)
    run.at_step(60)
    lab.sh("ps-0", "systemctl kill --signal=KILL hdfs-namenode")
    assert run.end(400)["state"] == "succeeded"


def test_the_namenode_never_comes_back(lab):
    run = lab.train(steps=100_000)
    run.at_step(20)
    lab.stop_for_good("ps-0", "hdfs-namenode")
    started = time.monotonic()
    status = run.end(LIMIT_S)
    print(f"said after {time.monotonic() - started:.0f} s: {status['error']['message']}")
    assert status["state"] == "failed"
    assert lab.names["ps-0"] in status["error"]["message"] or status["error"]["node"]
