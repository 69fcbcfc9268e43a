"""The supervisor with real child processes; HDFS is a directory (FakeBoard)."""

from __future__ import annotations

import errno
import json
import os
import shlex
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.train_fakes import FakeBoard, cluster, cluster_running

from mayfly_train import markers
from mayfly_train.lifecycle import RunState, dump_state
from mayfly_train.markers import MEMORY
from mayfly_train.probe import Pulse
from mayfly_train.supervise import (
    BAD_COMMAND,
    CHILD_FAILED,
    GIVE_UP,
    OK,
    TOO_LONG,
    Settings,
    Supervisor,
    child_environment,
    gives_up,
)
from mayfly_train.topology import parse_task

SLEEP = "import time\nprint('up', flush=True)\ntime.sleep(600)\n"


@pytest.fixture
def board(tmp_path: Path) -> FakeBoard:
    return FakeBoard(tmp_path / "board")


def supervisor(tmp_path, board, task, program, grace=0.3, **changes):
    script = tmp_path / "program.py"
    script.write_text(program)
    made = Settings(
        grace=dict.fromkeys(("ps", "worker", "evaluator"), grace),
        kill_after=1.0,
        heartbeat=0.1,
        poll=0.05,
        board_wait=1.0,
        state_dir=tmp_path / "state",
        log_dir=tmp_path / "log",
        ended_file=tmp_path / "ended",
        alive_file=tmp_path / "alive",
        overtime=0.0,
        stay_poll=None,
    )
    return Supervisor(cluster_running(script, **changes), parse_task(task), board, made)


def staying(subject: Supervisor, poll: float = 0.05) -> Supervisor:
    """The same supervisor, which waits for the run's end."""
    subject.settings = replace(subject.settings, stay_poll=poll)
    return subject


def heartbeat(board: FakeBoard, task: str) -> dict:
    return json.loads(board.read(f"{task}.json") or b"{}")


def in_background(target) -> tuple[threading.Thread, list[int]]:
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(target.run()))
    thread.start()
    return thread, codes


