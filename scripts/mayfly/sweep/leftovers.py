"""What accounts still have of any run, by run, and whether that run goes on.

Nothing of a run that goes on, as far as this machine's ledger knows, is ever offered for removal.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from mayfly.destroy import FRESH_S
from mayfly.display import duration
from mayfly.ledger import Record
from mayfly.sweep.proof import things
from mayfly.sweep.things import Listing, Marks, Thing

NODE = "node"  # in IM's words
NODES = ("instance", "server", NODE)
OFF = ("stopped", "shutoff", "off")  # by the dead-man timer, say: their disks still cost
BEGUN = ("preparing", "creating", "configuring")  # nodes may be yet to come
AT_WORK = (*BEGUN, "training", "exporting")
STAMP = re.compile(r"-(\d{6}-\d{6})-[0-9a-f]{4}$")  # of a run's identifier


@dataclass(frozen=True)
class Leftover:
    """What is there of one run; `state` is the ledger's, None for a run that it does not know."""

    run: str
    things: tuple[Thing, ...]
    state: str | None
    goes_on: bool
    since: str | None  # ISO 8601 UTC: when the run, or its oldest thing, began

    @property
    def powered_off(self) -> int:
        """How many of its nodes are there but off."""
        return sum(thing.kind in NODES and thing.state in OFF for thing in self.things)

    @property
    def works(self) -> bool:
        """Whether it has nodes that are on."""
        return any(thing.kind in NODES and thing.state not in OFF for thing in self.things)

    def age(self, moment: datetime) -> str:
        """How old it is, in words."""
        if self.since is None:
            return "age unknown"
        seconds = (moment - datetime.fromisoformat(self.since)).total_seconds()
        days = int(seconds // 86400)
        return f"{days} d" if days else duration(max(0.0, seconds))

    def says(self) -> str:
        """Whether the run goes on, in words."""
        if self.goes_on:
            return f"goes on ({self.state})"
        told = f"{self.state} here" if self.state else "unknown here"
        return f"{told}, {self.powered_off} nodes powered off" if self.powered_off else told


def marks_of_any(records: Iterable[Record]) -> Marks:
    """Return the marks of every run, known here or not."""
    return Marks(None, {each.infrastructure: each.run for each in records if each.infrastructure})


def group(
    listings: Sequence[Listing],
    records: Sequence[Record],
    moment: datetime,
    at_work: Collection[str] = (),
) -> list[Leftover]:
    """Return what was listed by run, the oldest run first.

    Those `at_work` have a process of this machine's now, and so go on whatever their state.
    """
    known = {record.run: record for record in records}
    found: dict[str, list[Thing]] = {}
    for listing in listings:
        for thing in listing.things:
            found.setdefault(thing.run, []).append(thing)
    blind = any(what.kind in NODES for listing in listings for what in listing.unlisted)
    leftovers = []
    for run, had in found.items():
        record = known.get(run)
        alive = record is not None and (run in at_work or goes_on(record, had, moment, blind))
        leftovers.append(_leftover(run, had, record, alive))
    return sorted(leftovers, key=lambda each: (each.since or "", each.run))


def infrastructures_of(
    run: str, listings: Sequence[Listing], records: Sequence[Record]
) -> Mapping[str, str]:
    """Return a run's infrastructures, as the ledger and its own nodes tell them."""
    told = {i: owner for each in listings for i, owner in each.infrastructures.items()}
    told |= {each.infrastructure: each.run for each in records if each.infrastructure}
    return {infrastructure: owner for infrastructure, owner in told.items() if owner == run}


def document(leftover: Leftover, moment: datetime) -> dict[str, Any]:
    """Return what --json says of one run."""
    return {
        "run": leftover.run,
        "known": leftover.state is not None,
        "state": leftover.state,
        "goes_on": leftover.goes_on,
        "since": leftover.since,
        "age": leftover.age(moment),
        "powered_off": leftover.powered_off,
        "things": [
            {**each, "place": thing.place}
            for each, thing in zip(things(leftover.things), leftover.things, strict=True)
        ],
    }


def lines(leftover: Leftover, moment: datetime) -> list[str]:
    """Return one run's things for people."""
    title = f"run {leftover.run}, {leftover.age(moment)}: {leftover.says()}"
    return [title, *(f"  {thing} in {thing.place}" for thing in leftover.things)]


def goes_on(record: Record, had: Sequence[Thing], moment: datetime, blind: bool = False) -> bool:
    """Return whether a run of this ledger may still be at work.

    One whose nodes have all ended or are off does not, unless they were kept on purpose, or some
    may be yet to come, or nodes could not be listed (`blind`).
    """
    if record.state in ("destroyed", "destroying"):
        return False
    if record.state == "kept":
        return True
    if any(thing.kind in NODES and thing.state not in OFF for thing in had):
        return True
    if blind and record.state in AT_WORK:
        return True
    age = moment - datetime.fromisoformat(record.updated)
    return record.state in BEGUN and age.total_seconds() < FRESH_S


def _leftover(run: str, had: list[Thing], record: Record | None, alive: bool) -> Leftover:
    begun = [thing.since for thing in had if thing.since]
    return Leftover(
        run=run,
        things=tuple(had),
        state=record.state if record else None,
        goes_on=alive,
        since=_stamp(run) or (min(begun) if begun else None),
    )


def _stamp(run: str) -> str | None:
    """Return the time in a run's identifier."""
    found = STAMP.search(run)
    if not found:
        return None
    try:
        return datetime.strptime(found[1], "%y%m%d-%H%M%S").replace(tzinfo=UTC).isoformat()
    except ValueError:
        return None
