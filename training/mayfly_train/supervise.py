"""Run one training task as a child process, tell how it goes, and end it when it is time.

The child runs in its own process group and in the runtime's Python, so neither its crash nor its
requirements touch the supervisor. systemd restarts the supervisor when the child failed; a
parameter server never ends by itself, so it is ended here once the chief has succeeded.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from mayfly_train import launch, machine, markers, topology
from mayfly_train.cluster import (
    CHIEF,
    DEFAULT_PATH,
    EVALUATOR,
    PS,
    WORKER,
    Cluster,
    load_cluster,
)
from mayfly_train.errors import NodeError
from mayfly_train.lifecycle import ENDED, parse_state
from mayfly_train.markers import DONE, FAILED, STOP, STOPPED, Board
from mayfly_train.probe import Pulse
from mayfly_train.progress import Progress, after_line
from mayfly_train.recipe.process import end_group
from mayfly_train.topology import Task

HEARTBEAT_S = 3.0
POLL_S = 0.5
STATE_DIR = Path("/var/lib/mayfly/tasks")
# When the run is over for this node; the node's dead-man timer counts from it.
ENDED_FILE = Path("/var/lib/mayfly/ended")
# Touched while the run goes on here; the timer powers a node off that has long been silent.
ALIVE_FILE = Path("/var/lib/mayfly/alive")

# Exit codes; the unit does not restart after the last three.
OK, CHILD_FAILED, BAD_COMMAND, TOO_LONG, GIVE_UP = 0, 1, 2, 3, 4

# A program that ends by itself this often in this time is broken; one that is killed or hangs may
# be the victim of its machine, and gets more starts.
OWN_FAILURES, ALL_FAILURES, FAILURES_WITHIN_S = 3, 6, 600.0

# How long a task may go on after the chief has succeeded. Parameter servers stay while trainers
# finish their last step; the evaluator still has to evaluate and export the final checkpoint.
GRACE_S = {PS: 5.0, WORKER: 20.0, EVALUATOR: 900.0}
KILL_AFTER_S = 10.0
# What the chief has, from SIGTERM on, to write a checkpoint when a limit of the job is reached.
SAVE_S = 60.0
# The coordinator ends a run in order; how long after max_duration a task ends without it.
OVERTIME_S = 300.0
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
BOARD_WAIT_S = 120.0
READ_OUT_S = 2.0  # for an ended program's last lines; another group's process may hold its pipe
HUNG_S = 45.0  # without an answer of the program's gRPC server
STAY_POLL_S = 10.0
# A board that does not answer for so long has gone with its nodes, and its run with it.
DESERTED_S = 600.0


@dataclass(frozen=True)
class Settings:
    """How long things may take, in seconds, and where this node keeps logs and state."""

    grace: Mapping[str, float] = field(default_factory=lambda: GRACE_S)
    kill_after: float = KILL_AFTER_S
    save: float = SAVE_S
    overtime: float = OVERTIME_S
    heartbeat: float = HEARTBEAT_S
    poll: float = POLL_S
    board_wait: float = BOARD_WAIT_S
    hung: float = HUNG_S
    stay_poll: float | None = STAY_POLL_S
    """How often a task that is done looks whether its run is; None: it does not wait for that."""
    state_dir: Path = STATE_DIR
    ended_file: Path = ENDED_FILE
    alive_file: Path = ALIVE_FILE
    log_dir: Path = markers.LOG_DIR


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `supervise`."""
    parser.add_argument(
        "--task", required=True, help="such as ps-0, chief-0, worker-0, evaluator-0"
    )
    parser.add_argument("--cluster", type=Path, default=DEFAULT_PATH, help="topology document")


def run(args: argparse.Namespace) -> int:
    """Supervise one task to its end. Returns the exit code that the unit acts on."""
    cluster = load_cluster(args.cluster)
    task = topology.parse_task(args.task)
    supervisor = Supervisor(cluster, task, markers.board_of(cluster))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: supervisor.stop())
    return supervisor.run()


def is_run_over(board: Board) -> bool:
    """Whether the run has failed, or its coordinator has told its end: the export is over, too.

    Raises NodeError when the board does not answer.
    """
    if FAILED in board.names():
        return True
    state = parse_state((markers.read_json(board, markers.MEMORY) or {}).get("state"))
    return state is not None and state.phase in ENDED


