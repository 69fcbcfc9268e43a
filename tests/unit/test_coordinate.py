"""A run's life: the pure state machine, and the coordinator on fakes for HDFS and S3."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest
from tests.unit.train_fakes import FakeBoard, FakeBucket, cluster, document

from mayfly_train.caps import Stop
from mayfly_train.coordinate import Coordinator
from mayfly_train.errors import NodeError
from mayfly_train.lifecycle import (
    EXPORTING,
    FAILED,
    STARTING,
    STOPPED,
    STOPPING,
    SUCCEEDED,
    TRAINING,
    Heartbeat,
    Limits,
    RunState,
    Seen,
    advance,
    dump_state,
    parse_heartbeat,
    parse_state,
)
from mayfly_train.markers import TimedBoard
from mayfly_train.model_files import NothingThere
from mayfly_train.progress import Progress

LIMITS = Limits(
    start=100,
    lost=30,
    stall=50,
    first_step=80,
    evaluator=30,
    stop=20,
    board=10,
    logs=0.1,
    final_status=0.1,
    poll=0.01,
)
NEW = RunState(STARTING, started=0.0, stepped=0.0)


def beat(task: str, state: str = "running", **progress) -> Heartbeat:
    return Heartbeat(task, "n", state, 1, None, "2026-11-28T12:00:00.000Z", Progress(**progress))


def seen(*beats: Heartbeat, **markers) -> Seen:
    return Seen({heartbeat.task: heartbeat for heartbeat in beats}, **markers)


def step(state: RunState, what: Seen, now: float) -> RunState:
    return advance(state, what, cluster(), now, LIMITS)


def test_training_begins_with_the_chiefs_first_step():
    assert step(NEW, seen(beat("chief-0"), beat("ps-0")), 1).phase == STARTING
    state = step(NEW, seen(beat("chief-0", step=0)), 2)
    assert (state.phase, state.step, state.stepped) == (TRAINING, 0, 2)


def test_success_waits_for_the_evaluator():
    trained = seen(beat("chief-0", "succeeded", step=1000), beat("evaluator-0"), done=True)
    state = step(NEW, trained, 10)
    assert (state.phase, state.trained) == (TRAINING, 10)
    assert step(state, trained, 39).phase == TRAINING
    evaluated = seen(beat("chief-0", "succeeded"), beat("evaluator-0", "succeeded"), done=True)
    state = step(state, evaluated, 20)
    assert (state.phase, state.trained, state.ended) == (EXPORTING, 10, 20)


def test_success_does_not_wait_for_ever_for_the_evaluator():
    state = step(NEW, seen(beat("chief-0", step=1000), done=True), 10)
    assert step(state, seen(beat("evaluator-0"), done=True), 41).phase == EXPORTING


def torch_run():
    nodes = {"worker": document()["nodes"]["worker"]}
    return cluster(engine="torch", mode="sync", nodes=nodes)


def test_success_of_an_engine_without_evaluator_is_exported_at_once():
    state = advance(NEW, seen(beat("chief-0", step=9), done=True), torch_run(), 5, LIMITS)
    assert state.phase == EXPORTING


def test_a_program_that_tells_no_steps_may_do_so_where_the_engine_has_no_form_for_them():
    both = seen(beat("chief-0"), beat("worker-0"))
    now = LIMITS.start + 1
    assert advance(NEW, both, torch_run(), now, LIMITS).phase == STARTING
    one = advance(NEW, seen(beat("chief-0")), torch_run(), now, LIMITS)
    assert one.phase == FAILED and "worker-0 on node n3" in one.error["message"]


def test_a_stall_without_parameter_servers_blames_none():
    state = advance(NEW, seen(beat("chief-0", step=1)), torch_run(), 1, LIMITS)
    heard = replace(beat("chief-0", step=1), updated="2026-11-28T12:02:40.000Z")
    late = advance(state, seen(heard), torch_run(), 1 + 2 * 80, LIMITS)
    assert late.phase == FAILED and "one hung process stops all" in late.error["message"]


def test_an_evaluator_that_failed_once_may_come_back():
    failed = seen(beat("chief-0", step=1000), beat("evaluator-0", "failed"), done=True)
    assert step(NEW, failed, 10).phase == TRAINING


def test_a_failure_marker_fails_the_run_whatever_else_is_there():
    marker = {"task": "ps-0", "node": "n1", "message": "broken", "log_tail": ["x"]}
    state = step(NEW, seen(done=True, failed=marker), 5)
    assert (state.phase, state.error) == (FAILED, marker)
    assert step(NEW, seen(failed={}), 5).error["message"] == "the run was marked as failed"


def test_a_run_that_does_not_start_fails():
    assert step(NEW, seen(), 100).phase == STARTING
    assert "did not start within 100 s" in step(NEW, seen(), 101).error["message"]


def test_a_run_that_makes_no_step_fails():
    state = follow(0, 50)
    assert follow(60, 100, state, chief_0=50, worker_0=50).phase == TRAINING
    stalled = follow(60, 110, state, chief_0=50, worker_0=50)
    assert "no new global step for 50 s, at step 50" in stalled.error["message"]
    assert follow(60, 110, state).phase == TRAINING


def test_a_program_that_logs_seldom_is_given_time():
    state = step(NEW, alive(10, chief_0=1, worker_0=None), 10)
    state = step(state, alive(50, chief_0=1, worker_0=None), 50)
    state = step(state, alive(51, chief_0=2, worker_0=None), 51)
    state = step(state, alive(100, chief_0=2, worker_0=None), 100)
    state = step(state, alive(149, chief_0=2, worker_0=None), 149)
    assert step(state, alive(174, chief_0=2, worker_0=None), 174).phase == TRAINING
    late = step(state, alive(175, chief_0=2, worker_0=None), 175)
    assert "no new global step for 123 s" in late.error["message"]


def alive(now: float, **tasks) -> Seen:
    """All tasks have just been heard of, but those that are None; values are their steps."""
    steps = {"ps_0": 0, "chief_0": int(now), "worker_0": int(now), **tasks}
    beats = [
        replace(beat(name.replace("_", "-"), step=value), updated=str(now))
        for name, value in steps.items()
        if value is not None
    ]
    return seen(*beats, at=now)


def follow(first: float, last: float, state: RunState = NEW, run=None, **tasks) -> RunState:
    """Look every ten seconds; a task that is None says nothing new."""
    heard = alive(first)
    for now in range(int(first), int(last) + 1, 10):
        heard = replace(heard, heartbeats={**heard.heartbeats, **alive(now, **tasks).heartbeats})
        heard = replace(heard, at=float(now))
        state = advance(state, heard, run or cluster(), now, LIMITS)
    return state


@pytest.mark.parametrize(
    ("task", "mode", "phase"),
    [
        ("ps-0", "async", FAILED),
        ("chief-0", "async", FAILED),
        ("worker-0", "async", TRAINING),
        ("worker-0", "sync", FAILED),
    ],
)
def test_a_lost_task_fails_the_run_that_needs_it(task, mode, phase):
    silent = {task.replace("-", "_"): None}
    run = cluster(mode=mode)
    assert follow(0, 20, run=run, **silent).lost == ()
    state = follow(0, 40, run=run, **silent)
    assert (state.lost, state.phase) == ((task,), TRAINING)
    state = follow(0, 60, run=run, **silent)
    assert state.phase == phase
    if phase == FAILED:
        assert state.error["task"] == task
        assert f"{task} on node {state.error['node']} has given no" in state.error["message"]


def test_an_elastic_engine_goes_on_without_a_lost_worker():
    nodes = {"worker": document()["nodes"]["worker"]}
    run = cluster(engine="horovod", mode="sync", nodes=nodes)
    state = follow(0, 60, run=run, worker_0=None)
    assert (state.lost, state.phase) == (("worker-0",), TRAINING)
    assert follow(0, 60, run=run, chief_0=None).phase == FAILED


def test_a_lost_worker_that_is_back_is_not_lost():
    state = follow(0, 40, worker_0=None)
    assert follow(50, 50, state).lost == ()


def test_nobody_is_lost_while_the_board_does_not_answer():
    state = follow(0, 20)
    old = alive(20)
    assert advance(state, old, cluster(), 200, replace(LIMITS, stall=900)).lost == ()


def test_a_hung_trainer_is_asked_once_per_attempt_to_restart():
    state = follow(0, 50)
    assert follow(60, 90, state, worker_0=50).restarts == {}
    state = follow(60, 120, state, worker_0=50)
    assert (state.restarts, state.phase) == ({"worker-0": 1}, TRAINING)
    assert follow(130, 200, state).restarts == {"worker-0": 1}


def test_a_worker_that_missed_the_ready_moment_is_asked_to_restart():
    never = {"worker_0": 0}
    assert follow(0, 70, **never).restarts == {}
    assert follow(0, 140, **never).restarts == {"worker-0": 1}


def test_a_pause_of_all_is_no_trainers_fault():
    state = follow(0, 50)
    assert follow(60, 99, state, worker_0=50, chief_0=50).restarts == {}


def test_a_run_over_max_duration_is_stopped():
    state = replace(NEW, stepped=3599, phase=TRAINING, step=1)
    assert step(state, seen(beat("chief-0", step=2)), 3600).phase == TRAINING
    late = step(state, seen(beat("chief-0", step=2)), 3601)
    assert (late.phase, late.stop.reason, late.stop.at) == (STOPPING, "max_duration", 3601)
    assert "max_duration, 3600 s" in late.stop.message


def test_a_budget_counts_from_when_the_node_was_made():
    run = cluster(budget_s=600, max_duration_s=9999)
    state = replace(NEW, started=400.0, stepped=590.0, phase=TRAINING, step=1, born=100.0)
    training = seen(beat("chief-0", step=2))
    assert advance(state, training, run, 700, LIMITS).phase == TRAINING
    late = advance(state, training, run, 701, LIMITS)
    assert (late.phase, late.stop.reason) == (STOPPING, "budget")
    unknown = replace(state, born=None)
    assert advance(unknown, training, run, 701, LIMITS).phase == TRAINING


def test_a_run_without_steps_is_stopped_once_it_is_idle():
    run = replace(torch_run(), idle_s=30)
    both = seen(beat("chief-0", step=5), beat("worker-0"))
    state = advance(NEW, both, run, 1, LIMITS)
    assert advance(state, both, run, 31, LIMITS).phase == TRAINING
    late = advance(state, both, run, 32, LIMITS)
    assert (late.phase, late.stop.reason) == (STOPPING, "idle")
    assert advance(state, both, replace(run, idle_s=0), 32, LIMITS).phase == TRAINING


def test_a_start_that_takes_long_is_not_idle():
    run = replace(torch_run(), idle_s=30)
    silent = seen(beat("chief-0"), beat("worker-0"))
    assert advance(NEW, silent, run, LIMITS.start, LIMITS).phase == STARTING
    late = advance(NEW, silent, run, LIMITS.start + 1, LIMITS)
    assert (late.phase, late.stop.reason) == (STOPPING, "idle")
    estimator = cluster(idle_s=30)
    assert advance(NEW, seen(beat("chief-0")), estimator, 99, LIMITS).phase == STARTING
    assert advance(NEW, seen(beat("chief-0")), estimator, 101, LIMITS).phase == FAILED


STOPPED_AT_10 = replace(NEW, phase=STOPPING, step=7, stop=Stop("budget", "no money", 10.0))


def test_a_run_that_is_being_stopped_waits_for_the_chief_and_not_for_ever():
    assert step(STOPPED_AT_10, seen(beat("chief-0", step=8)), 29).phase == STOPPING
    saved = step(STOPPED_AT_10, seen(beat("chief-0", step=8), stopped=True), 12)
    assert (saved.phase, saved.ended, saved.step) == (EXPORTING, 12, 8)
    assert step(STOPPED_AT_10, seen(), 31).phase == EXPORTING


def test_what_is_being_stopped_survives_its_coordinator():
    state = replace(STOPPED_AT_10, born=3.0)
    assert parse_state(json.loads(json.dumps(dump_state(state)))) == state


def test_tasks_that_fail_while_a_run_is_stopped_change_nothing():
    failing = seen(beat("worker-0", "failed"), failed={"message": "lost its peer"})
    state = step(STOPPED_AT_10, failing, 11)
    assert (state.phase, state.error) == (STOPPING, None)


def test_a_chief_that_was_quicker_than_the_limit_has_succeeded():
    state = step(STOPPED_AT_10, seen(beat("evaluator-0", "succeeded"), done=True), 11)
    assert (state.phase, state.stop) == (EXPORTING, None)


def test_the_final_evaluation_has_no_more_time_than_the_job():
    state = replace(NEW, phase=TRAINING, step=9, trained=3590.0)
    trained = seen(beat("evaluator-0"), done=True)
    assert step(state, trained, 3600).phase == TRAINING
    late = step(state, trained, 3601)
    assert (late.phase, late.stop) == (EXPORTING, None)


@pytest.mark.parametrize("phase", [EXPORTING, SUCCEEDED, FAILED, STOPPED])
def test_what_is_over_stays(phase):
    state = replace(NEW, phase=phase)
    assert step(state, seen(beat("chief-0", step=9), failed={"message": "late"}), 9999) == state


def test_state_survives_json():
    state = step(NEW, seen(beat("chief-0", step=7)), 10)
    assert parse_state(json.loads(json.dumps(dump_state(state)))) == state
    assert parse_state(None) is None
    assert parse_state({"phase": "x"}) is None
    assert parse_heartbeat({"task": "ps-0"}) is None


# --- the coordinator ---


def write_heartbeat(board, task, state="running", **progress):
    document = {
        "version": 1,
        "task": task,
        "node": "n",
        "state": state,
        "attempt": 1,
        "exit_code": None,
        "updated": "2026-11-28T12:00:00.000Z",
        "progress": progress,
    }
    board.write(f"{task}.json", json.dumps(document).encode())


@pytest.fixture
def board(tmp_path) -> FakeBoard:
    return FakeBoard(tmp_path)


@pytest.fixture
def bucket() -> FakeBucket:
    return FakeBucket()


def status(bucket: FakeBucket) -> dict:
    return json.loads(bucket.objects["status.json"])


def finished(board: FakeBoard) -> None:
    write_heartbeat(board, "chief-0", "succeeded", step=1000)
    result = {"accuracy": 0.9, "evaluated_step": 1000}
    write_heartbeat(board, "evaluator-0", "succeeded", **result)
    board.write("DONE", b"{}")
    board.write("chief-0.log", b"the log\n")


def test_a_run_is_followed_to_its_export(board, bucket):
    exported = []

    def export(facts, progressed):
        progressed(5, 10)
        exported.append(facts)
        assert status(bucket)["state"] == "exporting"
        assert bucket.objects["logs/chief-0.log"] == b"the log\n"

    write_heartbeat(board, "chief-0", step=500)
    coordinator = Coordinator(cluster(), board, bucket, export, LIMITS)
    coordinator.step()
    assert (status(bucket)["state"], status(bucket)["global_step"]) == ("training", 500)
    finished(board)
    assert coordinator.run() == 0
    assert exported == [
        {
            "steps": 1000,
            "reason": None,
            "global_step": 1000,
            "accuracy": 0.9,
            "samples_seen": 128_000,
            "samples_processed": 128_000,
        }
    ]
    told = status(bucket)
    assert (told["state"], told["accuracy"], told["error"]) == ("succeeded", 0.9, None)
    assert told["model_uri"] == "s3://models/demo-261128-120000-ab12/model"
    assert told["export"] == {"bytes_done": 5, "bytes_total": 10}
    events = [json.loads(line) for line in bucket.objects["events.jsonl"].splitlines()]
    states = [event["state"] for event in events if event["event"] == "state"]
    assert states == ["training", "exporting", "succeeded"]


def test_a_failed_export_is_a_failed_run(board, bucket):
    def export(facts, progressed):
        raise NodeError("the bucket is full")

    finished(board)
    assert Coordinator(cluster(), board, bucket, export, LIMITS).run() == 0
    assert status(bucket)["state"] == "failed"
    assert status(bucket)["error"]["message"] == "export failed: the bucket is full"
    assert status(bucket)["model_uri"] is None


def no_export(facts, progressed):
    raise AssertionError("must not export")


def test_a_failed_task_fails_the_run_with_its_log(board, bucket):
    write_heartbeat(board, "chief-0", "failed", step=3)
    marker = {"task": "chief-0", "node": "n2", "message": "exit code 3", "log_tail": ["boom"]}
    board.write("FAILED", json.dumps(marker).encode())
    board.write("chief-0.log", b"boom\n")
    assert Coordinator(cluster(), board, bucket, no_export, LIMITS).run() == 0
    assert status(bucket)["state"] == "failed"
    assert status(bucket)["error"] == marker
    assert bucket.objects["logs/chief-0.log"] == b"boom\n"


def test_the_last_status_says_how_every_task_ended(tmp_path, bucket):
    """The export may be over sooner than those who have only to see that the chief is done."""
    looks = []

    class FakeSlowWorker(FakeBoard):
        def names(self) -> list[str]:
            if "status.json" in bucket.objects and status(bucket)["state"] == "exporting":
                looks.append(1)
            if len(looks) == 3:
                self.write("worker-0.log", b"its last word\n")
                write_heartbeat(self, "worker-0", "stopped")
            return super().names()

    board = FakeSlowWorker(tmp_path)
    write_heartbeat(board, "worker-0")
    finished(board)
    subject = Coordinator(cluster(), board, bucket, lambda *_: None, replace(LIMITS, logs=60))
    assert subject.run() == 0
    told = status(bucket)
    assert (told["state"], told["tasks"]["worker-0"]["state"]) == ("succeeded", "stopped")
    assert bucket.objects["logs/worker-0.log"] == b"its last word\n"
    assert len(looks) == 3


@pytest.mark.parametrize(("lost", "state"), [(("worker-0",), "lost"), ((), "running")])
def test_it_does_not_wait_for_ever_for_tasks_to_end(board, bucket, monkeypatch, lost, state):
    finished(board)
    write_heartbeat(board, "worker-0")
    waits = []
    monkeypatch.setattr("mayfly_train.coordinate.time.sleep", waits.append)
    subject = Coordinator(cluster(), board, bucket, no_export, LIMITS)
    subject.state = replace(subject.state, phase=SUCCEEDED, lost=lost)
    assert subject.run() == 0
    assert status(bucket)["tasks"]["worker-0"]["state"] == state
    assert bool(waits) is not bool(lost)


def test_its_own_verdict_stops_the_tasks(board, bucket):
    write_heartbeat(board, "chief-0")
    subject = Coordinator(cluster(), board, bucket, no_export, LIMITS)
    subject.state = replace(subject.state, started=subject.state.started - 101)
    assert subject.run() == 0
    assert "did not start" in json.loads(board.read("FAILED"))["message"]


def chief_that_saves(board: FakeBoard):
    """A coordinator's clock that does what the chief's supervisor does when it is asked to stop."""

    def clock() -> float:
        if "STOP" in board.names() and "STOPPED" not in board.names():
            write_heartbeat(board, "chief-0", "stopped", step=321)
            board.write("STOPPED", b"{}")
        return time.time()

    return clock


def over_time(board, bucket, export) -> Coordinator:
    write_heartbeat(board, "chief-0", step=3)
    subject = Coordinator(cluster(max_duration_s=1), board, bucket, export, LIMITS)
    subject.state = replace(subject.state, started=subject.state.started - 2)
    subject.clock = chief_that_saves(board)
    return subject


def test_a_run_that_reaches_a_limit_exports_what_there_is(board, bucket):
    exported = []
    subject = over_time(board, bucket, lambda facts, progressed: exported.append(facts))
    assert subject.run() == 0
    assert "FAILED" not in board.names()
    (facts,) = exported
    assert (facts["reason"], facts["global_step"], facts["steps"]) == ("max_duration", 321, 1000)
    told = status(bucket)
    assert (told["state"], told["reason"], told["error"]) == ("stopped", "max_duration", None)
    assert "1 s" in told["stopped_because"]
    assert told["model_uri"] == f"{cluster().run_uri}/model"
    events = [json.loads(line) for line in bucket.objects["events.jsonl"].splitlines()]
    states = [event["state"] for event in events if event["event"] == "state"]
    assert states == ["stopping", "exporting", "stopped"]


def test_a_run_that_is_stopped_before_its_first_checkpoint_has_failed(board, bucket):
    def export(facts, progressed):
        raise NothingThere("no model and no checkpoint in /m")

    assert over_time(board, bucket, export).run() == 0
    told = status(bucket)
    assert (told["state"], told["reason"], told["model_uri"]) == ("failed", "max_duration", None)
    assert told["error"]["message"].endswith("stopped before there was a checkpoint")


def test_others_are_told_to_end_though_the_chief_has_not_saved_in_time(board, bucket):
    subject = over_time(board, bucket, lambda facts, progressed: None)
    subject.clock = time.time
    subject.limits = replace(LIMITS, stop=0.0)
    assert subject.run() == 0
    assert {"STOP", "STOPPED"} <= set(board.names())
    assert status(bucket)["state"] == "stopped"


def test_it_goes_on_where_it_was_killed(board, bucket):
    write_heartbeat(board, "chief-0", step=500)
    first = Coordinator(cluster(), board, bucket, no_export, LIMITS)
    first.step()
    first.step()
    write_heartbeat(board, "chief-0", step=400, restores=1, restored_step=400)
    first.step()
    first.step()
    finished(board)
    write_heartbeat(board, "chief-0", "succeeded", step=1000, restores=1, restored_step=400)
    second = Coordinator(cluster(), board, bucket, lambda facts, progressed: None, LIMITS)
    assert second.run() == 0
    told = status(bucket)
    assert told["samples_seen"] == 1000 * 128
    assert told["samples_processed"] == 1100 * 128
    events = [json.loads(line)["event"] for line in bucket.objects["events.jsonl"].splitlines()]
    assert events.count("rewind") == 1


def test_a_run_that_is_over_is_not_exported_again(board, bucket):
    finished(board)
    Coordinator(cluster(), board, bucket, lambda facts, progressed: None, LIMITS).run()
    assert Coordinator(cluster(), board, bucket, no_export, LIMITS).run() == 0
    assert status(bucket)["state"] == "succeeded"


class DeafBucket(FakeBucket):
    """Fails its first writes, as S3 does in a short outage."""

    def __init__(self, failures: int) -> None:
        super().__init__()
        self.failures = failures

    def write(self, path, data, content_type):
        if self.failures > 0:
            self.failures -= 1
            raise NodeError("S3 does not answer")
        super().write(path, data, content_type)


def test_a_short_outage_of_s3_loses_no_event(board):
    bucket = DeafBucket(failures=3)
    finished(board)
    Coordinator(cluster(), board, bucket, lambda facts, progressed: None, LIMITS).run()
    events = [json.loads(line) for line in bucket.objects["events.jsonl"].splitlines()]
    assert {e["task"] for e in events if e["event"] == "task"} == {"chief-0", "evaluator-0"}
    assert status(bucket)["state"] == "succeeded"


def test_an_end_that_s3_never_takes_is_an_error(board):
    finished(board)
    subject = Coordinator(
        cluster(), board, DeafBucket(10**6), lambda facts, progressed: None, LIMITS
    )
    with pytest.raises(NodeError, match="could not be written to S3"):
        subject.run()


class DeadBoard(FakeBoard):
    """An HDFS that has gone away."""

    def names(self):
        raise NodeError("no answer")


def test_a_run_whose_hdfs_is_gone_fails(tmp_path, bucket):
    subject = Coordinator(cluster(), DeadBoard(tmp_path), bucket, no_export, LIMITS)
    subject.answered -= 11
    subject.step()
    message = status(bucket)["error"]["message"]
    assert message == "HDFS has not answered for 10 s — its NameNode is on node n1"


def test_a_hung_trainer_finds_a_marker(board, bucket):
    write_heartbeat(board, "chief-0", step=3)
    subject = Coordinator(cluster(), board, bucket, no_export, LIMITS)
    subject.state = replace(subject.state, restarts={"worker-0": 2})
    subject.step()
    assert "RESTART-worker-0-2" in board.names()


class StuckBoard(FakeBoard):
    """An HDFS whose client waits for ever."""

    def names(self):
        time.sleep(60)


def test_a_call_that_never_ends_is_an_error(tmp_path):
    with pytest.raises(NodeError, match="has not answered for 0 s"):
        TimedBoard(StuckBoard(tmp_path), 0.05).names()
    with pytest.raises(NodeError, match="no answer"):
        TimedBoard(DeadBoard(tmp_path)).names()
    assert TimedBoard(FakeBoard(tmp_path)).names() == []
