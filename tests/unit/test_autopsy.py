"""The verdicts, on documents in the forms that the code writes."""

from __future__ import annotations

import pytest

from mayfly.autopsy import Evidence, examine, excerpt, failed_tasks

RUN = "faces-261128-100000-abcd"
KEY_ERROR = """\
preparing the model
Traceback (most recent call last):
  File "/opt/mayfly/programs/user/train.py", line 7, in <module>
    train(columns)
  File "/opt/mayfly/programs/user/train.py", line 6, in train
    return columns["price"]
KeyError: 'price'
supervisor: chief-0 ended with exit code 1 (attempt 3)
"""
PEER_LOST = """\
Traceback (most recent call last):
  File "/opt/mayfly/programs/cifar10.py", line 300, in <module>
    main()
tensorflow.python.framework.errors_impl.UnavailableError: Socket closed
"""
CONTEXTUALIZATION = """\
2026-11-28 10:00:04.960993: Select master VM
VM 0:
TASK [Change the host name] ****
fatal: [10.0.0.2_0]: FAILED! => {"changed": false, "msg": "busy"}
...ignoring
TASK [mayfly.training.%s] ****
fatal: [10.0.0.3_1]: FAILED! => {"changed": true, "cmd": ["x"], "msg": "%s", "stderr": "%s"}
PLAY RECAP ****
"""


def record(**given):
    known = {
        "run": RUN,
        "cloud": "local",
        "state": "destroyed",
        "outcome": "failed",
        "uri": f"s3://mayfly/{RUN}/",
        "error": None,
        "summary": None,
        "created": "2026-11-28T10:00:00.000Z",
        "updated": "2026-11-28T10:09:00.000Z",
    }
    return {**known, **given}


def task(state="failed", exit_code=1, node="10.0.0.3_1"):
    return {"node": node, "state": state, "attempts": 3, "exit_code": exit_code, "updated": "…"}


def failed_training(message: str, log="", exit_code=1, name="chief-0", **given) -> Evidence:
    error = {"task": name, "node": "10.0.0.3_1", "message": message, "log_tail": log.splitlines()}
    status = {
        "state": "failed",
        "phases": {"staging": 7.4, "training": 60.0, "export": None},
        "tasks": {name: task(exit_code=exit_code)} if name else {},
        "error": error,
    }
    return Evidence(record(), status=status, logs={name: log} if log else {}, **given)


def ended(code: int | None) -> str:
    how = "without an exit code" if code is None else f"with exit code {code}"
    return f"chief-0 ended {how} and is not restarted any more"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (
            "10.0.0.3_1 (10.0.0.3) → 10.0.0.2_0 (10.0.0.2) port 2222: connection refused"
            " — nothing listens there, or a firewall rejects it: look there",
            "do not reach each other",
        ),
        (
            "10.0.0.3_1 (10.0.0.3) port 2222: in use by nginx (pid 7)"
            " — end it: the port is needed for TensorFlow's server",
            "is taken on a node",
        ),
        (
            "10.0.0.3_1 (10.0.0.3): S3 access denied: s3://mayfly/r — check the keys and what they"
            " may do",
            "refused",
        ),
    ],
)
def test_what_preflight_says(line, says):
    report = examine(failed_training(line, log=f"preflight: {line}", name="preflight"))
    assert report["verdict"] == "infrastructure"
    assert says in report["why"]
    assert report["error"]["message"] == line
    assert report["error"]["lines"] == [f"preflight: {line}"]


@pytest.mark.parametrize(
    ("message", "verdict", "says"),
    [
        ("the run took longer than max_duration, 7200 s", "limits", "max_duration"),
        (
            "HDFS has not answered for 100 s — its NameNode is on node ps-0",
            "infrastructure",
            "HDFS",
        ),
        (
            "ps-0 on node 10.0.0.2_0 has given no sign of life for 150 s"
            " — the run cannot go on without it",
            "infrastructure",
            "a task that the others need",
        ),
        (
            "no new global step for 150 s, at step 40 — a hung parameter server stops all; see"
            " the tasks' logs",
            "infrastructure",
            "a task that the others need",
        ),
        (
            "training did not start within 900 s — never heard of: worker-0 on node 10.0.0.4_2",
            "infrastructure",
            "never found each other",
        ),
        (
            "export failed: S3 access denied: s3://mayfly/r/model/x — check the keys and what they"
            " may do",
            "infrastructure",
            "refused",
        ),
        (
            "export failed: cannot reach http://10.0.0.1:8333 for s3://mayfly/r — check the"
            " endpoint and network",
            "infrastructure",
            "training had succeeded",
        ),
        ("HDFS is full: 0 bytes are left — use more nodes", "infrastructure", "is full"),
    ],
)
def test_what_the_coordinator_says(message, verdict, says):
    report = examine(failed_training(message, name=None))
    assert report["verdict"] == verdict
    assert says in report["why"]
    assert report["error"]["message"] == message
    assert report["advice"]


