"""Training processes that die, hang or never come back, and what becomes of the run."""

from __future__ import annotations

import time

import pytest

from faults.kills import kill_and_tell
from mayfly.engines import ESTIMATOR

LIMIT_S = 180  # whatever ends in failure says so within this time
BATCH = 32
# Steps that take a quick machine two minutes: longer than it takes to see that a task is hung.
LONG = 3000


def succeeded(status):
    """The run has all its samples, and its account of those done twice is no smaller."""
    assert status["state"] == "succeeded", status["error"]
    assert status["global_step"] >= status["steps"]
    assert status["samples_seen"] == status["global_step"] * BATCH
    assert status["samples_processed"] >= status["samples_seen"]


def test_a_worker_is_killed(lab):
    run = lab.train(steps=200)
    run.at_step(30)
    status = kill_and_tell(run, ESTIMATOR, "worker-0")
    succeeded(status)
    assert status["tasks"]["worker-0"]["attempts"] == 2
    assert status["samples_processed"] == status["samples_seen"]


def test_a_parameter_server_never_comes_back(lab):
    run = lab.train(steps=100_000)
    run.at_step(20)
    lab.stop_for_good("ps-0", "mayfly-task@ps-0")
    started = time.monotonic()
    status = run.end(LIMIT_S)
    print(f"said after {time.monotonic() - started:.0f} s: {status['error']['message']}")
    assert status["state"] == "failed"
    assert (status["error"]["task"], status["error"]["node"]) == ("ps-0", lab.names["ps-0"])
    assert status["error"]["message"].startswith("ps-0 ")


@pytest.mark.slow
@pytest.mark.parametrize("task", ["ps-0", "chief-0"])
def test_a_task_that_holds_the_step_is_killed(lab, task):
    """What was trained since the newest whole checkpoint is done twice, and nothing before it."""
    run = lab.train(steps=1000)
    run.at_step(300)
    saved, _ = run.checkpoints()
    assert len(saved) > 2, saved
    status = kill_and_tell(run, ESTIMATOR, task)
    succeeded(status)
    assert status["tasks"][task]["attempts"] == 2
    _, restored = run.checkpoints()
    redone = status["samples_processed"] - status["samples_seen"]
    print(f"{task}: {redone // BATCH} steps done twice, saved {saved}, restored {restored}")
    # What was saved last may not have been whole.
    assert len(restored) == 1
    assert restored[0] >= saved[-2]
    assert 0 <= redone <= (status["global_step"] - restored[0]) * BATCH


@pytest.mark.slow
def test_the_evaluator_is_killed(lab):
    run = lab.train(steps=200)
    run.at_step(30)
    status = kill_and_tell(run, ESTIMATOR, "evaluator-0")
    succeeded(status)
    assert status["tasks"]["evaluator-0"]["attempts"] == 2
    assert status["accuracy_step"] == status["global_step"]


@pytest.mark.slow
def test_one_task_after_the_other_is_killed(lab):
    """Kills of distinct tasks use up nobody's starts."""
    run = lab.train(steps=500)
    for number, task in enumerate(("worker-0", "chief-0", "ps-0", "worker-0"), start=1):
        run.at_step(60 * number)
        run.kill(task)
        run.wait_until(lambda status, task=task: status["tasks"][task]["attempts"] >= 2, 60)
    succeeded(run.end(500))


@pytest.mark.slow
@pytest.mark.parametrize("task", ["worker-0", "chief-0", "ps-0"])
def test_a_task_hangs(lab, task):
    run = lab.train(steps=LONG)
    run.at_step(60)
    run.kill(task, "STOP")
    started = time.monotonic()
    run.wait_until(lambda status: status["tasks"][task]["attempts"] == 2, 120)
    print(f"{task}: restarted after {time.monotonic() - started:.0f} s")
    succeeded(run.end(1200))


@pytest.mark.slow
def test_a_supervisor_is_killed(lab):
    run = lab.train(steps=200)
    run.at_step(30)
    lab.sh("worker-1", "systemctl kill --kill-who=main --signal=KILL mayfly-task@worker-0")
    status = run.end(300)
    succeeded(status)
    assert status["tasks"]["worker-0"]["attempts"] == 2


@pytest.mark.slow
def test_a_lost_worker_is_done_without(lab):
    run = lab.train(steps=2 * LONG)
    run.at_step(30)
    lab.stop_for_good("worker-1", "mayfly-task@worker-0")
    succeeded(run.end(2400))
    states = [e["state"] for e in run.events() if e.get("task") == "worker-0"]
    assert states[-1] == "lost", states


@pytest.mark.slow
def test_a_lost_worker_fails_a_synchronous_run(lab):
    run = lab.train(steps=100_000, mode="sync")
    run.at_step(20)
    lab.stop_for_good("worker-1", "mayfly-task@worker-0")
    status = run.end(LIMIT_S)
    assert status["state"] == "failed"
    assert status["error"]["task"] == "worker-0"


@pytest.mark.slow
def test_a_worker_that_comes_late_takes_part(lab):
    """It finds variables that are long initialized, and must not wait for their making."""
    run = lab.train(steps=500)
    run.kill("worker-0", "STOP")
    run.at_step(60)
    run.kill("worker-0", "CONT")
    status = run.wait_until(lambda status: status["global_step"] > 0, 60)
    succeeded(run.end(400))
    assert "loss = " in lab.sh("worker-1", "cat /var/log/mayfly/worker-0.log"), status


@pytest.mark.slow
def test_a_node_knows_that_the_run_is_over(lab):
    run = lab.train(steps=60)
    run.at_step(10)
    for node in lab.containers:
        assert lab.sh(node, "cat /var/lib/mayfly/ended", check=False) == ""
    succeeded(run.end(200))
    run.over_on_all_nodes(90)
