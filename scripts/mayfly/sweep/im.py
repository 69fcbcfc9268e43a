"""What IM lists of runs, on clouds whose accounts we cannot list ourselves: its word, by nodes.

IM is asked for the runs of this machine's ledger only: it knows no others by their names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mayfly.errors import MayflyError
from mayfly.im import Manager
from mayfly.ledger import Record
from mayfly.sweep.leftovers import NODE
from mayfly.sweep.proof import IM_WORD
from mayfly.sweep.things import Listing, Thing, Unlisted, now

PLACE = "IM"


def look(records: Sequence[Record], manager_of: Callable[[Record], Manager]) -> Listing:
    """List the nodes of runs that are not destroyed; one that cannot be asked for is told."""
    things: list[Thing] = []
    unlisted: list[Unlisted] = []
    notes = [IM_WORD]
    for record in records:
        try:
            found = _nodes(record, manager_of(record))
        except MayflyError as error:
            unlisted.append(Unlisted(NODE, f"of run {record.run}: {error.message}"))
            continue
        things += found
        if not found:
            unknown = f"IM lists no node of run {record.run}, which is {record.state} here"
            notes.append(f"{unknown}: `mayfly destroy {record.run}` proves it")
    return Listing(PLACE, ((NODE,),), tuple(things), tuple(unlisted), tuple(notes), {}, now())


def _nodes(record: Record, im: Manager) -> list[Thing]:
    """A run's nodes, with IM's states; also of an infrastructure whose id never came back."""
    listed = im.infrastructures()
    known = [each for each in [record.infrastructure] if each in listed]
    return [
        Thing(NODE, f"{infrastructure}/{number}", PLACE, record.run, state)
        for infrastructure in dict.fromkeys([*known, *im.find(record.run)])
        for number, state in im.state(infrastructure).nodes.items()
    ]
