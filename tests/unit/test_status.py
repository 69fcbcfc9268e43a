"""The status document and the events between two of them."""

from __future__ import annotations

from dataclasses import replace

from tests.unit.train_fakes import cluster

from mayfly_train.lifecycle import (
    EXPORTING,
    FAILED,
    STARTING,
    SUCCEEDED,
    TRAINING,
    Heartbeat,
    RunState,
)
from mayfly_train.progress import Progress, Redone
from mayfly_train.status import events_between, iso, status_document

STATE = RunState(TRAINING, started=1000.0, stepped=1060.0, step=400, redone=Redone(steps=50))
CHIEF = Heartbeat("chief-0", "n2", "running", 2, None, "t", Progress(400, 0.5, 10.0))
EVALUATOR = Heartbeat(
    "evaluator-0", "n2", "running", 1, None, "t", Progress(accuracy=0.8, evaluated_step=300)
)
BEATS = {"chief-0": CHIEF, "evaluator-0": EVALUATOR}


def test_a_training_run():
    document = status_document(cluster(), STATE, BEATS, now=1060.0, staging_s=12.5)
    assert document["state"] == "training"
    assert document["updated"] == "1970-01-01T00:17:40.000Z"
    assert (document["steps"], document["global_step"]) == (1000, 400)
    assert document["samples_seen"] == 400 * 128
    assert document["samples_processed"] == 450 * 128
    assert document["examples_per_second"] == 1280.0
    assert document["eta_s"] == 60
    assert (document["accuracy"], document["accuracy_step"]) == (0.8, 300)
    assert document["phases"] == {"staging": 12.5, "training": 60.0, "export": None}
    assert list(document["tasks"]) == ["ps-0", "chief-0", "worker-0", "evaluator-0"]
    assert document["tasks"]["chief-0"] == {
        "node": "n2",
        "state": "running",
        "attempts": 2,
        "exit_code": None,
        "updated": "t",
    }
    assert document["tasks"]["ps-0"]["state"] == "pending"
    assert document["model_uri"] is None


def test_a_run_that_has_said_nothing_yet():
    document = status_document(cluster(), RunState(STARTING, 0.0, 0.0), {}, now=1.0)
    assert (document["global_step"], document["loss"], document["eta_s"]) == (0, None, None)
    assert document["export"] == {"bytes_done": 0, "bytes_total": None}


def test_phases_of_an_ended_run():
    state = replace(STATE, phase=EXPORTING, ended=1100.0)
    assert status_document(cluster(), state, {}, 1110.0)["phases"]["export"] == 10.0
    state = replace(state, phase=SUCCEEDED, exported=1120.0)
    document = status_document(cluster(), state, BEATS, 9999.0)
    assert document["phases"] == {"staging": None, "training": 100.0, "export": 20.0}
    assert document["examples_per_second"] is None
    assert document["model_uri"].endswith("/model")


def test_events():
    first = status_document(cluster(), STATE, BEATS, now=1060.0)
    assert [e["event"] for e in events_between(None, first)] == [
        "task",
        "task",
        "evaluation",
        "state",
    ]
    assert events_between(first, first) == []
    error = {"task": "chief-0", "node": "n2", "message": "broken", "log_tail": []}
    state = replace(STATE, phase=FAILED, ended=1070.0, error=error, redone=Redone(steps=90))
    beats = {**BEATS, "chief-0": replace(CHIEF, state="failed", exit_code=3)}
    second = status_document(cluster(), state, beats, now=1070.0)
    events = events_between(first, second)
    assert [e["event"] for e in events] == ["task", "rewind", "state"]
    assert events[0]["exit_code"] == 3
    assert events[2]["error"] == error
    assert {e["run"] for e in events} == {cluster().run}


def test_times_are_utc():
    assert iso(1_790_000_000.5) == "2026-09-21T14:13:20.500Z"
