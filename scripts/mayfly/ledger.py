"""The control machine's memory of its runs: a write-ahead journal in SQLite.

Each call that creates or destroys something is written down before it is made, and its outcome
after. Whatever happens between the two, the next `destroy` knows that there may be something.
No secret is ever stored here.
"""

from __future__ import annotations

import difflib
import json
import os
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mayfly import run_lock
from mayfly.errors import MayflyError, UserError

# Of the tables below, and of what their words mean; a ledger of a newer Mayfly has a higher one.
# 2: "destroyed" says that a sweep of the recorded places was empty, which an older Mayfly, whose
# word it would be to say so, has never looked at.
VERSION = 2

SCHEMA = """
CREATE TABLE IF NOT EXISTS runs (
  run TEXT PRIMARY KEY, cloud TEXT NOT NULL, state TEXT NOT NULL, uri TEXT NOT NULL,
  infrastructure TEXT, spec TEXT NOT NULL, outcome TEXT, error TEXT, summary TEXT,
  created TEXT NOT NULL, updated TEXT NOT NULL, im TEXT, cost TEXT
);
CREATE TABLE IF NOT EXISTS journal (
  id INTEGER PRIMARY KEY, run TEXT NOT NULL REFERENCES runs(run), action TEXT NOT NULL,
  target TEXT NOT NULL, intended TEXT NOT NULL, outcome TEXT, detail TEXT, ended TEXT
);
CREATE TABLE IF NOT EXISTS places (
  run TEXT NOT NULL REFERENCES runs(run), region TEXT NOT NULL, account TEXT,
  added TEXT NOT NULL, PRIMARY KEY (run, region)
);
CREATE TABLE IF NOT EXISTS proofs (
  id INTEGER PRIMARY KEY, run TEXT NOT NULL REFERENCES runs(run), taken TEXT NOT NULL,
  clean INTEGER NOT NULL, document TEXT NOT NULL
);
"""
STATES = (
    "preparing",
    "creating",
    "configuring",
    "training",
    "exporting",
    "kept",
    "destroying",
    "destroyed",
)


@dataclass(frozen=True)
class Record:
    """One row of the ledger: what a run is and how far it came."""

    run: str
    cloud: str
    state: str  # one of STATES
    uri: str
    infrastructure: str | None
    spec: dict[str, Any]
    outcome: str | None  # succeeded | stopped | failed | interrupted; None while nobody knows
    error: str | None
    summary: dict[str, Any] | None
    created: str
    updated: str
    im: str | None = None
    """Address of the foreign IM that made the nodes, or path of their inventory; None: our IM."""
    cost: dict[str, Any] | None = None  # the prices and caps that it was planned with

    @property
    def destroyed(self) -> bool:
        """Whether nothing of the run is left."""
        return self.state == "destroyed"


@dataclass(frozen=True)
class Entry:
    """One journalled call; `outcome` is None while nobody knows how it ended."""

    run: str
    action: str
    target: str
    outcome: str | None
    detail: str | None
    intended: str = ""
    ended: str | None = None


@dataclass(frozen=True)
class Whereabouts:
    """A place in which a run may have made something."""

    region: str | None  # None: the only one, or the default of the cloud's own settings
    account: str | None  # whose keys were used, as the provider says


class Unwritable(MayflyError):
    """The ledger cannot be written: the disk is full, say. What is not journalled is not made."""


class Step:
    """The open half of a journal entry: tell it what the call returned."""

    def __init__(self) -> None:
        self.detail = ""


