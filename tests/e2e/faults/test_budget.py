"""Limits that are reached while a run trains: it saves, exports what there is, and says why."""

from __future__ import annotations

import json
import time

import pytest

from mayfly_train import s3
from mayfly_train.verify import verify_s3

FOR_EVER = 1_000_000  # steps
LIMIT_S = 90  # from the start of training
END_S = LIMIT_S + 180  # the chief saves, and the model is uploaded

AGE = (
    "/opt/mayfly/agent/bin/python -c 'import time; from mayfly_train.machine import born;"
    " print(round(time.time() - born()))'"
)


def changes(lab, limit: str) -> dict[str, int]:
    """What of cluster.json makes the limit be reached soon."""
    if limit == "budget":
        return {"budget_s": int(lab.sh("worker-0", AGE)) + LIMIT_S}
    return {"max_duration_s": LIMIT_S}


@pytest.mark.parametrize("limit", ["budget", "max_duration"])
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


@pytest.mark.slow
def test_a_run_without_a_step_is_idle(lab):
    run = lab.train(steps=FOR_EVER, idle_s=90)
    run.at_step(20)
    lab.stop_for_good("ps-0", "mayfly-task@ps-0")
    status = run.wait_until(lambda now: now["state"] in ("stopped", "failed"), 240)
    print(f"idle: {status['stopped_because']}")
    assert (status["state"], status["reason"]) == ("stopped", "idle")
    verify_s3(lab.bucket, s3.parse_uri(run.uri))
