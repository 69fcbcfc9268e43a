"""The head's memory of a run: every task with its frozen text, and every attempt at it (SQLite).

Markers in the store are the last word on what is finished; the ledger knows the rest, and is
copied to the store so that another head can go on.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mayfly_train.errors import NodeError
from mayfly_train.recipe.expand import Task, task_from

VERSION = 1
WAITING, RUNNING, DONE, STOPPED, FAILED = "waiting", "running", "done", "stopped", "failed"
FINISHED = (DONE, STOPPED)
# Ways to look at a ledger: at one that a head may be working with, or at a copy of our own.
LIVE, COPY = "mode=ro", "mode=ro&immutable=1"
NODE, COMMAND = "node", "command"

SCHEMA = """
CREATE TABLE IF NOT EXISTS experiments (
  name TEXT PRIMARY KEY, state TEXT NOT NULL, tasks INTEGER, message TEXT, place INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS tasks (
  experiment TEXT NOT NULL, number INTEGER NOT NULL, frozen TEXT NOT NULL, state TEXT NOT NULL,
  attempts INTEGER NOT NULL DEFAULT 0, node_losses INTEGER NOT NULL DEFAULT 0,
  failures INTEGER NOT NULL DEFAULT 0, accepted TEXT, node TEXT, exit_code INTEGER, value REAL,
  results TEXT, curve TEXT, seconds REAL, message TEXT,
  PRIMARY KEY (experiment, number)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_state ON tasks (experiment, state);
CREATE TABLE IF NOT EXISTS attempts (
  attempt TEXT PRIMARY KEY, experiment TEXT NOT NULL, number INTEGER NOT NULL, state TEXT NOT NULL,
  node TEXT, submitted REAL NOT NULL, started REAL, ended REAL, exit_code INTEGER, seconds REAL,
  message TEXT
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS of_task ON attempts (experiment, number);
"""


class BadLedger(NodeError):
    """The ledger cannot be read or written: a full disk, say, or one of a newer Mayfly."""


@dataclass(frozen=True)
class Row:
    """One task as the ledger has it."""

    task: Task
    state: str
    attempts: int
    node_losses: int
    failures: int
    accepted: str | None
    node: str | None
    exit_code: int | None
    value: float | None
    results: Mapping[str, Any]
    seconds: float | None
    message: str | None


class Ledger:
    """SQLite in WAL mode. One process writes; any may read."""

    def __init__(self, path: Path, look: str = "") -> None:
        """Open or make it; with `look`, LIVE or COPY, only read what is there. Raises BadLedger."""
        self.path = path
        with self._clear():
            if not look:
                path.parent.mkdir(parents=True, exist_ok=True)
            name = f"{path.absolute().as_uri()}?{look}" if look else path
            self._db = sqlite3.connect(
                name, timeout=30, isolation_level=None, check_same_thread=False, uri=bool(look)
            )
            self._db.row_factory = sqlite3.Row
            version = int(self._db.execute("PRAGMA user_version").fetchone()[0])
            if version > VERSION:
                raise BadLedger(f"{path} is of a newer Mayfly — update this one")
            if look:
                return
            self._db.execute("PRAGMA journal_mode=WAL")
            # The store's markers survive what a power cut may take of the last second.
            self._db.execute("PRAGMA synchronous=NORMAL")
            if version < VERSION:  # else nothing is written, while a head may be at work
                self._db.executescript(SCHEMA)
                self._db.execute(f"PRAGMA user_version={VERSION}")

    def close(self) -> None:
        self._db.close()

    def worked_by(self, head: str) -> None:
        """Note which head works with this file, not in it: its copies are of other machines."""
        with self._clear():
            _head_file(self.path).write_text(head)

    @contextmanager
    def batch(self) -> Iterator[None]:
        """All writes of the block in one transaction. Raises BadLedger."""
        with self._clear():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")

    @contextmanager
    def _clear(self) -> Iterator[None]:
        try:
            yield
        except (OSError, sqlite3.Error) as error:
            raise BadLedger(f"the ledger {self.path}: {error} — make room there") from error

    # --- experiments ---

    def set_experiment(
        self, name: str, state: str, tasks: int | None = None, message: str = ""
    ) -> None:
        """Record where an experiment is; `tasks` once it is expanded."""
        self._db.execute(
            "INSERT INTO experiments (name, state, tasks, message, place)"
            " VALUES (?, ?, ?, ?, (SELECT COUNT(*) FROM experiments)) ON CONFLICT (name) DO UPDATE"
            " SET state = excluded.state, tasks = COALESCE(excluded.tasks, tasks),"
            " message = excluded.message",
            (name, state, tasks, message),
        )

    def experiments(self) -> list[dict[str, Any]]:
        """All experiments in order, with the number of tasks in each state."""
        found = []
        for row in self._db.execute("SELECT * FROM experiments ORDER BY place"):
            each = {key: row[key] for key in ("name", "state", "tasks", "message")}
            found.append({**each, "states": self.states(row["name"])})
        return found

    def states(self, experiment: str) -> dict[str, int]:
        """How many of an experiment's tasks are in each state."""
        rows = self._db.execute(
            "SELECT state, COUNT(*) FROM tasks WHERE experiment = ? GROUP BY state", (experiment,)
        )
        return dict(tuple(row) for row in rows)

    def running_on(self, experiment: str) -> dict[str, int]:
        """How many attempts at an experiment's tasks run on each worker, by the worker's name:
        a task on several nodes has one on each."""
        rows = self._db.execute(
            "SELECT attempts.node, COUNT(*) FROM tasks JOIN attempts USING (experiment, number)"
            " WHERE experiment = ? AND tasks.state = ? AND attempts.state = 'running'"
            " GROUP BY attempts.node",
            (experiment, RUNNING),
        )
        return {str(row[0]): int(row[1]) for row in rows}

    # --- tasks ---

    def freeze(self, tasks: Iterable[Task]) -> None:
        """Store tasks as they will be run for ever; one that is there stays as it is."""
        self._db.executemany(
            "INSERT OR IGNORE INTO tasks (experiment, number, frozen, state) VALUES (?, ?, ?, ?)",
            ((task.experiment, task.number, task.frozen, WAITING) for task in tasks),
        )

    def frozen(self, experiment: str) -> int:
        """How many tasks, counted from 0, are stored already."""
        row = self._db.execute(
            "SELECT MAX(number) FROM tasks WHERE experiment = ?", (experiment,)
        ).fetchone()
        return 0 if row[0] is None else int(row[0]) + 1

    def row(self, experiment: str, number: int) -> Row | None:
        """One task, None when there is none."""
        found = self._db.execute(
            "SELECT * FROM tasks WHERE experiment = ? AND number = ?", (experiment, number)
        ).fetchone()
        return _row(found) if found else None

    def rows(self, experiment: str, states: Iterable[str] = ()) -> Iterator[Row]:
        """The tasks of an experiment in order, all or those in some states."""
        wanted = tuple(states)
        marks = f" AND state IN ({', '.join('?' * len(wanted))})" if wanted else ""
        query = f"SELECT * FROM tasks WHERE experiment = ?{marks} ORDER BY number"
        for found in self._db.execute(query, (experiment, *wanted)):
            yield _row(found)

    def best(self, experiment: str, maximize: bool) -> Row | None:
        """The finished task with the best value; the first of equals."""
        order = "DESC" if maximize else "ASC"
        found = self._db.execute(
            "SELECT * FROM tasks WHERE experiment = ? AND state IN (?, ?) AND value IS NOT NULL"
            f" ORDER BY value {order}, number LIMIT 1",
            (experiment, *FINISHED),
        ).fetchone()
        return _row(found) if found else None

    def numbers(self, experiment: str, states: Iterable[str]) -> Iterator[int]:
        """The numbers of an experiment's tasks in some states, in order."""
        wanted = tuple(states)
        query = (
            "SELECT number FROM tasks WHERE experiment = ? AND state IN"
            f" ({', '.join('?' * len(wanted))}) ORDER BY number"
        )
        for found in self._db.execute(query, (experiment, *wanted)):
            yield int(found[0])

    def curves(self, experiment: str, most: int) -> list[list[tuple[int, float]]]:
        """The reports of finished tasks, for the median rule: so many, those of the newest."""
        rows = self._db.execute(
            "SELECT curve FROM tasks WHERE experiment = ? AND state = ? AND curve IS NOT NULL"
            " ORDER BY number DESC LIMIT ?",
            (experiment, DONE, most),
        )
        return [[(step, value) for step, value in json.loads(row[0])] for row in rows]

    # --- attempts ---

    def submit(self, task: Task, attempt: str) -> None:
        """Record that an attempt is handed to the engine, before it is."""
        self._db.execute(
            "INSERT INTO attempts (attempt, experiment, number, state, submitted)"
            " VALUES (?, ?, ?, 'submitted', ?)",
            (attempt, task.experiment, task.number, time.time()),
        )

    def start(self, attempt: str, node: str, counts: bool = True) -> None:
        """Record that an attempt has started on a node; `counts`: it is one at the task, and not
        one of several members."""
        self._db.execute(
            "UPDATE attempts SET state = 'running', node = ?, started = ? WHERE attempt = ?",
            (node, time.time(), attempt),
        )
        if not counts:
            return
        self._db.execute(
            "UPDATE tasks SET state = ?, node = ?, attempts = attempts + 1"
            " WHERE (experiment, number) = (SELECT experiment, number FROM attempts"
            " WHERE attempt = ?) AND state NOT IN (?, ?)",
            (RUNNING, node, attempt, *FINISHED),
        )

    def accept(self, task: Task, outcome: Mapping[str, Any]) -> bool:
        """Record a task's end as its marker has it; False when it had ended before."""
        done = self._db.execute(
            "UPDATE tasks SET state = ?, accepted = ?, node = ?, exit_code = ?, value = ?,"
            " results = ?, curve = ?, seconds = ?, message = NULL"
            " WHERE experiment = ? AND number = ? AND state NOT IN (?, ?)",
            (
                outcome["state"],
                outcome["attempt"],
                outcome["node"],
                outcome.get("exit_code"),
                outcome.get("value"),
                json.dumps(outcome.get("results", {})),
                json.dumps(outcome["curve"]) if outcome.get("curve") else None,
                outcome.get("seconds"),
                task.experiment,
                task.number,
                *FINISHED,
            ),
        )
        self.end(str(outcome["attempt"]), outcome)
        return done.rowcount == 1

    def end(self, attempt: str, outcome: Mapping[str, Any]) -> None:
        """Record how an attempt ended."""
        self._db.execute(
            "UPDATE attempts SET state = ?, ended = ?, exit_code = ?, seconds = ?, message = ?,"
            " node = COALESCE(node, ?) WHERE attempt = ?",
            (
                outcome["state"],
                time.time(),
                outcome.get("exit_code"),
                outcome.get("seconds"),
                outcome.get("message"),
                outcome.get("node"),
                attempt,
            ),
        )

    def blame(self, task: Task, whom: str, state: str, outcome: Mapping[str, Any]) -> None:
        """Count a lost node or a failed command for a task, and record what becomes of it."""
        column = "node_losses" if whom == NODE else "failures"
        self._db.execute(
            f"UPDATE tasks SET {column} = {column} + 1, state = ?, exit_code = ?, message = ?"
            " WHERE experiment = ? AND number = ? AND state NOT IN (?, ?)",
            (
                state,
                outcome.get("exit_code"),
                outcome.get("message"),
                task.experiment,
                task.number,
                *FINISHED,
            ),
        )

    def wait_again(self, task: Task) -> None:
        """Record that a task waits, without blame."""
        self._db.execute(
            "UPDATE tasks SET state = ? WHERE experiment = ? AND number = ?"
            " AND state NOT IN (?, ?)",
            (WAITING, task.experiment, task.number, *FINISHED),
        )

    def forgive(self) -> int:
        """Let failed tasks run again, with all their retries; how many there are."""
        with self.batch():
            done = self._db.execute(
                "UPDATE tasks SET state = ?, failures = 0, node_losses = 0, message = NULL"
                " WHERE state = ?",
                (WAITING, FAILED),
            )
            self._db.execute(
                "UPDATE experiments SET state = 'waiting', message = ''"
                " WHERE state IN ('failed', 'skipped')"
                " OR name IN (SELECT experiment FROM tasks WHERE state = ?)",
                (WAITING,),
            )
        return done.rowcount

    def attempts(self, experiment: str, number: int) -> list[dict[str, Any]]:
        """All attempts at a task, oldest first."""
        rows = self._db.execute(
            "SELECT * FROM attempts WHERE experiment = ? AND number = ? ORDER BY submitted",
            (experiment, number),
        )
        return [dict(row) for row in rows]

    def node_seconds(self, experiment: str) -> float:
        """Seconds that all attempts at an experiment's tasks took, the lost ones included."""
        row = self._db.execute(
            "SELECT SUM(COALESCE(seconds, ended - started)) FROM attempts WHERE experiment = ?",
            (experiment,),
        ).fetchone()
        return float(row[0] or 0.0)

    # --- the whole ---

    def copy_to(self, path: Path) -> None:
        """A consistent copy in one file, while it is written to. Raises BadLedger."""
        with self._clear():
            path.unlink(missing_ok=True)
            target = sqlite3.connect(path)
            try:
                self._db.backup(target)
            finally:
                target.close()
            with suppress(OSError):
                path.chmod(0o600)


def replace_content(path: Path, copy: Path | None) -> None:
    """Make a ledger what a copy is, or empty without one, in one transaction: who reads it
    meanwhile has the old or the new, and no file is removed under anybody. Raises BadLedger."""
    name = f"{copy.absolute().as_uri()}?{COPY}" if copy else ":memory:"
    try:
        source, target = sqlite3.connect(name, uri=True), sqlite3.connect(path, timeout=30)
        with closing(source), closing(target):
            source.backup(target)
    except sqlite3.Error as error:
        raise BadLedger(f"the ledger {path}: {error} — make room there") from error


def last_head(path: Path) -> str:
    """Which head has worked with a ledger's file last; empty when none has, as with a copy."""
    file = _head_file(path)
    return file.read_text() if file.exists() else ""


def _head_file(path: Path) -> Path:
    return path.with_name("head")


def _row(found: sqlite3.Row) -> Row:
    return Row(
        task=task_from(json.loads(found["frozen"])),
        state=found["state"],
        attempts=found["attempts"],
        node_losses=found["node_losses"],
        failures=found["failures"],
        accepted=found["accepted"],
        node=found["node"],
        exit_code=found["exit_code"],
        value=found["value"],
        results=json.loads(found["results"] or "{}"),
        seconds=found["seconds"],
        message=found["message"],
    )
