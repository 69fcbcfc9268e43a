"""Limits that are reached while a run trains: it saves, exports what there is, and says why."""

from __future__ import annotations

import json
import re
import time

import pytest
from machine import mayfly

from faults.lab import deploy
from mayfly_train import s3
from mayfly_train.verify import verify_s3

FOR_EVER = 1_000_000  # steps
# An hour of three nodes at this price is 108 USD, so the budget pays for 16 minutes: 6 of them are
# for making the nodes and for training, 10 are kept for export and destroy.
PRICES = """
cloud: local
currency: USD
date: 2026-11-01
source: made up, to see a budget at work
other: {hour: 36}
disk_gb_month: 0
address_hour: 0
transfer_gb: 0
"""
BUDGET = 28.8
LIMIT_S = 90  # from the start of training
END_S = LIMIT_S + 180  # the chief saves, and the model is uploaded

STEP = re.compile(r"checkpoints/(?:ckpt-|step=)(\d+)")  # the names of both programs' checkpoints
AGE = (
    "/opt/mayfly/agent/bin/python -c 'import time; from mayfly_train.machine import born;"
    " print(round(time.time() - born()))'"
)


def changes(lab, limit: str) -> dict[str, int]:
    """What of cluster.json makes the limit be reached soon."""
    if limit == "budget":
        return {"budget_s": int(lab.sh("worker-0", AGE)) + LIMIT_S}
    return {"max_duration_s": LIMIT_S}


# Both take the same way; one is enough for every change.
@pytest.mark.parametrize("limit", ["budget", pytest.param("max_duration", marks=pytest.mark.slow)])
def test_a_run_that_reaches_its_limit_exports_what_there_is(lab, limit):
    run = lab.train(steps=FOR_EVER, **changes(lab, limit))
    started = time.monotonic()
    run.at_step(20)
    status = run.wait_until(lambda now: now["state"] in ("stopped", "failed"), END_S)
    print(f"{limit}: over after {time.monotonic() - started:.0f} s, {status['stopped_because']}")
    assert (status["state"], status["reason"]) == ("stopped", limit)
    assert 20 <= status["global_step"] < FOR_EVER

    made = verify_s3(lab.bucket, s3.parse_uri(run.uri))
    assert any(entry.path.startswith("checkpoints/") for entry in made.files)
    manifest = json.loads(run.read("manifest.json"))
    assert (manifest["reason"], manifest["steps"]) == (limit, FOR_EVER)
    # The chief saved when it was asked to, and not some time before.
    last = max(int(e.path.split("-")[1].split(".")[0]) for e in made.files if ".index" in e.path)
    assert last == status["global_step"]

    run.over_on_all_nodes(60)
    states = {task: what["state"] for task, what in run.status()["tasks"].items()}
    assert states["chief-0"] == "stopped", states


# Programs whose processes make steps together; neither saves by itself before the limit, since an
# epoch of Lightning's program (60,000 pictures on two nodes, one at a time) takes longer.
TOGETHER = {
    "horovod": ("mnist_horovod_keras", {"batch_size": 32, "checkpoint_seconds": 100_000}),
    "torch": ("mnist_lightning", {"batch_size": 2}),
}


@pytest.mark.slow
@pytest.mark.parametrize("engine", TOGETHER)
def test_processes_that_make_steps_together_save_when_a_limit_is_reached(platform, bucket, engine):
    name, args = TOGETHER[engine]
    lab = deploy(platform, bucket, engine)
    try:
        program = {**lab.program(name), "args": args}
        run = lab.train(steps=FOR_EVER, mode="sync", program=program, max_duration_s=LIMIT_S)
        run.at_step(20)
        status = run.wait_until(lambda now: now["state"] in ("stopped", "failed"), END_S)
        print(f"{engine}: {status['stopped_because']}")
        assert (status["state"], status["reason"]) == ("stopped", "max_duration"), status["error"]
        made = verify_s3(lab.bucket, s3.parse_uri(run.uri))
        names = [entry.path for entry in made.files]
        steps = {int(found[1]) for name in names if (found := STEP.search(name))}
        assert steps == {status["global_step"]}, names  # saved when they were asked, never before
        run.over_on_all_nodes(60)
        tasks = run.status()["tasks"]
        assert {what["state"] for what in tasks.values()} == {"stopped"}, tasks
        assert {what["attempts"] for what in tasks.values()} == {1}, tasks
    finally:
        lab.destroy()


@pytest.mark.slow
def test_a_run_without_a_step_is_idle(lab):
    run = lab.train(steps=FOR_EVER, idle_s=90)
    run.at_step(20)
    lab.stop_for_good("ps-0", "mayfly-task@ps-0")
    status = run.wait_until(lambda now: now["state"] in ("stopped", "failed"), 240)
    print(f"idle: {status['stopped_because']}")
    assert (status["state"], status["reason"]) == ("stopped", "idle")
    verify_s3(lab.bucket, s3.parse_uri(run.uri))


@pytest.mark.slow
def test_a_budget_ends_a_whole_run(platform, bucket, tmp_path):
    prices = tmp_path / "prices.yml"
    prices.write_text(PRICES)
    outcome = mayfly(
        *("deploy", "--cloud", "local", "--workers", "2", "--name", "budget", "--json"),
        *("--steps", str(FOR_EVER), "--prices", str(prices), "--budget", f"{BUDGET} USD"),
    )
    document = outcome.document
    assert outcome.code == 3, outcome.messages[-3000:]
    assert (document["ok"], document["reason"], document["leftovers"]) == (False, "budget", 0)
    assert 0 < document["global_step"] < FOR_EVER
    cost = document["cost"]
    assert (cost["budget"], cost["currency"]) == (BUDGET, "USD")
    assert BUDGET / 3 < cost["spent"] == cost["forecast"] < BUDGET
    verify_s3(bucket, s3.parse_uri(document["model_uri"].rpartition("/model")[0]))
    told = mayfly("status", document["run"], "--json").document
    assert (told["outcome"], told["cost"]["budget"]) == ("stopped", BUDGET)
    # The ledger counts from its own entries, a moment after the process did.
    assert abs(told["cost"]["spent"] - cost["spent"]) < BUDGET / 10
