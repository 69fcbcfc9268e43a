from __future__ import annotations

import random
import shutil
import sqlite3
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from mayfly.errors import RemoteError, UserError
from mayfly.ledger import VERSION, Ledger, Unwritable


@pytest.fixture
def ledger(tmp_path):
    opened = Ledger(tmp_path / "state" / "ledger.sqlite")
    yield opened
    opened.close()


def add(ledger: Ledger, run: str) -> None:
    ledger.add(run, "local", f"s3://mayfly/{run}/", {"name": run})


def test_only_the_owner_can_read_it(ledger, tmp_path):
    add(ledger, "one")
    files = list((tmp_path / "state").iterdir())
    assert {path.name for path in files} >= {"ledger.sqlite", "ledger.sqlite-wal"}
    assert [path.name for path in files if stat.S_IMODE(path.stat().st_mode) & 0o077] == []


def test_an_intent_is_on_disk_before_the_call(ledger, tmp_path):
    """A second connection, as a process after a crash has it, sees the call that never returned."""
    add(ledger, "one")
    with ledger.intent("one", "create", "infrastructure") as step:
        other = Ledger(tmp_path / "state" / "ledger.sqlite")
        assert [(e.action, e.outcome) for e in other.journal("one")] == [("create", None)]
        other.close()
        step.detail = "infra-1"
    assert [(e.outcome, e.detail) for e in ledger.journal("one")] == [("done", "infra-1")]


WRITER = """
import pathlib, sys
from mayfly.ledger import Ledger
ledger = Ledger(pathlib.Path(sys.argv[1]))
for number in range(int(sys.argv[2]), 10**9):
    with ledger.intent("one", "create", str(number)):
        print(number, flush=True)
"""


def test_a_kill_at_any_time_loses_no_call_that_was_made(ledger, tmp_path):
    """What the writer prints stands for calls: each is in the journal before it."""
    add(ledger, "one")
    path, chance, made = tmp_path / "state/ledger.sqlite", random.Random(1), []
    for _ in range(10):
        made += killed_writer(path, first=len(made), after_s=chance.uniform(0, 0.1))
        reopened = Ledger(path)
        assert reopened._db.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
        assert set(made) <= {entry.target for entry in reopened.journal("one")}
        reopened.close()
    assert len(made) == len(set(made)) >= 10