def wait_until(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    """Whether a process runs; one that is dead but not yet reaped does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_the_chiefs_success_is_marked_and_told(tmp_path, board):
    program = (
        "import json, os, sys\n"
        "config = json.loads(os.environ['TF_CONFIG'])\n"
        "print('task', config['task'], sys.argv[1:], file=sys.stderr)\n"
        "print('INFO:tensorflow:loss = 0.5, step = 1000 (1.0 sec)', file=sys.stderr)\n"
    )
    assert supervisor(tmp_path, board, "chief-0", program).run() == OK
    assert json.loads(board.read("DONE"))["step"] == 1000
    told = heartbeat(board, "chief-0")
    assert (told["state"], told["attempt"], told["exit_code"]) == ("succeeded", 1, 0)
    assert told["progress"]["loss"] == 0.5
    log = board.read("chief-0.log").decode()
    assert "'type': 'chief'" in log and "'--train-steps', '1000'" in log
    assert (tmp_path / "log/chief-0.log").read_text() == log


def test_all_that_the_chief_has_to_tell_is_there_before_its_success_is(tmp_path, board):
    """The coordinator exports as soon as it sees the marker, with the figures that it finds."""
    found: dict[str, object] = {}

    class Watched(FakeBoard):
        def write(self, name: str, data: bytes) -> None:
            if name == "DONE":
                found.update(heartbeat(self, "chief-0"), log=self.read("chief-0.log"))
            super().write(name, data)

    told = "progress: evaluated_step=300 accuracy=0.8486"
    program = f"print('progress: step=300 loss=0.4')\nprint({told!r})"
    assert supervisor(tmp_path, Watched(tmp_path / "board"), "chief-0", program).run() == OK
    assert (found["state"], found["exit_code"]) == ("succeeded", 0)
    assert (found["progress"]["accuracy"], found["progress"]["step"]) == (0.8486, 300)
    assert told.encode() in found["log"]


def test_a_log_is_left_before_the_end_is_told(tmp_path):
    """The coordinator copies logs once it sees that all have ended."""
    logs = []

    class Watched(FakeBoard):
        def write(self, name: str, data: bytes) -> None:
            if name == "worker-0.json" and json.loads(data)["state"] == "succeeded":
                logs.append(self.read("worker-0.log"))
            super().write(name, data)

    assert supervisor(tmp_path, Watched(tmp_path / "board"), "worker-0", "print(1)").run() == OK
    assert logs == [b"1\n"]


def test_a_log_has_all_attempts_of_its_run_and_nothing_of_another(tmp_path, board):
    (tmp_path / "log").mkdir()
    (tmp_path / "log/worker-0.log").write_text("an earlier run\n")
    supervisor(tmp_path, board, "worker-0", "print('one')\nraise SystemExit(1)").run()
    supervisor(tmp_path, board, "worker-0", "print('two')").run()
    assert board.read("worker-0.log") == b"one\ntwo\n"


def test_a_workers_success_leaves_no_marker(tmp_path, board):
    assert supervisor(tmp_path, board, "worker-0", "pass").run() == OK
    assert "DONE" not in board.names()


def test_a_failed_child_fails_the_supervisor_and_attempts_are_counted(tmp_path, board):
    for attempt in (1, 2):
        program = "print('loss = 0.5, step = 7')\nraise SystemExit(3)"
        assert supervisor(tmp_path, board, "chief-0", program).run() == CHILD_FAILED
        told = heartbeat(board, "chief-0")
        assert (told["state"], told["attempt"], told["exit_code"]) == ("failed", attempt, 3)
    assert not {"DONE", "FAILED"} & set(board.names())


def test_progress_goes_on_where_the_last_attempt_was(tmp_path, board):
    restored = "print('Restoring parameters from /m/model.ckpt-200')\nraise SystemExit(1)"
    for _ in range(2):
        supervisor(tmp_path, board, "chief-0", restored).run()
    assert heartbeat(board, "chief-0")["progress"]["restores"] == 2


def test_a_usage_error_is_not_retried(tmp_path, board):
    program = "import argparse\nargparse.ArgumentParser().parse_args()"
    assert supervisor(tmp_path, board, "chief-0", program).run() == BAD_COMMAND


def test_a_child_killed_by_a_signal_has_failed(tmp_path, board):
    program = "import os\nos.kill(os.getpid(), 9)"
    assert supervisor(tmp_path, board, "worker-0", program).run() == CHILD_FAILED
    assert heartbeat(board, "worker-0")["exit_code"] == -9


@pytest.mark.parametrize("task", ["ps-0", "worker-0"])
def test_a_task_is_ended_after_the_chiefs_success(tmp_path, board, task):
    thread, codes = in_background(supervisor(tmp_path, board, task, SLEEP))
    wait_until(lambda: heartbeat(board, task).get("state") == "running")
    board.write("DONE", b"{}")
    thread.join(30)
    assert codes == [OK]
    assert heartbeat(board, task)["state"] == "succeeded"


@pytest.mark.parametrize("task", ["ps-0", "worker-0"])
def test_who_only_does_what_the_chief_asks_ends_with_it(tmp_path, board, task):
    changes = {"grace": 600, "engine": "keras-ps"}
    thread, codes = in_background(supervisor(tmp_path, board, task, SLEEP, **changes))
    wait_until(lambda: heartbeat(board, task).get("state") == "running")
    board.write("DONE", b"{}")
    thread.join(30)
    assert codes == [OK]
    assert heartbeat(board, task)["state"] == "succeeded"


def test_a_worker_may_finish_in_its_grace(tmp_path, board):
    program = "import sys, time\nprint('up', flush=True)\ntime.sleep(1)\nprint('last word')"
    thread, codes = in_background(supervisor(tmp_path, board, "worker-0", program, grace=60))
    wait_until(lambda: heartbeat(board, "worker-0").get("state") == "running")
    board.write("DONE", b"{}")
    thread.join(30)
    assert codes == [OK]
    assert b"last word" in board.read("worker-0.log")


def test_a_worker_that_loses_its_server_at_the_end_has_succeeded(tmp_path, board):
    program = (
        "import os, sys, time\n"
        f"done = {str(tmp_path / 'board/DONE')!r}\n"
        "while not os.path.exists(done): time.sleep(.05)\n"
        "sys.exit(1)\n"
    )
    thread, codes = in_background(supervisor(tmp_path, board, "worker-0", program, grace=60))
    wait_until(lambda: heartbeat(board, "worker-0").get("state") == "running")
    board.write("DONE", b"{}")
    thread.join(30)
    assert codes == [OK]
    assert heartbeat(board, "worker-0")["state"] == "succeeded"


def test_an_evaluator_that_fails_at_the_end_is_restarted(tmp_path, board):
    board.write("DONE", b"{}")
    result = supervisor(tmp_path, board, "evaluator-0", "raise SystemExit(1)", grace=60).run()
    assert result == CHILD_FAILED


def test_an_evaluator_out_of_time_is_stopped(tmp_path, board):
    board.write("DONE", b"{}")
    assert supervisor(tmp_path, board, "evaluator-0", SLEEP).run() == OK
    assert heartbeat(board, "evaluator-0")["state"] == "stopped"


def test_all_tasks_stop_when_the_run_has_failed(tmp_path, board):
    thread, codes = in_background(supervisor(tmp_path, board, "chief-0", SLEEP))
    wait_until(lambda: heartbeat(board, "chief-0").get("state") == "running")
    board.write("FAILED", b"{}")
    thread.join(30)
    assert codes == [OK]
    assert heartbeat(board, "chief-0")["state"] == "stopped"
    assert "DONE" not in board.names()


def test_a_failure_after_the_chiefs_success_is_not_the_parameter_servers(tmp_path, board):
    thread, codes = in_background(supervisor(tmp_path, board, "ps-0", SLEEP, grace=60))
    wait_until(lambda: heartbeat(board, "ps-0").get("state") == "running")
    board.write("DONE", b"{}")
    board.write("FAILED", b"{}")
    thread.join(30)
    assert codes == [OK]
    assert heartbeat(board, "ps-0")["state"] == "succeeded"


@pytest.mark.parametrize(
    ("marker", "state"), [("DONE", "succeeded"), ("FAILED", "stopped"), ("STOPPED", "stopped")]
)
def test_a_run_that_is_over_starts_nothing(tmp_path, board, marker, state):
    board.write(marker, b"{}")
    program = f"open({str(tmp_path / 'started')!r}, 'w')"
    assert supervisor(tmp_path, board, "ps-0", program).run() == OK
    assert heartbeat(board, "ps-0")["state"] == state
    assert not (tmp_path / "started").exists()


def test_a_task_over_max_duration_fails_the_run(tmp_path, board):
    subject = supervisor(tmp_path, board, "chief-0", SLEEP, max_duration_s=3)
    assert subject.run() == TOO_LONG
    failed = json.loads(board.read("FAILED"))
    assert (failed["task"], failed["node"]) == ("chief-0", "n2")
    assert "max_duration, 3 s" in failed["message"]
    assert failed["log_tail"] == ["up"]


def test_max_duration_counts_from_the_first_start(tmp_path, board):
    first = supervisor(tmp_path, board, "chief-0", "raise SystemExit(1)")
    first.run()
    state = json.loads(first.state_file.read_text())
    first.state_file.write_text(json.dumps({**state, "first_start": time.time() - 7200}))
    assert supervisor(tmp_path, board, "chief-0", SLEEP).run() == TOO_LONG


SAVES = """
import signal, sys, time
def save(*_):
    print("a line\\n" * 3000 + "progress: step=77", flush=True)
    open({saved!r}, "w").close()
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
print("up", flush=True)
time.sleep(600)
"""


def test_the_chief_saves_when_a_limit_is_reached_and_the_others_end_after_it(tmp_path, board):
    saved = tmp_path / "saved"
    chief, codes = in_background(
        supervisor(tmp_path, board, "chief-0", SAVES.format(saved=str(saved)))
    )
    wait_until(lambda: b"up" in markers.log_end(tmp_path / "log/chief-0.log"))
    worker, worker_codes = in_background(supervisor(tmp_path, board, "worker-0", SLEEP))
    wait_until(lambda: heartbeat(board, "worker-0").get("state") == "running")
    board.write("STOP", b"{}")
    chief.join(30)
    worker.join(30)
    assert saved.exists()
    assert (codes, worker_codes) == ([OK], [OK])
    assert json.loads(board.read("STOPPED"))["step"] == 77
    assert heartbeat(board, "chief-0")["progress"]["step"] == 77
    assert {heartbeat(board, task)["state"] for task in ("chief-0", "worker-0")} == {"stopped"}
    assert not {"DONE", "FAILED"} & set(board.names())
    assert json.loads((tmp_path / "ended").read_text())["run"] == cluster().run


@pytest.mark.parametrize("code", [143, 1, 0])
def test_a_task_that_ends_while_the_chief_saves_has_stopped_and_is_not_started_again(
    tmp_path, board, code
):
    board.write("STOP", b"{}")
    assert supervisor(tmp_path, board, "worker-0", f"raise SystemExit({code})").run() == OK
    assert heartbeat(board, "worker-0")["state"] == "stopped"
    board.write("DONE", b"{}")  # the chief was at the end of its work when it was asked
    assert supervisor(tmp_path, board, "worker-0", "pass").run() == OK
    assert heartbeat(board, "worker-0")["state"] == "succeeded"


def test_a_chief_that_died_before_it_was_asked_is_not_started_again(tmp_path, board):
    board.write("STOP", b"{}")
    program = f"open({str(tmp_path / 'started')!r}, 'w')"
    assert supervisor(tmp_path, board, "worker-0", "pass").run() == OK
    assert "STOPPED" not in board.names()
    assert supervisor(tmp_path, board, "chief-0", program).run() == OK
    assert "STOPPED" in board.names()
    assert not (tmp_path / "started").exists()


def test_a_program_that_ends_by_itself_is_given_up_sooner_than_one_that_is_killed(tmp_path, board):
    broken = [supervisor(tmp_path, board, "worker-0", "raise SystemExit(5)") for _ in range(3)]
    assert [each.run() for each in broken] == [CHILD_FAILED, CHILD_FAILED, GIVE_UP]
    kill = "import os\nos.kill(os.getpid(), 9)"
    killed = [supervisor(tmp_path, board, "ps-0", kill) for _ in range(6)]
    assert [each.run() for each in killed] == [CHILD_FAILED] * 5 + [GIVE_UP]


def test_old_failures_do_not_count():
    own = [(0.0, True), (1.0, True), (2.0, True)]
    assert gives_up(own, 3.0)
    assert not gives_up(own, 601.0)


def test_a_program_whose_server_falls_silent_is_killed(tmp_path, board, monkeypatch):
    monkeypatch.setattr(Pulse, "silent_for", lambda self: 46.0)
    subject = supervisor(tmp_path, board, "worker-0", SLEEP)
    assert subject.run() == CHILD_FAILED
    assert heartbeat(board, "worker-0")["exit_code"] == -9


def test_a_trainer_restarts_when_it_is_asked_to_and_only_once(tmp_path, board):
    board.write("RESTART-worker-0-1", b"{}")
    assert supervisor(tmp_path, board, "worker-0", SLEEP).run() == CHILD_FAILED
    assert supervisor(tmp_path, board, "worker-0", "pass").run() == OK


class FullPath(type(Path())):
    """A file on a disk that is full."""

    def open(self, *_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    def read_text(self, *_, **__):
        raise FileNotFoundError(self)

    write_text = open


def test_a_full_disk_drops_the_log_and_ends_nothing(tmp_path, board):
    full = FullPath(tmp_path / "full")
    subject = supervisor(tmp_path, board, "worker-0", "print('x' * 70_000)\nprint('step = 1')")
    subject.log, subject.state_file = full, full
    assert subject.run() == OK
    told = heartbeat(board, "worker-0")
    assert (told["state"], told["disk_full"]) == ("succeeded", True)


def test_attempts_are_counted_without_a_disk(tmp_path, board):
    for attempt in (1, 2):
        subject = supervisor(tmp_path, board, "worker-0", "raise SystemExit(1)")
        subject.state_file = FullPath(tmp_path / "full")
        subject.run()
        assert heartbeat(board, "worker-0")["attempt"] == attempt


@pytest.mark.parametrize("marker", ["DONE", "FAILED"])
def test_the_end_of_the_run_is_noted_on_the_node(tmp_path, board, marker):
    (tmp_path / "ended").write_text("an earlier run's")
    thread, _ = in_background(supervisor(tmp_path, board, "worker-0", SLEEP))
    wait_until(lambda: heartbeat(board, "worker-0").get("state") == "running")
    assert not (tmp_path / "ended").exists()
    board.write(marker, b"{}")
    thread.join(30)
    assert json.loads((tmp_path / "ended").read_text())["run"] == cluster().run


def test_a_task_that_runs_keeps_its_node_alive(tmp_path, board):
    thread, _ = in_background(subject := supervisor(tmp_path, board, "worker-0", SLEEP))
    wait_until(lambda: (tmp_path / "alive").exists())
    os.utime(tmp_path / "alive", (0, 0))
    wait_until(lambda: (tmp_path / "alive").stat().st_mtime > 0)
    subject.stop()
    thread.join(30)


@pytest.mark.parametrize("end", ["succeeded", "failed", "stopped"])
def test_a_task_that_is_done_keeps_its_node_until_the_model_is_exported(tmp_path, board, end):
    """Done before the chief, or by its success: its disk has a part of what is exported."""
    subject = staying(supervisor(tmp_path, board, "worker-0", "pass"))
    thread, codes = in_background(subject)
    wait_until(lambda: heartbeat(board, "worker-0").get("state") == "succeeded")
    board.write("DONE", b"{}")
    board.write(MEMORY, phase("exporting"))
    os.utime(tmp_path / "alive", (0, 0))
    wait_until(lambda: (tmp_path / "alive").stat().st_mtime > 0)
    assert thread.is_alive()
    assert not (tmp_path / "ended").exists()
    board.write(MEMORY, phase(end))
    thread.join(30)
    assert codes == [OK]
    assert json.loads((tmp_path / "ended").read_text())["run"] == cluster().run


def phase(name: str) -> bytes:
    """What the coordinator remembers on the board."""
    return json.dumps({"state": dump_state(RunState(name, 0.0, 0.0))}).encode()


def test_a_task_that_is_done_does_not_stay_for_longer_than_the_run_may_last(tmp_path, board):
    subject = staying(supervisor(tmp_path, board, "worker-0", "pass", max_duration_s=8))
    assert subject.run() == OK
    assert not (tmp_path / "ended").exists()


def test_a_task_that_is_done_leaves_when_it_is_stopped(tmp_path, board):
    subject = staying(supervisor(tmp_path, board, "worker-0", "pass"), 60)
    thread, codes = in_background(subject)
    wait_until(lambda: heartbeat(board, "worker-0").get("state") == "succeeded")
    subject.stop()
    thread.join(30)
    assert codes == [OK]


def test_the_chiefs_success_does_not_end_the_run_on_its_node(tmp_path, board):
    assert supervisor(tmp_path, board, "chief-0", "pass").run() == OK
    assert not (tmp_path / "ended").exists()


def test_stop_ends_the_whole_group_even_when_it_ignores_sigterm(tmp_path, board):
    pids = tmp_path / "pids"
    program = (
        "import os, signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        f"open({str(pids)!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}')\n"
        "time.sleep(600)\n"
    )
    subject = supervisor(tmp_path, board, "worker-0", program)
    thread, codes = in_background(subject)
    wait_until(lambda: pids.exists() and len(pids.read_text().split()) == 2)
    subject.stop()
    thread.join(30)
    assert codes == [OK]
    assert heartbeat(board, "worker-0")["state"] == "stopped"
    group = [int(pid) for pid in pids.read_text().split()]
    wait_until(lambda: not any(alive(pid) for pid in group))


def test_what_a_shell_has_started_saves_though_the_shell_ends_at_once(tmp_path, board):
    saved, up = tmp_path / "saved", tmp_path / "up"
    script = f"trap 'sleep 1; touch {saved}; exit' TERM; touch {up}; while true; do sleep 0.1; done"
    program = f"import os; os.execvp('sh', ['sh', '-c', {f'sh -c {shlex.quote(script)}; true'!r}])"
    subject = supervisor(tmp_path, board, "chief-0", program)
    thread, codes = in_background(subject)
    wait_until(up.exists)
    board.write("STOP", b"{}")
    thread.join(30)
    assert codes == [OK]
    assert saved.exists()
    assert "STOPPED" in board.names()


def test_children_of_a_program_that_has_ended_are_killed(tmp_path, board):
    pid_file = tmp_path / "pid"
    program = (
        "import subprocess\n"
        "child = subprocess.Popen(['sleep', '600'], stdout=subprocess.DEVNULL, "
        "stderr=subprocess.DEVNULL)\n"
        f"open({str(pid_file)!r}, 'w').write(str(child.pid))\n"
    )
    assert supervisor(tmp_path, board, "chief-0", program).run() == OK
    wait_until(lambda: not alive(int(pid_file.read_text())))


def test_the_first_failure_is_kept(board):
    markers.mark_failed(board, "chief-0", "n2", "first", ["a"])
    markers.mark_failed(board, "ps-0", "n1", "second")
    assert markers.read_json(board, "FAILED")["message"] == "first"


def test_the_end_of_a_log_starts_with_a_line(tmp_path):
    log = tmp_path / "x.log"
    log.write_text("".join(f"line {n}\n" for n in range(100)))
    assert markers.log_end(log, limit=20) == b"line 98\nline 99\n"
    assert markers.log_tail(log, lines=1) == ["line 99"]
    assert markers.log_end(tmp_path / "none") == b""


def test_the_programs_environment_has_the_cluster_but_no_keys():
    own = {"PATH": "/bin", "AWS_SECRET_ACCESS_KEY": "x", "PYTHONPATH": "/y", "HOME": os.sep}
    environment = child_environment(cluster(), parse_task("worker-0"), own)
    assert environment["CLASSPATH"] == "/a.jar:/b.jar"
    assert environment["PATH"] == "/bin"
    assert environment["MAYFLY_TASK"] == "worker-0"
    assert not {"AWS_SECRET_ACCESS_KEY", "PYTHONPATH"} & environment.keys()
