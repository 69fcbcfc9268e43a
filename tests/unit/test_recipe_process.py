"""Process groups: ends, timeouts, and nothing that outlives them. Real processes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mayfly_train.recipe import identity, process, slots
from mayfly_train.recipe.slots import Records

STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True)"
code += "; time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
child.stdout.readline()
print(os.getpid(), child.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "GRACE_S", 0.3)


@pytest.fixture
def execute(tmp_path: Path) -> Iterator[Callable[..., process.Ended]]:
    def call(words: list[str], timeout_s: float = 60, ask: Callable[[], str] = str, **more: Any):
        with (tmp_path / "out").open("wb") as out, (tmp_path / "err").open("wb") as err:
            environment = {**os.environb, process.ATTEMPT.encode(): b"attempt-1"}
            command = process.Command(words, tmp_path, environment, out, err, "attempt-1")
            return process.run(command, time.monotonic() + timeout_s, ask, **more)

    yield call


def is_running(pid: int) -> bool:
    return process._state_of(pid) not in ("", "Z")


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_the_exit_code_is_the_commands(execute):
    assert execute(python("raise SystemExit(3)")) == process.Ended(3)
    assert execute(["true"]) == process.Ended(0)


def test_streams_go_to_their_files(execute, tmp_path: Path):
    execute(["sh", "-c", "echo out; echo err >&2"])
    assert (tmp_path / "out").read_text() == "out\n"
    assert (tmp_path / "err").read_text() == "err\n"


def test_a_process_whose_name_was_cut_within_a_character_is_seen(tmp_path: Path):
    """The kernel keeps 15 bytes of a name, and whoever looks for a group reads all of them."""
    program = tmp_path / f"{14 * 'a'}é"
    program.symlink_to(str(shutil.which("sleep")))
    with subprocess.Popen([str(program), "600"]) as started:
        try:
            assert process._group_of(started.pid) == os.getpgrp()
        finally:
            started.kill()


@pytest.mark.parametrize(("word", "code"), [("/no/such/program", 127), ("/", 126)])
def test_a_program_that_cannot_run_is_the_commands_fault(execute, tmp_path, word, code):
    assert execute([word]).exit_code == code
    assert "cannot run" in (tmp_path / "err").read_text()


def test_a_timeout_ends_a_tree_that_ignores_term(execute, tmp_path: Path):
    def ask() -> str:
        return "cancelled" if (tmp_path / "out").read_text().count(" ") else ""

    ended = execute(python(STUBBORN), ask=ask)
    assert ended.why == "cancelled"
    assert ended.exit_code == -9
    pids = [int(word) for word in (tmp_path / "out").read_text().split()]
    assert len(pids) == 2
    assert [pid for pid in pids if is_running(pid)] == []


def test_a_deadline_is_a_timeout(execute):
    assert execute(["sleep", "600"], timeout_s=0) == process.Ended(-15, "timeout")


def test_what_a_command_leaves_behind_is_ended_with_it(execute, tmp_path: Path):
    execute(["sh", "-c", "sleep 600 & echo $!"])
    assert not is_running(int((tmp_path / "out").read_text()))


def test_what_leaves_the_group_is_found_by_its_adopter(tmp_path: Path):
    """In a process of its own, because adopting is for the whole process."""
    script = f"""
import os, pathlib, sys, time
from mayfly_train.recipe import identity, process, slots
from mayfly_train.recipe.slots import Records
process.adopt_orphans()
out = open({str(tmp_path / "out")!r}, "wb")
environment = dict(os.environb)
environment[b"{process.ATTEMPT}"] = b"attempt-1"
words = ["sh", "-c", "setsid sh -c 'echo $$; exec sleep 600' & sleep 1"]
root = pathlib.Path("/")
process.run(process.Command(words, root, environment, out, out, "attempt-1"), None, str)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
    assert not is_running(int((tmp_path / "out").read_text()))


def test_orphans_of_a_killed_worker_are_found_by_their_record(tmp_path: Path):
    orphan = subprocess.Popen(
        ["sleep", "600"], start_new_session=True, env={**os.environ, process.ATTEMPT: "a-1"}
    )
    stranger = subprocess.Popen(["sleep", "600"], start_new_session=True)
    records = tmp_path / process.RUNNING
    try:
        dead = Records(records / "dead", f"999999999 1 {identity.space()}")
        dead.note(0, stranger.pid, "a-0")
        dead.note(2, orphan.pid, "a-1")
        Records(records / "alive", identity.own()).note(0, stranger.pid, "a-2")
        for name in ("dead.0", "alive.0"):
            (tmp_path / process.SLOTS / name).mkdir(parents=True)
        assert process.kill_orphans(tmp_path) == 1
        assert orphan.wait(timeout=30) == -9
        assert stranger.poll() is None
        assert [path.name for path in records.iterdir()] == ["alive"]
        assert [path.name for path in (tmp_path / process.SLOTS).iterdir()] == ["alive.0"]
    finally:
        for each in (orphan, stranger):
            each.kill()
            each.wait()


