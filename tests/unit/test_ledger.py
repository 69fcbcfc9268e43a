from __future__ import annotations

import stat
import subprocess
import sys

import pytest

from mayfly.errors import RemoteError, UserError
from mayfly.ledger import Ledger


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