class Ledger:
    """SQLite in WAL mode, readable by its owner only."""

    def __init__(self, path: Path) -> None:
        """Open or make the ledger; its directory gets mode 0700 and the file 0600.

        Raises Unwritable when that fails, UserError for a ledger of a newer Mayfly.
        """
        self._path = path
        try:
            self._open(path)
        except (OSError, sqlite3.Error) as error:
            raise self._unwritable(error) from error

    def _open(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Closing any descriptor of the file drops this process' locks on it, and with them what
        # other connections here rely on (sqlite.org/howtocorrupt.html): only a new file is opened.
        if not path.exists():
            os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
        path.chmod(0o600)  # SQLite gives -wal and -shm the same mode
        self._db = sqlite3.connect(path, timeout=30, isolation_level=None)
        self._db.row_factory = sqlite3.Row
        version = self._known_version()
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=FULL")  # an intent must survive a power cut
        if version < VERSION:  # else nothing is written: a full disk is not to hide what there is
            self._make_tables()

    def _known_version(self) -> int:
        """Return the ledger's version; raises UserError for one whose rules are not known here."""
        found = int(self._db.execute("PRAGMA user_version").fetchone()[0])
        if found > VERSION:
            self._db.close()
            raise UserError(
                f"the ledger is of a newer Mayfly: {self._path}: version {found}, not {VERSION}",
                "update this Mayfly, or set MAYFLY_STATE_DIR to another directory",
            )
        return found

    def _make_tables(self) -> None:
        """Make the tables, and add to older ones what has come since; several may do it at once."""
        self._db.executescript(SCHEMA)
        columns = {row["name"] for row in self._db.execute("PRAGMA table_info(runs)")}
        for column in ("im", "cost"):
            if column not in columns:
                with suppress(sqlite3.OperationalError):  # another process was quicker
                    self._db.execute(f"ALTER TABLE runs ADD COLUMN {column} TEXT")
        self._db.execute(f"PRAGMA user_version = {VERSION}")

    def _write(self, statement: str, values: tuple[object, ...]) -> sqlite3.Cursor:
        """Execute a statement that changes something. Raises Unwritable."""
        try:
            return self._db.execute(statement, values)
        except sqlite3.Error as error:
            raise self._unwritable(error) from error

    def _unwritable(self, error: Exception) -> Unwritable:
        advice = "make room there, or set MAYFLY_STATE_DIR; what is not journalled is not made"
        return Unwritable(f"the ledger cannot be written: {self._path}: {error}", advice)

    def close(self) -> None:
        self._db.close()

    @contextmanager
    def alone(self, run: str, command: str) -> Iterator[None]:
        """Keep other processes from making, changing or removing anything of a run in the block.

        Raises run_lock.Busy, which names the process that works on it; Unwritable when a file
        beside the ledger cannot be made.
        """
        with ExitStack() as stack:
            try:
                stack.enter_context(run_lock.held(self._locks, run, command))
            except OSError as error:
                raise self._unwritable(error) from error
            yield

    def at_work(self, run: str) -> run_lock.Holder | None:
        """Return which process works on a run now, None when none does."""
        return run_lock.holder(self._locks, run)

    @property
    def _locks(self) -> Path:
        return self._path.parent / "locks"

    def add(
        self, run: str, cloud: str, uri: str, spec: dict[str, Any], im: str | None = None
    ) -> None:
        """Record a new run, before anything of it exists; `im`: see `Record`.

        Raises UserError when there is one of that name, Unwritable.
        """
        now = _now()
        try:
            self._write(
                "INSERT INTO runs (run, cloud, state, uri, spec, created, updated, im)"
                " VALUES (?, ?, 'preparing', ?, ?, ?, ?, ?)",
                (run, cloud, uri, json.dumps(spec, sort_keys=True), now, now, im),
            )
        except Unwritable as error:
            if isinstance(error.__cause__, sqlite3.IntegrityError):
                raise UserError(f"there is a run of this name: {run}", "start it again") from None
            raise

    def set_state(self, run: str, state: str) -> None:
        """Move a run on to one of STATES."""
        self._set(run, "state", state)

    def set_outcome(self, run: str, outcome: str, error: str | None = None) -> None:
        """Record how a run ended, whether or not its nodes are gone yet."""
        self._set(run, "outcome", outcome)
        self._set(run, "error", error)

    def set_infrastructure(self, run: str, infrastructure: str | None) -> None:
        """Record which infrastructure belongs to a run; None once that of an offer is gone."""
        self._set(run, "infrastructure", infrastructure)

    def set_summary(self, run: str, summary: dict[str, Any]) -> None:
        """Keep the document that the run ended with."""
        self._set(run, "summary", json.dumps(summary))

    def add_place(self, run: str, region: str | None, account: str | None = None) -> None:
        """Record where a run may have something, before anything is made there."""
        self._write(
            "INSERT OR IGNORE INTO places (run, region, account, added) VALUES (?, ?, ?, ?)",
            (run, region or "", account, _now()),
        )

    def places(self, run: str) -> list[Whereabouts]:
        """Return where a run may have something, in the order of its attempts."""
        rows = self._db.execute("SELECT * FROM places WHERE run = ? ORDER BY rowid", (run,))
        return [Whereabouts(row["region"] or None, row["account"]) for row in rows]

    def add_proof(self, run: str, proof: dict[str, Any]) -> None:
        """Keep what was found when somebody looked for what is left of a run."""
        self._write(
            "INSERT INTO proofs (run, taken, clean, document) VALUES (?, ?, ?, ?)",
            (run, proof["taken"], int(proof["ok"]), json.dumps(proof)),
        )

    def proof(self, run: str) -> dict[str, Any] | None:
        """Return the last proof of a run, None while there is none."""
        row = self._db.execute(
            "SELECT document FROM proofs WHERE run = ? ORDER BY id DESC LIMIT 1", (run,)
        ).fetchone()
        return dict(json.loads(row["document"])) if row else None

    def set_cost(self, run: str, basis: dict[str, Any]) -> None:
        """Keep what a run's cost is computed from (see `spending`)."""
        self._set(run, "cost", json.dumps(basis))

    def _set(self, run: str, column: str, value: str | None) -> None:
        # `column` is always one of this module's own words, never input.
        self._write(
            f"UPDATE runs SET {column} = ?, updated = ? WHERE run = ?", (value, _now(), run)
        )

    @contextmanager
    def intent(self, run: str, action: str, target: str) -> Iterator[Step]:
        """Journal a call: the intent before the block, `done` or the exception's text after it.

        Raises Unwritable instead of entering the block when the intent cannot be written.
        """
        cursor = self._write(
            "INSERT INTO journal (run, action, target, intended) VALUES (?, ?, ?, ?)",
            (run, action, target, _now()),
        )
        step = Step()
        try:
            yield step
        except BaseException as error:
            with suppress(Unwritable):  # the call's own error is the one to tell
                self._finish(cursor.lastrowid, "failed", str(error) or type(error).__name__)
            raise
        self._finish(cursor.lastrowid, "done", step.detail)

    def _finish(self, entry: int | None, outcome: str, detail: str) -> None:
        self._write(
            "UPDATE journal SET outcome = ?, detail = ?, ended = ? WHERE id = ?",
            (outcome, detail, _now(), entry),
        )

    def journal(self, run: str) -> list[Entry]:
        """Return what was done for a run, oldest first."""
        rows = self._db.execute("SELECT * FROM journal WHERE run = ? ORDER BY id", (run,))
        return [Entry(**{key: row[key] for key in Entry.__dataclass_fields__}) for row in rows]

    def runs(self) -> list[Record]:
        """Return all runs, newest first."""
        rows = self._db.execute("SELECT * FROM runs ORDER BY created DESC, rowid DESC")
        return [_record(row) for row in rows]

    def get(self, run: str | None) -> Record:
        """Return one run, the latest when none is named.

        Raises UserError when there is none, naming the nearest one known.
        """
        known = self.runs()
        if not known:
            raise UserError("no run is known here", "start one with `mayfly deploy`")
        if run is None:
            return known[0]
        for candidate in known:
            if candidate.run == run:
                return candidate
        near = difflib.get_close_matches(run, [r.run for r in known], n=1, cutoff=0.0)
        advice = f"did you mean {near[0]!r}? `mayfly ls` lists all"
        raise UserError(f"unknown run: {run!r}", advice)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _record(row: sqlite3.Row) -> Record:
    summary = json.loads(row["summary"]) if row["summary"] else None
    return Record(
        run=row["run"],
        cloud=row["cloud"],
        state=row["state"],
        uri=row["uri"],
        infrastructure=row["infrastructure"],
        spec=json.loads(row["spec"]),
        outcome=row["outcome"],
        error=row["error"],
        summary=summary,
        created=row["created"],
        updated=row["updated"],
        im=row["im"],
        cost=json.loads(row["cost"]) if row["cost"] else None,
    )
