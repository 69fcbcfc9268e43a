"""Two processes on one run: real ones, with the ledger's own locks."""

from __future__ import annotations

import fcntl
import os
import signal
import stat
import subprocess
import sys
import time
from datetime import UTC, datetime

import pytest
from tests.unit.lock_fakes import working

from mayfly import run_lock
from mayfly.errors import UserError
from mayfly.ledger import Ledger, Unwritable
from mayfly.run_lock import Busy

RUN, OTHER = "faces-261128-100000-abcd", "faces-261128-100000-abce"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ledger.sqlite"


@pytest.fixture
def ledger(path):
    opened = Ledger(path)
    yield opened
    opened.close()


def taken(ledger: Ledger, run: str = RUN, command: str = "mayfly destroy") -> None:
    with ledger.alone(run, command):
        pass


def test_the_second_is_refused_at_once_and_learns_by_whom(ledger, path):
    before = datetime.now(UTC).isoformat(timespec="seconds")[:16]
    with working(path, RUN) as other:
        with pytest.raises(Busy) as refused:
            taken(ledger)
        assert other.poll() is None, "refused while the holder was at work"
    line = str(refused.value)
    assert (refused.value.exit_code, isinstance(refused.value, UserError)) == (2, True)
    assert f"run {RUN} is at work: mayfly deploy, process {other.pid} since {before}" in line
    assert f"`mayfly status {RUN}`" in line
    assert line.endswith(f"kill {other.pid}")
    assert "\n" not in line


def test_other_runs_are_free_and_so_is_this_one_afterwards(ledger, path, tmp_path):
    with working(path, RUN):
        taken(ledger, OTHER)
    taken(ledger)
    assert list((tmp_path / "locks").iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_dead_holder_holds_nothing(ledger, path, number):
    with working(path, RUN) as other:
        other.send_signal(number)
        other.wait()
        assert (path.parent / "locks" / f"{RUN}.lock").exists()
        assert ledger.at_work(RUN) is None
        taken(ledger)


def test_a_process_that_it_has_started_holds_nothing(ledger):
    """Our IM service outlives the command that has started it."""
    with ledger.alone(RUN, "mayfly deploy"):
        child = subprocess.Popen(["sleep", "60"])
    try:
        taken(ledger)
    finally:
        child.kill()
        child.wait()


def test_one_thread_of_work_is_kept_from_another_of_the_same_process(ledger):
    with ledger.alone(RUN, "mayfly deploy"), pytest.raises(Busy, match="mayfly deploy"):
        taken(ledger)


def test_a_look_disturbs_nobody(ledger, path, monkeypatch):
    with working(path, RUN, "mayfly export") as other:
        seen = ledger.at_work(RUN)
        assert (seen.pid, seen.command) == (other.pid, "mayfly export")
        with pytest.raises(Busy):
            taken(ledger)
    assert ledger.at_work(RUN) is None
    assert ledger.at_work(OTHER) is None
    descriptor = os.open(path.parent / "locks" / f"{RUN}.lock", os.O_CREAT | os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_SH)  # as a look has it for a moment
    monkeypatch.setattr(run_lock.time, "sleep", lambda _: os.close(descriptor))
    taken(ledger)


def test_only_the_owner_can_read_who_it_is(ledger, path):
    with ledger.alone(RUN, "mayfly deploy"):
        file = path.parent / "locks" / f"{RUN}.lock"
        modes = [stat.S_IMODE(each.stat().st_mode) for each in (file, file.parent)]
    assert modes == [0o600, 0o700]


RACE = """
import sys, time
from pathlib import Path
from mayfly.errors import UserError
from mayfly.ledger import Ledger
path, run, start = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
ledger = Ledger(path)
time.sleep(max(0.0, start - time.time()))
try:
    with ledger.alone(run, "mayfly deploy"):
        ledger.add(run, "local", "s3://b/r/", {})
        print("made", flush=True)
        time.sleep(2)
except UserError as error:
    print(type(error).__name__, flush=True)
"""


def test_of_several_that_claim_one_run_at_once_one_makes_it(path):
    Ledger(path).close()
    start = str(time.time() + 2)
    command = [sys.executable, "-c", RACE, str(path), RUN, start]
    claimants = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(5)]
    said = [each.communicate(timeout=60)[0].strip() for each in claimants]
    assert said.count("made") == 1
    # Whoever comes late, when the maker has ended, finds the run in the ledger.
    assert {*said} - {"made", "Busy", "UserError"} == set()
    ledger = Ledger(path)
    assert [record.run for record in ledger.runs()] == [RUN]
    with pytest.raises(UserError, match=f"there is a run of this name: {RUN} — start it again"):
        ledger.add(RUN, "aws", "s3://b/r/", {})
    assert ledger.get(RUN).cloud == "local"


TURNS = """
import sys, time
from pathlib import Path
from mayfly import run_lock
directory, run, end = Path(sys.argv[1]), sys.argv[2], time.time() + 2
inside = directory / "inside"
turns = 0
while time.time() < end:
    try:
        with run_lock.held(directory, run, "turn"):
            inside.touch(exist_ok=False)
            turns += 1
            inside.unlink()
    except run_lock.Busy:
        pass
print(turns, flush=True)
"""


def test_a_file_that_comes_and_goes_is_never_locked_twice(tmp_path):
    """Each holder removes the file: who had opened the old one must not take it for the lock."""
    command = [sys.executable, "-c", TURNS, str(tmp_path), RUN]
    players = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    turns = [int(each.communicate(timeout=60)[0]) for each in players]
    assert [each.returncode for each in players] == [0, 0, 0]
    assert sum(turns) > 3


def test_without_room_for_a_file_the_ledger_is_called_unwritable(ledger, path):
    (path.parent / "locks").write_text("in the way")
    with pytest.raises(Unwritable, match="cannot be written: .*ledger.sqlite: .*make room there"):
        taken(ledger)


def test_a_full_disk_keeps_the_lock_and_only_loses_the_name(tmp_path):
    """No byte can be written, as on a full disk; the lock needs none."""
    script = f"""
import resource, signal, sys
from pathlib import Path
from mayfly import run_lock
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
with run_lock.held(Path({str(tmp_path)!r}), {RUN!r}, "mayfly destroy"):
    print("held", flush=True)
    sys.stdin.read()
"""
    other = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert other.stdout.readline() == "held\n"
        with (
            pytest.raises(Busy, match="is at work: another command — wait"),
            run_lock.held(tmp_path, RUN, "mayfly deploy"),
        ):
            pass
    finally:
        other.communicate(timeout=30)
    assert other.returncode == 0
