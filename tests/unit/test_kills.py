"""The account of what was killed: what the chief's log says of it, and the table in the docs."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from faults import kills

ROOT = Path(__file__).resolve().parents[2]
ROW = {
    "engine": "horovod",
    "task": "worker-0",
    "what": "task",
    "at_step": 1020,
    "restart_s": 3.21,
    "step_s": 41.6,
    "restored_step": 812,
    "redone": 233,
    "attempts": {"chief-0": 1, "worker-0": 2},
    "outcome": "succeeded",
}


@pytest.fixture(scope="module")
def kills_table() -> ModuleType:
    path = ROOT / "tests/bench/kills_table.py"
    spec = importlib.util.spec_from_file_location("kills_table", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- what a log says ------------------------------------------------------------------------------


def test_a_step_that_was_under_way_is_not_one_after_the_kill():
    assert kills.since_the_kill(["progress: step=100 loss=0.5"]) == (False, None)


def test_others_that_go_on_tell_two_steps():
    lines = ["progress: step=100 loss=0.5", "a warning", "progress: step=105 loss=0.4"]
    assert kills.since_the_kill(lines) == (True, None)


def test_after_a_restart_the_first_step_counts():
    lines = ["step=95 in the middle of a line", "progress: restored_step=40"]
    assert kills.since_the_kill(lines) == (False, 40)
    assert kills.since_the_kill([*lines, "progress: step=45 loss=0.4"]) == (True, 40)


def test_training_that_begins_again_has_gone_back_to_step_0():
    assert kills.since_the_kill(["progress: restored_step=0", "progress: step=5"]) == (True, 0)


def test_estimators_lines_are_read_too():
    lines = ["INFO:tensorflow:Restoring parameters from hdfs://n/model.ckpt-77"]
    lines += ["INFO:tensorflow:loss = 0.31, step = 80"]
    assert kills.since_the_kill(lines) == (True, 77)


# --- a kill, followed -----------------------------------------------------------------------------


class FakeRun:
    """A run whose worker is killed: it is back at the third look, and its log tells steps then."""

    LOOKS = (10, 10, None, 30)
    LOGS = ("", "progress: restored_step=40\n", "progress: restored_step=40\nprogress: step=45\n")

    def __init__(self) -> None:
        self.lab = self
        self.looks, self.logs = list(self.LOOKS), list(self.LOGS)
        self.commands: list[str] = []

    def status(self) -> dict[str, Any]:
        return {"state": "training", "global_step": 40}

    def end(self, seconds: float) -> dict[str, Any]:
        tasks = {"chief-0": {"attempts": 1}, "worker-0": {"attempts": 2}}
        return {"state": "succeeded", "error": None, "tasks": tasks, "global_step": 100,
                "samples_seen": 3200, "samples_processed": 3840}  # fmt: skip

    def node_of(self, task: str) -> str:
        return {"chief-0": "worker-0", "worker-0": "worker-1"}[task]

    def process(self, task: str, rank: bool) -> int | None:
        return self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]

    def sh(self, node: str, script: str) -> str:
        self.commands.append(f"{node}: {script}")
        if script.startswith("stat"):
            return "7000\n"
        if script.startswith("head"):
            return "progress: step=55 loss=1\nprogress: step=60 loss=1\nWARN"
        if script.startswith("tail"):
            return self.logs.pop(0) if len(self.logs) > 1 else self.logs[0]
        return ""


def test_a_kill_is_followed_to_the_next_step_and_leaves_a_row(tmp_path, monkeypatch):
    monkeypatch.setattr(kills, "ROWS", tmp_path / "build/kills.jsonl")
    monkeypatch.setattr(kills.time, "sleep", lambda _seconds: None)
    run = FakeRun()
    kills.kill_and_tell(run, "horovod", "worker-0")  # type: ignore[arg-type]
    (row,) = map(json.loads, kills.ROWS.read_text().splitlines())
    assert row.pop("restart_s") is not None
    assert row.pop("step_s") is not None
    assert row == {
        **{"engine": "horovod", "task": "worker-0", "what": "task", "at_step": 60},
        **{"restored_step": 40, "redone": 20, "outcome": "succeeded"},
        "attempts": {"chief-0": 1, "worker-0": 2},
    }
    assert run.commands[0] == "worker-1: kill -KILL 10"
    assert run.commands[2] == f"worker-0: head -c 7000 {kills.LOG} | tail -c {kills.LAST_BYTES}"
    assert run.commands[3] == f"worker-0: tail -c +7001 {kills.LOG}"


def test_a_run_that_does_not_end_leaves_a_row_too(tmp_path, monkeypatch):
    monkeypatch.setattr(kills, "ROWS", tmp_path / "kills.jsonl")
    monkeypatch.setattr(kills.time, "sleep", lambda _seconds: None)
    run = FakeRun()

    def never(seconds: float) -> dict[str, Any]:
        raise AssertionError("waited in vain")

    monkeypatch.setattr(run, "end", never)
    with pytest.raises(AssertionError, match="in vain"):
        kills.kill_and_tell(run, "mwms", "worker-0")  # type: ignore[arg-type]
    assert json.loads(kills.ROWS.read_text())["outcome"] == "did not end within 600 s"


# --- the table ------------------------------------------------------------------------------------


def test_a_row_says_what_happened_and_how_long_it_took(kills_table):
    assert kills_table.line(ROW) == (
        "| `horovod` | `worker-0` | all go on from step 812, of about 1020 | 3.2 s | 42 s | 233 "
        "| succeeded |\n"
    )


def test_other_tasks_that_were_started_again_are_named(kills_table):
    row = {**ROW, "what": "rank", "attempts": {"chief-0": 2, "worker-0": 2}}
    assert "; `chief-0` started again, too |" in kills_table.line(row)
    assert "| a rank of `worker-0` |" in kills_table.line(row)


def test_others_may_go_on_and_the_end_may_not_be_seen(kills_table):
    row = {**ROW, "restored_step": None, "step_s": 0.64, "redone": 0}
    assert "| the others go on | 3.2 s | 0.6 s | 0 |" in kills_table.line(row)
    assert "| all go on from the last checkpoint |" in kills_table.line({**row, "redone": 9})
    lost = {**row, "step_s": None, "restart_s": None, "outcome": "chief-0 a|b"}
    del lost["redone"], lost["attempts"]
    expected = "| no step was seen | not seen | not seen |  | chief-0 a\\|b |\n"
    assert kills_table.line(lost).endswith(expected)


def test_the_last_of_each_kill_counts_and_engines_stand_together(kills_table):
    rows = [ROW, {**ROW, "engine": "mwms"}, {**ROW, "task": "chief-0"}, {**ROW, "redone": 7}]
    lines = kills_table.table(rows).splitlines()[2:]
    assert [line.split(" | ")[0:2] for line in lines] == [
        ["| `horovod`", "`worker-0`"],
        ["| `horovod`", "`chief-0`"],
        ["| `mwms`", "`worker-0`"],
    ]
    assert "| 7 |" in lines[0]
    assert kills_table.table([]) == kills_table.NONE_YET


def test_the_table_takes_the_place_of_the_one_before(kills_table, tmp_path):
    page, rows = tmp_path / "page.md", tmp_path / "rows.jsonl"
    page.write_text(f"above\n{kills_table.BEGIN}\nold\n{kills_table.END}\nbelow\n")
    rows.write_text(f"{json.dumps(ROW)}\n")
    for _ in range(2):
        assert kills_table.main([str(rows), str(page)]) == 0
    made = kills_table.table([ROW])
    expected = f"above\n{kills_table.BEGIN}\n\n{made}\n{kills_table.END}\nbelow\n"
    assert page.read_text() == expected


def test_a_page_without_marks_and_missing_rows_are_said(kills_table, tmp_path, capsys):
    with pytest.raises(SystemExit, match="put them where the table belongs"):
        kills_table.between_marks("a page", "text")
    assert kills_table.main([str(tmp_path / "none")]) == 2
    assert "run pytest on tests/e2e/faults first" in capsys.readouterr().err


def test_the_docs_have_the_marks(kills_table):
    page = kills_table.PAGE.read_text()
    assert page.count(kills_table.BEGIN) == page.count(kills_table.END) == 1