def test_what_a_killed_worker_was_fetching_goes_with_it(tmp_path: Path):
    kept = tmp_path / process.OUTPUTS / "prepare/000001/a-1.2"
    (kept / "model").mkdir(parents=True)
    (kept.with_name(".a-2.999999999-1-1") / "model").mkdir(parents=True)
    with slots.whole(kept.with_name("a-3")):
        process.kill_orphans(tmp_path)
        names = sorted(path.name.split("-")[1] for path in kept.parent.iterdir())
    assert names == ["1.2", f"3.{os.getpid()}"]
    assert sorted(path.name for path in kept.parent.iterdir()) == ["a-1.2", "a-3"]


def test_the_group_is_told_while_the_command_runs(execute, tmp_path: Path):
    groups: list[int] = []
    execute(["sh", "-c", "echo $$"], note=groups.append)
    assert groups == [int((tmp_path / "out").read_text())]


def test_children_of_what_has_left_the_group_end_too(tmp_path: Path):
    script = f"""
import os, pathlib
from mayfly_train.recipe import identity, process, slots
process.adopt_orphans()
out = open({str(tmp_path / "out")!r}, "wb")
environment = dict(os.environb)
environment[b"{process.ATTEMPT}"] = b"attempt-1"
inner = "sleep 600 & echo $!; echo $$; wait"
words = ["sh", "-c", f"setsid sh -c '{{inner}}' & sleep 1"]
root = pathlib.Path("/")
process.run(process.Command(words, root, environment, out, out, "attempt-1"), None, str)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
    pids = [int(word) for word in (tmp_path / "out").read_text().split()]
    assert len(pids) == 2
    assert [pid for pid in pids if is_running(pid)] == []


def test_what_left_the_group_of_a_killed_worker_ends_too(tmp_path: Path):
    """Its group is gone; the attempt's name in its environment is left."""
    escaped = subprocess.Popen(
        ["sleep", "600"], start_new_session=True, env={**os.environ, process.ATTEMPT: "a-77"}
    )
    try:
        Records(tmp_path / process.RUNNING / "dead", f"999999999 1 {identity.space()}").note(
            0, 999999998, "a-77"
        )
        assert process.kill_orphans(tmp_path) == 0
        assert escaped.wait(timeout=30) == -9
    finally:
        escaped.kill()
        escaped.wait()


def test_a_command_ends_when_its_group_cannot_be_recorded(execute):
    """A full disk, say: what has been started does not go on in a slot that others get."""
    groups: list[int] = []

    def note(group: int) -> None:
        groups.append(group)
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        execute(["sleep", "600"], note=note)
    assert not is_running(groups[0])


def test_a_dead_one_that_nobody_reaps_holds_up_nothing(execute, tmp_path: Path):
    """Its parent has left the group and does not wait for it."""
    child = """
import os, time
if os.fork():
    time.sleep(0.5)
    os._exit(0)
group = os.fork()
if not group:
    time.sleep(600)
os.setsid()
print(os.getpid(), flush=True)
time.sleep(600)
"""
    assert execute(python(child)).exit_code == 0
    os.kill(int((tmp_path / "out").read_text()), 9)


def test_what_was_started_too_late_to_be_recorded_ends_with_its_worker(tmp_path: Path):
    """Nothing but its environment says whose it is."""
    dead = {**os.environ, process.WORKER: f"999999999 1 {identity.space()}"}
    alive = {**os.environ, process.WORKER: identity.own()}
    elsewhere = {**os.environ, process.WORKER: "999999999 1 another-boot.1"}
    started = [
        subprocess.Popen(["sleep", "600"], start_new_session=True, env=each)
        for each in (dead, alive, elsewhere)
    ]
    try:
        process.kill_orphans(tmp_path)
        assert started[0].wait(timeout=30) == -9
        assert [each.poll() for each in started[1:]] == [None, None]
    finally:
        for each in started:
            each.kill()
            each.wait()


def test_slots_of_an_earlier_boot_go_and_numbers_in_their_records_mean_nobody(tmp_path: Path):
    stranger = subprocess.Popen(["sleep", "600"], env={**os.environ, process.ATTEMPT: "a-1"})
    try:
        Records(tmp_path / process.RUNNING / "old", "1 1 another-boot.1").note(
            0, stranger.pid, "a-1"
        )
        (tmp_path / process.SLOTS / "old.0").mkdir(parents=True)
        assert process.kill_orphans(tmp_path) == 0
        assert stranger.poll() is None
        assert list((tmp_path / process.SLOTS).iterdir()) == []
    finally:
        stranger.kill()
        stranger.wait()


def test_who_was_adopted_before_it_could_ask_for_its_parents_end_ends(tmp_path: Path):
    code = "from mayfly_train.recipe import process; process.end_with_parent({}); print(1)"
    words = [sys.executable, "-c", code.format(os.getpid())]
    assert subprocess.run(words, check=False, stdout=subprocess.PIPE).returncode == 0
    words = [sys.executable, "-c", code.format(999999999)]
    assert subprocess.run(words, check=False, stdout=subprocess.PIPE).returncode == -15


def test_a_process_is_known_by_more_than_its_number():
    pid, started, space = identity.own().split()
    assert not identity.is_gone(identity.own())
    assert identity.is_gone(f"{pid} {int(started) - 1} {space}")
    assert not identity.is_gone(f"{pid} {int(started) - 1} another-boot.1")
    assert identity.is_here(f"1 1 {space}") and not identity.is_here("1 1 another-boot.1")
