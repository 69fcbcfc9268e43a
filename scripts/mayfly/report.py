"""Gather what a run left, wherever it is, and show the autopsy: terminal, JSON, one HTML file.

The ledger is always there; the bucket may be gone or out of reach, which the report then says.
Everything passes the redaction once, here, before anybody sees it.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, MutableMapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import jinja2
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from mayfly.autopsy import Evidence, examine
from mayfly.credentials import S3Settings, find_s3_settings
from mayfly.display import duration
from mayfly.errors import MayflyError, UserError
from mayfly.ledger import Ledger, Record
from mayfly.local import platform
from mayfly.redact import Redactor, hide
from mayfly.run_store import RunStore
from mayfly.services import LOCAL, open_services
from mayfly_train.errors import NodeError

LOGS = 8  # of the tasks that failed
CONTEXTUALIZATION = "contextualization"


def make_report(
    run: str | None, ledger: Ledger, environ: MutableMapping[str, str]
) -> dict[str, Any]:
    """Return the report on a run, the latest when none is named, without any secret in it."""
    record = ledger.get(run)
    redact, store, notes = Redactor(), None, []
    try:
        settings = _find_settings(record, environ)
        redact = redact.knowing(settings.secrets)
        store = RunStore(settings.client(), record.uri)
    except (MayflyError, NodeError) as error:
        notes.append(f"the bucket cannot be reached, so this is from the ledger alone: {error}")
    found = _gather(record, ledger, store, notes)
    hidden: dict[str, Any] = hide(examine(found), redact)
    return hidden


def _find_settings(record: Record, environ: MutableMapping[str, str]) -> S3Settings:
    """Return how to reach the run's bucket; a local platform that is down is not started for it."""
    if record.cloud != LOCAL:
        return find_s3_settings(environ, None)
    if platform.status(environ)["s3"] is None:
        raise UserError("the local S3 server does not run", "`mayfly local up`, if it still has it")
    return open_services(LOCAL, environ, lambda _: None).s3


def _gather(record: Record, ledger: Ledger, store: RunStore | None, notes: list[str]) -> Evidence:
    journal = [asdict(entry) for entry in ledger.journal(record.run)]
    run = {field.name: getattr(record, field.name) for field in fields(record)}
    left: dict[str, Any] = {}
    if store is not None:
        try:
            left = read_bucket(store)
        except NodeError as error:
            notes.append(f"the bucket cannot be read, so this is from the ledger alone: {error}")
        else:
            if left["status"] is None:
                notes.append("the run has no status.json: training never began to report")
    return Evidence(run=run, journal=journal, notes=notes, **left)


def read_bucket(store: RunStore) -> dict[str, Any]:
    """Return what a run left below its URI. Raises NodeError when the bucket does not answer."""
    names = store.logs()  # the first request: it tells whether the bucket answers
    status = store.status()
    events = [*_lines_of_json(_text(store, "events.jsonl"))]
    wanted = _tasks_to_read(status.raw if status else {}, events)
    texts = {
        name.removesuffix(".log"): store.read_text(uri)
        for name, uri in names.items()
        if name.removesuffix(".log") in (*wanted, CONTEXTUALIZATION)
    }
    return {
        "status": status.raw if status else None,
        "events": events,
        "staging": store.staging(),
        "messages": texts.pop(CONTEXTUALIZATION, ""),
        "logs": texts,
    }


def _tasks_to_read(status: Mapping[str, Any], events: list[dict[str, Any]]) -> list[str]:
    """The tasks that failed, the one that decided the run first."""
    decided = (status.get("error") or {}).get("task")
    failed = [e.get("task") for e in events if e.get("state") == "failed"]
    return list(dict.fromkeys(str(task) for task in (decided, *failed) if task))[:LOGS]


def _text(store: RunStore, name: str) -> str:
    try:
        return store.read_text(store.uri.join(name))
    except NodeError:
        return ""


def _lines_of_json(text: str) -> list[dict[str, Any]]:
    """The documents of a JSON-lines text; a line that is none is left out."""
    found = []
    for line in text.splitlines():
        try:
            document = json.loads(line)
        except ValueError:
            continue
        if isinstance(document, dict):
            found.append(document)
    return found


def write_html(report: Mapping[str, Any], path: Path) -> None:
    """Write the page, whole or not at all. Raises UserError when it cannot be written."""
    try:
        with tempfile.NamedTemporaryFile(
            "w", dir=path.parent, prefix=f".{path.name}.", delete=False, encoding="utf-8"
        ) as file:
            partial = Path(file.name)
            try:
                file.write(render_html(report))
                file.flush()
                os.fsync(file.fileno())
                partial.chmod(0o644)
                partial.replace(path)
            except BaseException:
                partial.unlink(missing_ok=True)
                raise
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}", "name another file") from error


def render_html(report: Mapping[str, Any]) -> str:
    """Return the report as one HTML page that needs nothing else."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("mayfly"),
        autoescape=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["duration"] = duration
    longest = max((phase["seconds"] for phase in report["phases"]), default=1.0)
    return environment.get_template("report.html.j2").render(report=report, longest=longest)


def render_terminal(report: Mapping[str, Any]) -> RenderableType:
    """Return the report for a terminal."""
    bad = report["error"] is not None
    parts: list[RenderableType] = [
        Text(f"run {report['run']}: {report['outcome'] or report['state']}", style="bold"),
        Text(f"at fault: {report['at_fault']} — {report['why']}", style="red" if bad else "green"),
        *(Text(note, style="yellow") for note in report["notes"]),
    ]
    if bad:
        parts += _error_lines(report["error"])
    if report["advice"]:
        parts += [_title("what to do next"), *(Text(f"  • {line}") for line in report["advice"])]
    parts += [_title("phases"), _phase_table(report["phases"])] if report["phases"] else []
    parts += [_title("tasks"), _task_table(report["tasks"])] if report["tasks"] else []
    return Group(*parts, _title("timeline (UTC)"), _timeline_table(report["timeline"]))


def _error_lines(error: Mapping[str, Any]) -> list[RenderableType]:
    where = " on ".join(str(error[key]) for key in ("task", "node") if error[key])
    at = f" at {_clock(error['time'])}" if error["time"] else ""
    lines: list[RenderableType] = [
        _title(f"first error{at}{': ' + where if where else ''}"),
        Text(f"  {error['message']}"),
    ]
    return lines + [Text(f"  | {line}", style="dim") for line in error["lines"]]


def _title(text: str) -> RenderableType:
    return Padding(Text(text, style="bold"), (1, 0, 0, 0), expand=False)


def _phase_table(phases: list[Mapping[str, Any]]) -> Table:
    table = Table(show_header=False, box=None)
    for phase in phases:
        table.add_row(phase["name"], Text(duration(phase["seconds"]), justify="right"))
    return table


def _task_table(tasks: list[Mapping[str, Any]]) -> Table:
    table = Table(box=None)
    for column in ("task", "node", "state", "attempts", "exit_code"):
        table.add_column(column.replace("_", " "))
    for task in tasks:
        cells = (task.get(key) for key in ("task", "node", "state", "attempts", "exit_code"))
        table.add_row(*("" if cell is None else str(cell) for cell in cells))
    return table


def _timeline_table(timeline: list[Mapping[str, Any]]) -> Table:
    table = Table(show_header=False, box=None)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for entry in timeline:
        cells = (_clock(entry["time"]), entry["where"], entry["what"])
        table.add_row(*map(Text, cells), style="red" if entry["bad"] else None)
    return table


def _clock(time: str | None) -> str:
    return time[11:19] if time else ""
