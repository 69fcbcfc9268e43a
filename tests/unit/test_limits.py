"""A limit that is reached, by all who have a part in it: coordinator, supervisors, export."""

from __future__ import annotations

import json
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

from tests.unit.train_fakes import FakeBoard, FakeBucket, cluster_running

from mayfly_train import export, s3
from mayfly_train.coordinate import Coordinator
from mayfly_train.lifecycle import Limits
from mayfly_train.model_dir import Mounted
from mayfly_train.supervise import Settings, Supervisor
from mayfly_train.topology import parse_task
from mayfly_train.verify import verify_s3

# Counts steps, and saves the last one where the run's model is, when it is asked to end.
PROGRAM = """
import os, pathlib, signal, sys, time
model = pathlib.Path({model!r})
chief = os.environ["MAYFLY_TASK"] == "chief-0"
step = 0
def save(*_):
    if chief:
        (model / "checkpoints").mkdir(parents=True, exist_ok=True)
        (model / f"checkpoints/step-{{step}}").write_text(str(step))
        print(f"progress: step={{step}}", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
while True:
    step += 1
    print(f"progress: step={{step}} loss=0.5", flush=True)
    time.sleep(0.05)
"""
LIMITS = Limits(logs=0.1, final_status=1.0, poll=0.05, board=10)


def test_a_run_ends_with_its_last_step_in_the_bucket(tmp_path: Path, client):
    client.create_bucket(Bucket="models")
    board, bucket, model = FakeBoard(tmp_path / "board"), FakeBucket(), tmp_path / "model"
    script = tmp_path / "program.py"
    script.write_text(PROGRAM.format(model=str(model)))
    words = (sys.executable, str(script))
    run = cluster_running(script, engine="torch", nodes=TWO, budget_s=3, mode="sync")
    run = replace(run, engine="command", program=replace(run.program, command=words))

    def settings(task: str) -> Settings:
        own = tmp_path / task
        return Settings(
            save=10.0,
            heartbeat=0.1,
            poll=0.05,
            state_dir=own,
            log_dir=own,
            ended_file=own / "ended",
            alive_file=own / "alive",
            stay_poll=0.1,
        )

    def supervise(task: str) -> threading.Thread:
        subject = Supervisor(run, parse_task(task), board, settings(task))
        thread = threading.Thread(target=subject.run)
        thread.start()
        return thread

    def export_model(facts, progressed):
        uri = s3.parse_uri(run.run_uri)
        wanted = export.ExportSettings(client, run.run, uri, str(model), facts)
        export.export_run(wanted, Mounted(), progressed)

    threads = [supervise(task) for task in ("chief-0", "worker-0")]
    coordinator = Coordinator(run, board, bucket, export_model, LIMITS)
    coordinator.state = replace(coordinator.state, born=time.time())
    assert coordinator.run() == 0
    for thread in threads:
        thread.join(30)

    told = json.loads(bucket.objects["status.json"])
    assert (told["state"], told["reason"], told["error"]) == ("stopped", "budget", None)
    made = verify_s3(client, s3.parse_uri(run.run_uri))
    (entry,) = made.files
    assert entry.path == f"checkpoints/step-{told['global_step']}"
    assert told["global_step"] > 0
    assert (made.extra["reason"], made.extra["steps"]) == ("budget", 1000)
    states = {task: what["state"] for task, what in told["tasks"].items()}
    assert states["chief-0"] == "stopped"
    assert not {"DONE", "FAILED"} & set(board.names())
    assert all((tmp_path / task / "ended").exists() for task in ("chief-0", "worker-0"))


TWO = {"worker": [{"name": "n2", "address": "10.0.0.2"}, {"name": "n3", "address": "10.0.0.3"}]}