@pytest.mark.parametrize(
    ("log", "code", "verdict", "says"),
    [
        (KEY_ERROR, 1, "program", "the program itself"),
        ("the user's own mistake: no such column 'price'\n", 1, "program", "the program itself"),
        ("usage: train.py [-h]\ntrain.py: error: argument --lr\n", 2, "program", "arguments"),
        ("ModuleNotFoundError: No module named 'pandas'\n", 1, "program", "not installed"),
        ("step 10\nstep 20\n", -9, "infrastructure", "killed from outside"),
        ("ResourceExhaustedError: OOM when allocating tensor\n", 1, "program", "memory"),
        ("DataLossError: corrupted record at 4711\n", 1, "data", "records"),
        ("OSError: [Errno 28] No space left on device\n", 1, "infrastructure", "is full"),
        (PEER_LOST, 1, "infrastructure", "lost the connection"),
        (
            "supervisor: chief-0 hangs: its server has not answered for 45 s — it is killed and"
            " started again\n",
            None,
            "program",
            "did not answer",
        ),
    ],
)
def test_what_a_task_leaves(log, code, verdict, says):
    report = examine(failed_training(ended(code), log, code))
    assert report["verdict"] == verdict
    assert says in report["why"]
    assert (report["error"]["task"], report["error"]["node"]) == ("chief-0", "10.0.0.3_1")


def test_the_lines_are_the_last_traceback_alone():
    report = examine(failed_training(ended(1), KEY_ERROR * 3))
    assert report["error"]["lines"][0] == "Traceback (most recent call last):"
    assert report["error"]["lines"][-1] == "KeyError: 'price'"
    assert len(report["error"]["lines"]) == 6


def test_a_chain_of_tracebacks_is_kept_whole():
    first = 'Traceback (most recent call last):\n  File "a"\nKeyError: 1\n\n'
    link = "During handling of the above exception, another exception occurred:\n\n"
    second = 'Traceback (most recent call last):\n  File "b"\nValueError: 2\n'
    lines = excerpt(f"hello\n{first}{link}{second}bye\n")
    assert (lines[0], lines[2], lines[-1]) == (
        "Traceback (most recent call last):",
        "KeyError: 1",
        "ValueError: 2",
    )


def test_the_task_that_went_first_is_named_when_another_only_lost_it():
    """The worker breaks on its own error; the chief then loses a peer, and ends the run."""
    evidence = failed_training(ended(1), PEER_LOST)
    evidence.status["tasks"]["worker-0"] = task(node="10.0.0.4_2")
    at = "2026-11-28T10:05:00.000Z"
    events = [
        {"time": at, "run": RUN, "event": "task", "task": "worker-0", "state": "failed"},
        {"time": at[:-5] + "9Z", "run": RUN, "event": "task", "task": "chief-0", "state": "failed"},
    ]
    logs = {"chief-0": PEER_LOST, "worker-0": KEY_ERROR}
    report = examine(Evidence(evidence.run, status=evidence.status, events=events, logs=logs))
    error = report["error"]
    assert (report["verdict"], error["task"], error["node"]) == (
        "program",
        "worker-0",
        "10.0.0.4_2",
    )
    assert error["time"] == at
    assert error["lines"][-1] == "KeyError: 'price'"


@pytest.mark.parametrize(
    ("name", "message", "stderr", "verdict"),
    [
        (
            "agent : Install the packages",
            "non-zero return code",
            "no route to host",
            "infrastructure",
        ),
        (
            "hadoop : Require HDFS",
            "HDFS is out of reach with 0 of 3 datanodes",
            "",
            "infrastructure",
        ),
        ("trainer : Check out the program", "fatal: repository not found", "", "program"),
        ("trainer : Require the entrypoint", "no train.py in the repository", "", "program"),
        ("trainer : Start the units", "Unable to start service", "", "infrastructure"),
        (
            "dataset : Copy this node's share",
            "non-zero return code",
            "s3://mayfly/d/a does not match its manifest: 3 bytes",
            "data",
        ),
        ("dataset : Copy this node's share", "non-zero return code", "killed", "infrastructure"),
    ],
)
def test_contextualization(name, message, stderr, verdict):
    evidence = Evidence(record(), messages=CONTEXTUALIZATION % (name, message, stderr))
    report = examine(evidence)
    assert report["verdict"] == verdict
    assert report["error"]["node"] == "10.0.0.3_1"
    assert (stderr or message) in report["error"]["message"]
    assert name.rpartition(" : ")[2] in report["error"]["message"]
    assert "busy" not in str(report)
    assert any(e["bad"] and e["where"] == "10.0.0.3_1" for e in report["timeline"])


def test_a_failed_task_without_json_is_shown_as_it_is():
    text = "TASK [hadoop : Install]\nfatal: [h]: UNREACHABLE! => no JSON\n"
    assert [(f.task, f.host, f.message) for f in failed_tasks(text)] == [
        ("hadoop : Install", "h", "no JSON")
    ]


