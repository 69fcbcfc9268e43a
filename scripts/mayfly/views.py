"""Tables for people, of runs and of one run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich.table import Table

from mayfly.clouds import notices
from mayfly.deploy import Ready
from mayfly.display import duration
from mayfly.ledger import Record
from mayfly.local.platform import LocalPlatform
from mayfly.watch import Status


def run_document(record: Record) -> dict[str, Any]:
    """Return what `ls` says of a run."""
    summary = record.summary or {}
    return {
        "run": record.run,
        "cloud": record.cloud,
        "state": record.state,
        "outcome": record.outcome,
        "accuracy": summary.get("accuracy"),
        "uri": record.uri,
        "infrastructure": record.infrastructure,
        "created": record.created,
        "updated": record.updated,
        "error": record.error,
    }


def runs_table(documents: Iterable[Mapping[str, Any]]) -> Table:
    """Return the runs as a table, in the order given."""
    table = Table(box=None, pad_edge=False)
    for title in ("RUN", "CLOUD", "NODES", "OUTCOME", "ACCURACY", "STARTED"):
        table.add_column(title, no_wrap=title == "RUN")
    for run in documents:
        accuracy = run.get("accuracy")
        table.add_row(
            run["run"],
            run["cloud"],
            run["state"],
            run["outcome"] or "",
            "" if accuracy is None else f"{accuracy:.4f}",
            run["created"][:19].replace("T", " "),
        )
    return table


def status_document(
    record: Record, status: Status | None, nodes: Mapping[str, str], preprocessing: str = ""
) -> dict[str, Any]:
    """Return what `status` says: the record, what the run reports, and its nodes' states.

    Before training, `preprocessing` is how far that is.
    """
    return {
        **run_document(record),
        "nodes": dict(nodes),
        "preprocessing": preprocessing or None,
        "status": status.raw if status else None,
    }


def status_table(document: Mapping[str, Any], status: Status | None) -> Table:
    """Return one run's state as a table."""
    table = Table(title=f"run {document['run']}", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    for key in ("state", "outcome", "error", "uri", "infrastructure", "preprocessing"):
        if document.get(key):
            table.add_row(key, str(document[key]))
    for node, state in document["nodes"].items():
        table.add_row(node, state)
    if status is not None:
        table.add_row("reports", f"{status.state} ({status.updated})")
        table.add_row("progress", status.line())
        for task, what in sorted(status.tasks.items()):
            table.add_row(task, f"{what.get('state')} on {what.get('node')}")
    return table


def plan_document(ready: Ready) -> dict[str, Any]:
    """Return what `plan` says: what a run would be made of, and where its RADL was written."""
    spec = ready.job.spec
    return {
        "run": ready.run.id,
        "run_uri": ready.uri,
        "radl": str(ready.path),
        "nodes": {group: spec.count(group) for group in ("ps", "worker")},
        "image": ready.run.image,
        "notices": notices(spec, ready.job.profile),
        "spec": spec.model_dump(mode="json"),
    }


def plan_table(document: Mapping[str, Any]) -> Table:
    """Return a plan for people."""
    spec = document["spec"]
    trainer = spec["trainer"]
    rows = {
        "cloud": spec["cloud"],
        "nodes": ", ".join(f"{count} {group}" for group, count in document["nodes"].items()),
        "image": document["image"],
        "program": trainer["program"],
        "training": f"{trainer['engine']}, {trainer['mode']}, {trainer['steps']:,} global steps",
        "data": spec["data"]["source"],
        **_preprocess_row(spec["data"]["preprocess"]),
        "model": f"{document['run_uri']}model/",
        "longest": duration(spec["limits"]["max_duration"]),
        "RADL": document["radl"],
    }
    table = Table(title="nothing was made yet", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for key, value in rows.items():
        table.add_row(key, str(value))
    for notice in document["notices"]:
        table.add_row("note", notice)
    return table


def _preprocess_row(wanted: Mapping[str, Any] | None) -> dict[str, str]:
    return {"preprocess": f"to {wanted['to']}, by all workers"} if wanted else {}


def platform_document(made: LocalPlatform) -> dict[str, Any]:
    """Return what runs on this machine for CLOUD=local; no key is in it."""
    return {
        "im_url": made.im_url,
        "im_auth_file": str(made.im_auth_file),
        "docker_host": made.docker_host,
        "s3_endpoint": made.s3_endpoint,
        "image": made.image,
        "phases": {name: round(seconds, 2) for name, seconds in made.phases.items()},
        "reused": dict(made.reused),
    }


def platform_table(document: Mapping[str, Any]) -> Table:
    """Return the local platform for people: what was reused, and what was made in which time."""
    table = Table(show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for part, reused in document["reused"].items():
        table.add_row(part, "reused" if reused else f"made in {duration(document['phases'][part])}")
    for key in ("im_url", "s3_endpoint", "docker_host", "image"):
        table.add_row(key, str(document[key]))
    return table


def services_table(document: Mapping[str, str | None]) -> Table:
    """Return the services of the local platform for people."""
    table = Table(show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for part, where in document.items():
        table.add_row(part, where or "not running")
    return table
