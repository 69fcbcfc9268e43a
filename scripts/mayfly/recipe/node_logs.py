"""What nodes have left in the store: what they were busy with, and their system's journal."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime

from mayfly.errors import UserError, unknown
from mayfly.recipe.runs import Place
from mayfly_train.recipe import names
from mayfly_train.recipe.ledger import Ledger
from mayfly_train.recipe.shape import node_of

KINDS = UTILISATION, JOURNAL = ("utilisation", "journal")
_NODE, _KIND = 2, 4  # where they stand in an object's name


def nodes(place: Place) -> list[str]:
    """The names of the nodes that have left logs."""
    found = place.store.names(names.NODE_LOGS)
    return sorted({name.split("/")[_NODE] for name in found})


def read(node: str, kind: str, place: Place) -> Iterator[bytes]:
    """A node's log of one kind, piece by piece; nodes that had its name before come first.

    Raises UserError for a node or a kind that there is none of.
    """
    if kind not in KINDS:
        raise unknown("kind of a node's log", kind, KINDS)
    pieces = place.store.names(f"{names.NODE_LOGS}{node}/")
    if not pieces:
        if known := nodes(place):
            raise unknown("node", node, known)
        raise UserError(f"no node has left logs at {place.store.address}", "it may be too early")
    for piece in pieces:
        if piece.split("/")[_KIND] == kind:
            yield place.store.read(piece) or b""


def of_task(task: tuple[str, int], kind: str, place: Place, ledger: Ledger) -> Iterator[bytes]:
    """The lines of a node's log while a task ran there: its accepted attempt, else its newest."""
    row = ledger.row(*task)
    begun = [each for each in ledger.attempts(*task) if each["started"] and each["node"]]
    chosen = [each for each in begun if row is not None and each["attempt"] == row.accepted]
    if not begun:
        raise UserError(f"task {task[0]}/{task[1]} has not begun", "see `mayfly recipe status`")
    attempt = (chosen or begun)[-1]
    end = attempt["ended"] or float("inf")
    text = b"".join(read(node_of(str(attempt["node"])), kind, place))
    for line in text.splitlines(keepends=True):
        moment = time_of(line, kind)
        if moment is not None and attempt["started"] <= moment <= end:
            yield line


def time_of(line: bytes, kind: str) -> float | None:
    """When a line was written, in seconds since 1970; None for one that does not say."""
    try:
        if kind == UTILISATION:
            return float(json.loads(line)["time"])
        return datetime.fromisoformat(line.split(maxsplit=1)[0].decode()).timestamp()
    except (ValueError, KeyError, IndexError, TypeError):
        return None
