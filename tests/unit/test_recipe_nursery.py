"""The nursery: processes of the engine that are forked, looked after, and end with their head."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from mayfly_train.errors import NodeError
from mayfly_train.recipe import process, tls
from mayfly_train.recipe.attempt import Job
from mayfly_train.recipe.dask_engine import DaskEngine
from mayfly_train.recipe.document import Hardware
from mayfly_train.recipe.expand import Task
from mayfly_train.recipe.here import Machine
from mayfly_train.recipe.nursery import Child, Nursery
from mayfly_train.recipe.store import DirectoryStore
from mayfly_train.s3 import S3Settings

PATIENCE_S = 120.0


@pytest.fixture
def nursery(tmp_path: Path) -> Iterator[Nursery]:
    tls.make(tmp_path / "tls", "test")
    found = Nursery(tmp_path / "nursery.log")
    yield found
    found.close()


def scheduler(nursery: Nursery, path: Path) -> Child:
    words = ["--host", "127.0.0.1", "--tls", str(path / "tls"), "--store", str(path / "store")]
    words += ["--address-file", str(path / "address")]
    child = nursery.start("scheduler", words, path / "scheduler.log")
    eventually(lambda: (path / "address").exists() or not child.is_alive())
    return child


def eventually(true: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    return process._state_of(pid) not in ("", "Z")


def test_a_child_serves_and_ends_with_the_nursery(nursery: Nursery, tmp_path: Path):
    child = scheduler(nursery, tmp_path)
    assert child.is_alive(), (tmp_path / "scheduler.log").read_text()
    assert os.getsid(child.pid) == child.pid
    assert DirectoryStore(tmp_path / "store").read("engine.json") is not None
    nursery.close()
    assert not child.is_alive()


def test_a_child_is_quick_after_the_first(nursery: Nursery, tmp_path: Path):
    """The engine was imported once: a process of it costs a tenth of what a new one would."""
    first = scheduler(nursery, tmp_path)
    (tmp_path / "address").unlink()
    second = scheduler(nursery, tmp_path)
    times = psutil.Process(second.pid).cpu_times()
    assert times.user + times.system < 0.5
    assert first.is_alive() and second.is_alive()


def test_a_child_that_cannot_start_says_why_in_its_log(nursery: Nursery, tmp_path: Path):
    child = nursery.start("scheduler", ["--no-such-option"], tmp_path / "bad.log")
    eventually(lambda: not child.is_alive())
    assert "arguments are required" in (tmp_path / "bad.log").read_text()


def test_without_its_nursery_nothing_is_started(nursery: Nursery, tmp_path: Path):
    child = scheduler(nursery, tmp_path)
    os.kill(nursery.pid, signal.SIGKILL)
    eventually(lambda: not child.is_alive())
    with pytest.raises(NodeError, match="the engine's worker cannot be started here"):
        nursery.start("worker", [], tmp_path / "log")


def test_what_it_starts_has_the_stores_keys_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    tls.make(tmp_path / "tls", "test")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "another's")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "another's")
    settings = S3Settings("key", "secret", None, "http://127.0.0.1:1")
    nursery = Nursery(tmp_path / "nursery.log", settings.environ())
    try:
        child = scheduler(nursery, tmp_path)
        text = Path(f"/proc/{child.pid}/environ").read_text()
    finally:
        nursery.close()
    found = dict(line.partition("=")[::2] for line in text.split("\0"))
    assert S3Settings.from_environ(found) == settings
    assert "AWS_SESSION_TOKEN" not in found


def test_a_worker_whose_scheduler_is_gone_ends_with_its_task(tmp_path: Path):
    """At once, and not when the task has ended: another head waits for it."""
    machine = Machine(tmp_path / "machine", str(tmp_path / "store"), workers=1)
    machine.start()
    engine = DaskEngine(machine.scheduler, machine.tls)
    try:
        eventually(lambda: len(engine.members()) == 1)
        file = tmp_path / "task"
        task = Task("only", 0, {}, [["sh", "-c", f"echo $$ > {file}; exec sleep 600"]], {})
        engine.submit([Job("a-1", task.to_json(), "", "", "result.json")], Hardware())
        eventually(lambda: file.exists() and bool(file.read_text().strip()))
        worker, scheduler = machine.processes[0], machine._scheduler
        assert scheduler is not None
        os.kill(scheduler.pid, signal.SIGKILL)
        killed = time.monotonic()
        eventually(lambda: not worker.is_alive())
        assert time.monotonic() - killed < 20
        assert not is_running(int(file.read_text()))
    finally:
        engine.close()
        machine.stop()


@pytest.mark.parametrize("after_s", [0.0, 0.05, 0.3, 1.0])
def test_a_head_that_is_killed_while_it_starts_leaves_nothing(tmp_path: Path, after_s: float):
    """At any moment: while the nursery imports, before it has asked for its parent's end, later."""
    script = f"""
from pathlib import Path
from mayfly_train.recipe.here import Machine
machine = Machine(Path({str(tmp_path / "machine")!r}), {str(tmp_path / "store")!r}, workers=2)
print("begins", flush=True)
machine.start()
"""
    head = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert head.stdout is not None and head.stdout.readline()
    time.sleep(after_s)
    head.kill()
    head.wait()
    head.stdout.close()

    def left() -> list[int]:
        return [pid for pid in process._pids() if str(tmp_path).encode() in words_of(pid)]

    eventually(lambda: not left() and not nurseries(head.pid))


def words_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def nurseries(parent: int) -> list[int]:
    """Nurseries of this head; what they fork has their command line."""
    end = f"--with-parent\0{parent}\0".encode()
    return [pid for pid in process._pids() if words_of(pid).endswith(end) and is_running(pid)]
