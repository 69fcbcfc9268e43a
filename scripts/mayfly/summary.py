"""How a run ended, as one JSON document and as a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rich.table import Table

from mayfly.display import duration
from mayfly.errors import LimitReached, MayflyError
from mayfly.spending import describe
from mayfly.watch import STOPPED, Broken, Status
from mayfly_train.errors import NodeError

PHASES = (
    "image",
    "infrastructure",
    "contextualization",
    "staging",
    "training",
    "export",
    "destroy",
)


def success_document(
    run: str, uri: str, status: Status, phases: Mapping[str, float], leftovers: int
) -> dict[str, Any]:
    """Return the document of a run that ended well; phases are in seconds."""
    return {
        "ok": True,
        "run": run,
        "model_uri": status.model_uri or f"{uri}model/",
        "accuracy": status.accuracy,
        "global_step": status.global_step,
        "samples_seen": status.samples_seen,
        "samples_processed": status.samples_processed,
        "phases": _rounded(phases),
        "leftovers": leftovers,
    }


def stopped_document(
    document: Mapping[str, Any], status: Status, error: LimitReached
) -> dict[str, Any]:
    """Return a success's document for a run that a limit ended; `steps` are what was wanted.

    Its model is what training had come to; there is none when it had not begun.
    """
    return {
        **document,
        "ok": False,
        "reason": error.reason,
        "error": explain(error),
        "steps": status.steps,
        "model_uri": document["model_uri"] if status.state == STOPPED else None,
    }


def failure_document(
    run: str | None,
    error: BaseException,
    phases: Mapping[str, float],
    leftovers: int,
    redact: Callable[[str], str] = str,
) -> dict[str, Any]:
    """Return the document of a run that failed, or was refused before it had an identity."""
    return {
        "ok": False,
        "run": run,
        "error": explain(error, redact),
        "phases": _rounded(phases),
        "leftovers": leftovers,
    }


def explain(error: BaseException, redact: Callable[[str], str] = str) -> dict[str, Any]:
    """Return what is known of an error: its kind and message, and where a run broke."""
    if isinstance(error, KeyboardInterrupt):
        return {"kind": "Interrupted", "message": "interrupted"}
    if not isinstance(error, MayflyError | NodeError):
        return {"kind": "InternalError", "message": redact(f"{type(error).__name__}: {error}")}
    document: dict[str, Any] = {"kind": type(error).__name__, "message": redact(str(error))}
    if isinstance(error, Broken):
        document["kind"] = "RunFailed"
        document |= {key: error.details.get(key) for key in ("task", "node")}
        document["log_tail"] = [redact(line) for line in error.log_tail]
    return document


def table(document: Mapping[str, Any]) -> Table:
    """Return a summary for people."""
    shown = Table(title=f"run {document['run']}", show_header=False, title_justify="left")
    shown.add_column(style="bold")
    shown.add_column()
    labels = {
        "reason": "stopped by",
        "model_uri": "model",
        "accuracy": "accuracy",
        "global_step": "global step",
        "samples_seen": "samples seen",
        "samples_processed": "samples processed",
    }
    for key, label in labels.items():
        if document.get(key) is not None:
            shown.add_row(label, _number(document[key]))
    for phase, seconds in document["phases"].items():
        shown.add_row(phase, duration(seconds))
    if document.get("cost"):
        shown.add_row("cost", describe(document["cost"]))
    shown.add_row(
        "left over", "nothing" if not document["leftovers"] else str(document["leftovers"])
    )
    return shown


def _number(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _rounded(phases: Mapping[str, float]) -> dict[str, float]:
    return {name: round(seconds, 2) for name, seconds in phases.items()}