def killed_writer(path: Path, first: int, after_s: float) -> list[str]:
    """What a process journalled that was killed some time after its first entry."""
    words = [sys.executable, "-c", WRITER, str(path), str(first)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as writer:
        begun = writer.stdout.readline()
        killer = threading.Timer(after_s, writer.kill)
        killer.start()
        lines = [begun, *writer.stdout]
        killer.join()
    assert writer.returncode == -9
    return [line.strip() for line in lines if line.endswith("\n")]


def test_a_log_that_was_cut_anywhere_leaves_a_beginning_of_the_journal(ledger, tmp_path):
    """As after a power cut: SQLite's write-ahead log ends somewhere, and all before it counts."""
    path = tmp_path / "state/ledger.sqlite"
    add(ledger, "one")
    ledger._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    for number in range(3):
        with ledger.intent("one", "create", str(number)) as step:
            step.detail = f"infra-{number}"
    whole = moments(ledger)
    log = path.with_name(f"{path.name}-wal").read_bytes()
    chance = random.Random(1)
    cuts = [*range(0, len(log), 512), *(chance.randrange(len(log)) for _ in range(40)), len(log)]
    lengths = []
    for cut in sorted(cuts):
        copy = tmp_path / "copy.sqlite"
        shutil.copy(path, copy)
        copy.with_name("copy.sqlite-shm").unlink(missing_ok=True)
        copy.with_name("copy.sqlite-wal").write_bytes(log[:cut])
        opened = Ledger(copy)
        found = moments(opened)
        opened.close()
        assert found == whole[: len(found)], f"cut at {cut}"
        lengths.append(len(found))
    assert lengths == sorted(lengths), "less of the log never tells more"
    assert (lengths[0], lengths[-1]) == (0, len(whole))


def moments(ledger: Ledger) -> list[tuple[str, str]]:
    """The journal as it was written: each intent, and each end, in its order."""
    told = []
    for entry in ledger.journal("one"):
        told.append((entry.target, "intended"))
        if entry.outcome:
            told.append((entry.target, f"{entry.outcome} {entry.detail}"))
    return told


def test_a_failed_call_is_journalled_and_raised(ledger):
    add(ledger, "one")
    with pytest.raises(RemoteError), ledger.intent("one", "create", "infrastructure"):
        raise RemoteError("quota")
    assert [(e.outcome, e.detail) for e in ledger.journal("one")] == [("failed", "quota")]


def test_a_run_remembers_how_it_went(ledger):
    add(ledger, "one")
    ledger.set_infrastructure("one", "infra-1")
    ledger.set_state("one", "destroyed")
    ledger.set_outcome("one", "failed", "no space")
    ledger.set_summary("one", {"ok": False})
    record = ledger.get("one")
    assert record.infrastructure == "infra-1"
    assert record.destroyed
    assert (record.outcome, record.error, record.summary) == ("failed", "no space", {"ok": False})
    assert record.spec == {"name": "one"}


def test_the_latest_run_is_meant_when_none_is_named(ledger):
    add(ledger, "one")
    add(ledger, "two")
    assert ledger.get(None).run == "two"
    assert [record.run for record in ledger.runs()] == ["two", "one"]


def test_an_unknown_run_names_the_nearest(ledger):
    add(ledger, "faces-261128-100000-abcd")
    add(ledger, "mnist-261128-100000-beef")
    with pytest.raises(UserError, match="faces-261128-100000-abcd"):
        ledger.get("faces-261128-100000-abce")


def test_no_run_at_all_says_how_to_start_one(ledger):
    with pytest.raises(UserError, match="mayfly deploy"):
        ledger.get(None)


def test_a_second_ledger_in_this_process_does_not_blind_the_first(tmp_path):
    """What others write after it was opened is still seen by both."""
    path = tmp_path / "ledger.sqlite"
    first = Ledger(path)
    first.add("r", "local", "s3://b/r/", {})
    first.runs()
    script = (
        "import sys, pathlib; from mayfly.ledger import Ledger;"
        " l = Ledger(pathlib.Path(sys.argv[1]));"
        " l.set_state('r', sys.argv[2]); l.close()"
    )
    second = Ledger(path)
    for state in ("creating", "configuring", "training"):
        subprocess.run([sys.executable, "-c", script, str(path), state], check=True)
        assert [ledger.get("r").state for ledger in (first, second, Ledger(path))] == [state] * 3


def test_a_ledger_of_a_newer_mayfly_is_left_alone(tmp_path):
    path = tmp_path / "ledger.sqlite"
    Ledger(path).close()
    with sqlite3.connect(path) as db:
        db.execute(f"PRAGMA user_version = {VERSION + 1}")
    before = path.read_bytes()
    with pytest.raises(UserError, match=f"newer Mayfly: .*: version {VERSION + 1}, not {VERSION}"):
        Ledger(path)
    assert path.read_bytes() == before


def test_an_older_ledger_gets_what_has_come_since(tmp_path):
    path = tmp_path / "ledger.sqlite"
    first = Ledger(path)
    add(first, "one")
    first.close()
    with sqlite3.connect(path) as db:
        db.execute("ALTER TABLE runs DROP COLUMN im")
        db.execute("PRAGMA user_version = 0")
    db.close()
    ledger = Ledger(path)
    assert ledger.get("one").im is None
    ledger.add("two", "aws", "s3://b/two/", {}, "https://im.example")
    assert ledger.get("two").im == "https://im.example"


def test_something_else_in_its_place_is_one_line(tmp_path):
    path = tmp_path / "ledger.sqlite"
    path.write_text("no database, but long enough to be taken for one" * 50)
    with pytest.raises(Unwritable, match=r"cannot be written: .*ledger\.sqlite: file is not a"):
        Ledger(path)


def test_a_full_disk_lets_no_call_be_made(ledger):
    add(ledger, "one")
    fill(ledger)
    with pytest.raises(Unwritable, match="is full — make room"):
        for _ in range(100):  # some space is left in the last page
            with ledger.intent("one", "create", "x" * 1000):
                made = len(ledger.journal("one"))
    assert made == len(ledger.journal("one"))
    assert ledger.get("one").run == "one"


def fill(ledger: Ledger) -> None:
    """Let the ledger's file grow no more, as on a full disk."""
    pages = ledger._db.execute("PRAGMA page_count").fetchone()[0]
    ledger._db.execute(f"PRAGMA max_page_count = {pages}")


def test_a_run_remembers_its_places_and_its_last_proof(ledger):
    add(ledger, "one")
    assert (ledger.places("one"), ledger.proof("one")) == ([], None)
    ledger.add_place("one", "us-east-1", "123456789012")
    ledger.add_place("one", "eu-west-1")
    ledger.add_place("one", "us-east-1", "another attempt there")
    found = [(place.region, place.account) for place in ledger.places("one")]
    assert found == [("us-east-1", "123456789012"), ("eu-west-1", None)]
    ledger.add_proof("one", {"ok": False, "taken": "2026-11-28T10:00:00Z", "count": 2})
    ledger.add_proof("one", {"ok": True, "taken": "2026-11-28T10:01:00Z", "count": 0})
    assert ledger.proof("one")["count"] == 0


def test_a_ledger_of_before_the_sweeps_gets_their_tables(tmp_path):
    path = tmp_path / "ledger.sqlite"
    first = Ledger(path)
    add(first, "one")
    first.close()
    with sqlite3.connect(path) as db:
        db.executescript("DROP TABLE places; DROP TABLE proofs; PRAGMA user_version = 1")
    db.close()
    ledger = Ledger(path)
    assert ledger.get("one").spec == {"name": "one"}
    assert ledger.places("one") == []
    ledger.add_place("one", None)
    assert [place.region for place in ledger.places("one")] == [None]
    assert ledger.proof("one") is None


def test_a_ledger_of_an_earlier_version_gets_what_is_new(ledger, tmp_path):
    path = tmp_path / "state" / "ledger.sqlite"
    add(ledger, "one")
    with sqlite3.connect(path) as db:
        db.execute("ALTER TABLE runs DROP COLUMN cost")
        db.execute("PRAGMA user_version = 1")
    newer = Ledger(path)
    assert newer.get("one").cost is None
    newer.set_cost("one", {"currency": "USD"})
    assert newer.get("one").cost == {"currency": "USD"}
    newer.close()