class Supervisor:
    """One task's supervisor. `run` returns its exit code; `stop` makes it end soon."""

    def __init__(
        self, cluster: Cluster, task: Task, board: Board, settings: Settings | None = None
    ) -> None:
        self.cluster = cluster
        self.task = task
        self.node = topology.node_of(cluster, task)
        self.board = board
        self.settings = settings or Settings()
        self.log = self.settings.log_dir / f"{task}.log"
        self.state_file = self.settings.state_dir / cluster.run / f"{task}.json"
        self.settings_file = self.state_file.with_name(f"{task}.settings.json")
        self.progress = Progress()
        self.attempt = 1
        self.first_start = time.time()
        self.failures: list[tuple[float, bool]] = []
        self.disk_full = False
        self._stop = threading.Event()

    def stop(self) -> None:
        """End the child and return; for SIGTERM."""
        self._stop.set()

    def run(self) -> int:
        """Start the child unless the run is over, and follow it to its end."""
        self._recall_attempts()
        markers.wait_for(self.board, self.settings.board_wait)
        names = self.board.names()
        self._recall_progress()
        self._remember()
        if (over := self._over(names)) is not None:
            self._heartbeat(over)
            self._stay()
            self._mark_ended()
            return OK
        with contextlib.suppress(OSError):
            self.settings.ended_file.unlink(missing_ok=True)  # an earlier run's
        if self.attempt == 1:
            self.log.unlink(missing_ok=True)  # an earlier run's
        pulse = Pulse((self.node.address, self.cluster.port))
        child = Child(self.cluster, self.task, self.log, self.settings_file)
        if self.task.kind in launch.ENGINES[self.cluster.engine].servers:
            pulse.start()
        try:
            code = self._follow(child, pulse)
        finally:
            pulse.stop()
            child.kill_group()
        if code == OK:
            self._stay()
        self._mark_ended_if_over()
        return code

    def _over(self, names: Collection[str]) -> str | None:
        """The state of a task that is not to be started as its run is over, None if it goes on."""
        if FAILED in names or STOPPED in names:
            return "stopped"
        if STOP in names and self.task.kind == CHIEF:
            self._must_write(STOPPED, asdict(self.progress))
            return "stopped"
        return "succeeded" if DONE in names and self.task.kind != EVALUATOR else None

    def _follow(self, child: Child, pulse: Pulse) -> int:
        """Watch the child, the board and the clock until one of them says that it is over."""
        deadline = self.first_start + self.cluster.max_duration_s + self.settings.overtime
        next_heartbeat, ends_at = 0.0, None
        names: set[str] = set()
        while (code := child.poll()) is None:
            self._read_lines(child)
            if time.monotonic() >= next_heartbeat:
                next_heartbeat = time.monotonic() + self.settings.heartbeat
                self._heartbeat("running")
                names.update(self._names())
                if DONE in names and ends_at is None:
                    ends_at = time.monotonic() + self._grace()
            if STOP in names and self.task.kind == CHIEF:
                return self._save_and_end(child)
            if self._stop.is_set() or FAILED in names or STOPPED in names:
                # A run may fail after the chief's success, as when its export fails.
                trained = DONE in names and self.task.kind != EVALUATOR
                return self._end(child, "succeeded" if trained else "stopped", OK)
            if ends_at is not None and time.monotonic() >= ends_at:
                return self._end(
                    child, "succeeded" if self.task.kind != EVALUATOR else "stopped", OK
                )
            if time.time() >= deadline:
                self._fail(f"took longer than max_duration, {self.cluster.max_duration_s} s")
                return self._end(child, "failed", TOO_LONG)
            if ends_at is None and (hung := self._hung(pulse, names)):
                return self._kill_hung(child, hung)
            self._stop.wait(self.settings.poll)
        self._read_lines(child)
        return self._child_ended(code)

    def _grace(self) -> float:
        """How long this task may go on after the chief's success."""
        asked = self.task.kind in launch.ENGINES[self.cluster.engine].asked
        return 0.0 if asked else self.settings.grace.get(self.task.kind, 60.0)

    def _save_and_end(self, child: Child) -> int:
        """Have the chief's program write a checkpoint while all others are there, and tell them.

        A program that does not handle SIGTERM dies of it, and its last checkpoint counts.
        """
        code = child.end(self.settings.save)
        self._read_lines(child)
        self._finish("stopped", OK, code)  # before the marker, which says that the step is known
        self._must_write(STOPPED, asdict(self.progress))
        return OK

    def _hung(self, pulse: Pulse, names: Collection[str]) -> str | None:
        """Why the program counts as hung, None when it does not."""
        if pulse.silent_for() > self.settings.hung:
            return f"its server has not answered for {self.settings.hung:.0f} s"
        if markers.restart_marker(str(self.task), self.attempt) in names:
            return "it has made no step for long while others did"
        return None

    def _kill_hung(self, child: Child, why: str) -> int:
        """End a program that hangs; systemd starts it again at its address."""
        self._say(f"{self.task} hangs: {why} — it is killed and started again")
        child.kill_group()
        return self._child_failed(child.end(self.settings.kill_after))

    def _child_ended(self, code: int) -> int:
        """The child ended by itself: what that means depends on the task and on the board."""
        over = self._names()
        if STOP in over and DONE not in over and self.task.kind != CHIEF:
            # Those who make steps together stop together, while the chief still saves.
            return self._finish("stopped", OK, code)
        if code == 0:
            return self._trained() if self.task.kind == CHIEF else self._finish("succeeded", OK, 0)
        if self._stop.is_set() or FAILED in over or STOPPED in over:
            return self._finish("stopped", OK, code)
        if DONE in over and self.task.kind != EVALUATOR:
            # The servers were leaving; the chief's success is what counts.
            return self._finish("succeeded", OK, code)
        self._say(f"{self.task} ended with exit code {code} (attempt {self.attempt})")
        return self._child_failed(code)

    def _trained(self) -> int:
        """Tell the chief's success. Its log and its last figures stand on the board before the
        marker: the coordinator exports, and writes the manifest, as soon as it sees that."""
        markers.wait_for(self.board, self.settings.board_wait)
        self._finish("succeeded", OK, 0)
        self._must_write(DONE, {"time": markers.utc_now(), **asdict(self.progress)})
        return OK

    def _child_failed(self, code: int) -> int:
        """Decide whether the task is worth another start."""
        now = time.time()
        self.failures = [*self.failures, (now, code > 0)]
        self._remember()
        exit_code = GIVE_UP if gives_up(self.failures, now) else CHILD_FAILED
        return self._finish("failed", BAD_COMMAND if code == BAD_COMMAND else exit_code, code)

    def _end(self, child: Child, state: str, exit_code: int) -> int:
        code = child.end(self.settings.kill_after)
        self._read_lines(child)
        return self._finish(state, exit_code, code)

    def _finish(self, state: str, exit_code: int, child_code: int) -> int:
        """Leave the log, then tell the end: who sees that, finds the log."""
        self._leave_log()
        self._heartbeat(state, child_code)
        return exit_code

    # --- what others see ---

    def _heartbeat(self, state: str, exit_code: int | None = None) -> None:
        with contextlib.suppress(OSError):
            self.settings.alive_file.touch()
        document = {
            "version": 1,
            "task": str(self.task),
            "node": self.node.name,
            "state": state,
            "attempt": self.attempt,
            "exit_code": exit_code,
            "updated": markers.utc_now(),
            "progress": asdict(self.progress),
            "disk_full": self.disk_full,
        }
        try:
            markers.write_json(self.board, f"{self.task}.json", document)
        except NodeError as error:
            self._say(f"heartbeat not written: {error}")

    def _stay(self) -> None:
        """Keep the node until the run is over: what is done here may still be read from here.

        Its disk has a part of the model, and the first parameter server has HDFS's NameNode. The
        dead-man timer counts from what is written after this.
        """
        until = self.first_start + self.cluster.max_duration_s + self.settings.overtime
        answered = time.monotonic()
        while self.settings.stay_poll and not self._stop.is_set() and time.time() < until:
            with contextlib.suppress(OSError):
                self.settings.alive_file.touch()
            with contextlib.suppress(NodeError):
                if is_run_over(self.board):
                    return
                answered = time.monotonic()
            if time.monotonic() - answered > DESERTED_S:
                return
            self._stop.wait(self.settings.stay_poll)

    def _names(self) -> list[str]:
        try:
            return self.board.names()
        except NodeError as error:
            self._say(f"board not read: {error}")
            return []

    def _must_write(self, name: str, document: dict[str, Any]) -> None:
        """Write a marker on which the run's end depends: repeat while HDFS does not answer."""
        markers.wait_for(self.board, self.settings.board_wait)
        markers.write_json(self.board, name, document)

    def _fail(self, message: str) -> None:
        try:
            tail = markers.log_tail(self.log)
            markers.mark_failed(self.board, str(self.task), self.node.name, message, tail)
        except NodeError as error:
            self._say(f"failure not marked: {error}")

    def _leave_log(self) -> None:
        try:
            self.board.write(f"{self.task}.log", markers.log_end(self.log))
        except NodeError as error:
            self._say(f"log not left: {error}")

    def _mark_ended_if_over(self) -> None:
        """Say that the run is over for this node, unless the chief's evaluator still works."""
        names = self._names()
        evaluates = self.task.kind == CHIEF and EVALUATOR in self.cluster.kinds
        over = FAILED in names or STOPPED in names
        if over or (DONE in names and not evaluates):
            self._mark_ended()

    def _mark_ended(self) -> None:
        document = {"run": self.cluster.run, "time": markers.utc_now()}
        self._write_file(self.settings.ended_file, json.dumps(document))

    def _write_file(self, path: Path, text: str) -> None:
        """Write a small file of this node; one that cannot be written ends nothing."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            self.disk_full = self.disk_full or error.errno in NO_SPACE
            self._say(f"{path} not written: {error.strerror}")

    def _say(self, message: str) -> None:
        with contextlib.suppress(OSError):
            print(f"supervisor: {message}", file=sys.stderr, flush=True)

    # --- what it knows ---

    def _read_lines(self, child: Child) -> None:
        for line in child.new_lines():
            self.progress = after_line(self.progress, line)
        self.disk_full = self.disk_full or child.disk_full

    def _recall_attempts(self) -> None:
        """Find on disk which start this is, when the first one was, and what became of them."""
        try:
            seen = json.loads(self.state_file.read_text(encoding="utf-8"))
            self.attempt, self.first_start = seen["attempt"] + 1, seen["first_start"]
            self.failures = [(when, own) for when, own in seen.get("failures", [])]
        except (OSError, ValueError, KeyError, TypeError):
            pass

    def _recall_progress(self) -> None:
        """Take up what an earlier attempt has told, so that counts go on even without a disk."""
        earlier = markers.read_json(self.board, f"{self.task}.json") or {}
        with contextlib.suppress(KeyError, TypeError):
            self.progress = Progress(**earlier["progress"])
            self.attempt = max(self.attempt, earlier["attempt"] + 1)

    def _remember(self) -> None:
        state = {"attempt": self.attempt, "first_start": self.first_start}
        self._write_file(self.state_file, json.dumps({**state, "failures": self.failures}))


def gives_up(failures: Sequence[tuple[float, bool]], now: float) -> bool:
    """Whether a task has failed for good: `failures` are when, and whether by its own exit code."""
    late = [own for when, own in failures if now - when < FAILURES_WITHIN_S]
    return sum(late) >= OWN_FAILURES or len(late) >= ALL_FAILURES


class Child:
    """The program as a process group of its own; its output goes to a log and to our stdout."""

    def __init__(self, cluster: Cluster, task: Task, log: Path, settings_file: Path) -> None:
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.disk_full = False
        started = launch.ENGINES[cluster.engine].launch(cluster, task, machine.look)
        environment = {**child_environment(cluster, task, os.environ), **started.environment}
        if started.settings is not None:
            settings_file.parent.mkdir(parents=True, exist_ok=True)
            settings_file.write_text(json.dumps(started.settings, indent=1), encoding="utf-8")
            environment["MAYFLY_SETTINGS"] = str(settings_file)
        self._process = subprocess.Popen(
            started.words,
            cwd=cluster.program.directory,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._tee, args=(log,), daemon=True)
        self._reader.start()

    def poll(self) -> int | None:
        """The exit code, None while it runs; its output has been read when it has ended."""
        code = self._process.poll()
        if code is not None:
            self._reader.join(READ_OUT_S)
        return code

    def new_lines(self) -> list[str]:
        """What it has written since the last call."""
        lines = []
        while not self._lines.empty():
            lines.append(self._lines.get())
        return lines

    def end(self, kill_after: float) -> int:
        """Ask the whole group to end, kill what is left after a while; the exit code. A shell ends
        at once; what it has started may have to save yet. What it wrote last has been read then:
        it tells the step that was saved."""
        end_group(self._process.pid, self._process, kill_after)
        code = self._process.wait()
        self._reader.join(READ_OUT_S)
        return code

    def kill_group(self) -> None:
        """Kill whatever is left of the group, the program's own children too."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _tee(self, log: Path) -> None:
        pipe: IO[bytes] | None = self._process.stdout
        assert pipe is not None
        for raw in pipe:
            self._lines.put(raw.decode(errors="replace"))
            # The program blocks when nobody reads: whatever cannot be written is dropped.
            with contextlib.suppress(OSError):
                sys.stdout.buffer.write(raw)
                sys.stdout.buffer.flush()
            self._keep(log, raw)

    def _keep(self, log: Path, raw: bytes) -> None:
        """Add to the log, which is opened each time as its disk may be changed or have room."""
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("ab", buffering=0) as file:
                file.write(raw)
        except OSError as error:
            if error.errno in NO_SPACE and not self.disk_full:
                self.disk_full = True
                note = f"supervisor: {log} cannot be written, lines are dropped: {error.strerror}"
                with contextlib.suppress(OSError):
                    print(note, file=sys.stderr, flush=True)


def child_environment(cluster: Cluster, task: Task, own: Mapping[str, str]) -> dict[str, str]:
    """The environment of every engine's programs: ours without Python's own settings, and HDFS'."""
    kept = {key: value for key, value in own.items() if not key.startswith(("PYTHON", "AWS_"))}
    return {
        **kept,
        **cluster.environment,
        "HADOOP_USER_NAME": "mayfly",
        "MAYFLY_RUN": cluster.run,
        "MAYFLY_TASK": str(task),
        "PYTHONUNBUFFERED": "1",
    }