def test_the_first_of_several_failed_tasks_is_the_oldest_wherever_it_stands():
    text = "".join(
        f"TASK [agent : {name}] ***\nSaturday 28 November 2026  10:0{minute}:54.027859 \n"
        f'fatal: [{name}]: FAILED! => {{"msg": "no"}}\n'
        for name, minute in (("late", 7), ("early", 5))
    )
    report = examine(Evidence(record(), messages=text))
    assert (report["error"]["node"], report["error"]["time"]) == ("early", "2026-11-28T10:05:54Z")
    assert report["error"]["lines"][0] == "TASK [agent : early] ***"
    shown = [(e["time"], e["where"]) for e in report["timeline"] if e["bad"]]
    assert shown == [("2026-11-28T10:05:54Z", "early"), ("2026-11-28T10:07:54Z", "late")]


def test_staging_that_failed_is_the_cause_of_the_task_that_did():
    staging = [
        {
            "share": 1,
            "started": "2026-11-28T10:03:00Z",
            "finished": "2026-11-28T10:03:09Z",
            "bytes_done": 5,
            "error": "s3://mayfly/d/train-3 ends within a record, though its manifest agrees",
        }
    ]
    text = CONTEXTUALIZATION % ("dataset : Copy this node's share", "non-zero return code", "x")
    report = examine(Evidence(record(), staging=staging, messages=text))
    assert (report["verdict"], report["error"]["task"]) == ("data", "staging")
    assert report["error"]["node"] == "10.0.0.3_1"
    assert report["error"]["time"] == "2026-11-28T10:03:09Z"


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (
            "the run has given no sign of life for 2 min 30 s: step 7 of 100 — node 2 off",
            "infrastructure",
        ),
        ("no progress for 20 min 00 s (limits.idle): step 7 of 100", "limits"),
        ("the nodes were not made: node 1 failed", "infrastructure"),
        ("something that nobody has thought of", "infrastructure"),
        ("contextualization failed: task runtime_ps_ps", "infrastructure"),
    ],
)
def test_from_the_ledger_alone(error, verdict):
    tail = ["TASK [mayfly.training.runtime : Install]", "fatal: [n]: FAILED! => {}"]
    summary = {"phases": {"image": 0.0, "training": 12.34}, "error": {"log_tail": tail}}
    report = examine(Evidence(record(error=error, summary=summary), notes=["no bucket"]))
    assert report["verdict"] == verdict
    assert report["error"]["message"].startswith(error.split(":")[0])
    assert report["phases"] == [{"name": "training", "seconds": 12.3}]
    assert report["notes"] == ["no bucket"]
    assert report["tasks"] == []


def test_a_call_that_failed_tells_when():
    calls = [
        {
            "action": "create",
            "target": "x",
            "intended": "…:01",
            "outcome": "failed",
            "ended": "…:02",
        },
        {
            "action": "destroy",
            "target": "x",
            "intended": "…:03",
            "outcome": "done",
            "ended": "…:04",
        },
    ]
    told = "IM does not answer at http://127.0.0.1:8800: ConnectionError — is the service running?"
    report = examine(Evidence(record(error=told), journal=calls))
    assert (report["verdict"], report["error"]["time"]) == ("infrastructure", "…:02")
    assert "IM service" in report["why"]
    assert examine(Evidence(record(error=told), journal=calls[1:]))["error"]["time"] == "…:03"


def test_a_run_that_succeeded_has_no_fault():
    status = {"state": "succeeded", "accuracy": 0.89, "error": None, "tasks": {}}
    report = examine(Evidence(record(outcome="succeeded"), status=status))
    assert (report["verdict"], report["error"], report["advice"]) == ("none", None, [])
    assert report["progress"] == {"accuracy": 0.89}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"outcome": "interrupted"}, "interrupted"),
        ({"outcome": None, "state": "training"}, "has not ended"),
    ],
)
def test_a_run_without_a_verdict(given, says):
    report = examine(Evidence(record(**given)))
    assert report["verdict"] == "none"
    assert says in report["why"]


def test_nodes_that_are_left_are_part_of_the_advice():
    kept = Evidence(record(state="kept", error="export failed: x"))
    advice = examine(kept)["advice"]
    assert any(f"mayfly export {RUN}" in line for line in advice)
    assert any(f"mayfly destroy {RUN}" in line for line in advice)


def test_the_timeline_is_in_order_and_shows_events_of_any_kind():
    journal = [
        {
            "action": "create",
            "target": "infrastructure",
            "outcome": "done",
            "detail": "infra-1",
            "intended": "2026-11-28T10:00:01.000Z",
            "ended": "2026-11-28T10:00:02.000Z",
        },
        {
            "action": "destroy",
            "target": "infra-1",
            "outcome": None,
            "detail": None,
            "intended": "2026-11-28T10:08:00.000Z",
            "ended": None,
        },
    ]
    events = [{"time": "2026-11-28T10:05:00Z", "run": RUN, "event": "new", "colour": "blue"}]
    timeline = examine(Evidence(record(), journal=journal, events=events))["timeline"]
    assert [entry["what"] for entry in timeline[:-1]] == [
        "the run was registered",
        "create infrastructure: asked for",
        "create infrastructure: done: infra-1",
        "new: colour blue",
        "destroy infra-1: asked for",
    ]
