"""Daemons are recognised by more than their number, and ended."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from mayfly.errors import MayflyError
from mayfly.local.daemons import Daemon, Process, identify, plain_environ

SLEEP = [sys.executable, "-c", "import time; print('started', flush=True); time.sleep(300)"]
STUBBORN = [
    sys.executable,
    "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    " print('ready', flush=True); time.sleep(300)",
]


@pytest.fixture
def daemon(tmp_path: Path):
    daemon = Daemon("sleeper", tmp_path)
    yield daemon
    daemon.stop(seconds=0)


def test_a_daemon_runs_in_its_own_session_until_it_is_stopped(daemon: Daemon) -> None:
    daemon.start(SLEEP, {})
    process = daemon.process()
    assert process is not None
    assert os.getsid(process.pid) == process.pid
    assert daemon.stop() is True
    assert not process.alive()
    assert daemon.process() is None
    assert daemon.stop() is False


def test_one_that_ignores_sigterm_is_killed(daemon: Daemon) -> None:
    daemon.start(STUBBORN, {})
    daemon.wait(lambda: "ready" in daemon.log.read_text(), seconds=60)
    process = daemon.process()
    daemon.stop(seconds=0.2)
    assert process is not None
    assert not process.alive()


@pytest.mark.parametrize("change", [{"started": 1}, {"boot": "another boot"}])
def test_a_number_that_another_process_has_now_is_left_alone(daemon: Daemon, change) -> None:
    own = identify(os.getpid())
    assert own is not None
    daemon.pidfile.write_text(json.dumps({**vars(own), **change}))
    assert daemon.process() is None
    assert daemon.stop() is False  # this process still runs the test


@pytest.mark.parametrize("text", ["", "123", "{}", '{"pid": 1}'])
def test_an_unreadable_record_is_no_process(daemon: Daemon, text: str) -> None:
    daemon.pidfile.write_text(text)
    assert daemon.process() is None


def test_a_command_name_with_parentheses_is_parsed(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    fields = ["S", *["0"] * 18, "4711", "0"]
    (tmp_path / "7/stat").write_text(f"7 (a) b (c) {' '.join(fields)}\n")
    (tmp_path / "sys/kernel/random").mkdir(parents=True)
    (tmp_path / "sys/kernel/random/boot_id").write_text("boot\n")
    assert identify(7, tmp_path) == Process(7, 4711, "boot")
    assert identify(8, tmp_path) is None


def test_a_program_that_ends_says_why(daemon: Daemon) -> None:
    failing = [sys.executable, "-c", "import sys, time; time.sleep(0.5); sys.exit('no such disk')"]
    daemon.start(failing, {})
    with pytest.raises(MayflyError, match="sleeper does not start: no such disk"):
        daemon.wait(lambda: False, seconds=60)


def test_one_that_is_never_ready_is_reported(daemon: Daemon) -> None:
    daemon.start(SLEEP, {})
    with pytest.raises(MayflyError, match="sleeper is not ready"):
        daemon.wait(lambda: False, seconds=0)


def test_secrets_of_the_environment_do_not_reach_daemons() -> None:
    environ = {"PATH": "/bin", "https_proxy": "p", "MAYFLY_S3_SECRET_ACCESS_KEY": "s", "AWS_X": "y"}
    assert plain_environ(environ) == {"PATH": "/bin", "https_proxy": "p"}
