"""Nodes whose network link is dropped, for a while or for good."""

from __future__ import annotations

import time

import pytest

from mayfly.watch import Broken, Pace, Status, wait_for_status

LIMIT_S = 180
SILENCE_S = 150  # the laptop's patience with a run that says nothing
pytestmark = pytest.mark.slow


def test_a_workers_link_is_dropped_for_good(lab):
    run = lab.train(steps=600)
    run.at_step(60)
    lab.link("worker-1", up=False)
    status = run.end(400)
    print(f"{status['state']}: {status['error']}, {status['tasks']['worker-0']['state']}")
    assert status["state"] == "succeeded", status["error"]


def test_a_workers_link_is_dropped_for_a_while(lab):
    run = lab.train(steps=600)
    run.at_step(60)
    lab.link("worker-1", up=False)
    time.sleep(30)
    lab.link("worker-1", up=True)
    assert run.end(400)["state"] == "succeeded"


def test_the_parameter_servers_link_is_dropped_for_good(lab):
    run = lab.train(steps=100_000)
    run.at_step(20)
    lab.link("ps-0", up=False)
    started = time.monotonic()
    status = run.end(LIMIT_S)
    print(f"said after {time.monotonic() - started:.0f} s: {status['error']['message']}")
    assert status["state"] == "failed"
    assert lab.names["ps-0"] in status["error"]["message"]


def test_the_chiefs_link_is_dropped_for_good(lab):
    """Nobody on the nodes can tell; whoever watches from outside notices the silence."""
    run = lab.train(steps=100_000)
    run.at_step(20)
    lab.link("worker-0", up=False)
    started = time.monotonic()

    def read() -> Status | None:
        document = run.status()
        return Status.of(document) if document else None

    with pytest.raises(Broken, match="no sign of life"):
        pace = Pace(patience=SILENCE_S)
        wait_for_status(("succeeded",), read, lambda: "", pace, lambda _: None)
    took = time.monotonic() - started
    print(f"said after {took:.0f} s")
    assert took < LIMIT_S
