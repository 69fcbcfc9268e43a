"""Whose a thing in an account is, and what an account has to answer to a sweep.

A thing is a run's when it carries our tag with the run's name, IM's tag with the infrastructure's
id, or exactly a name that IM makes of that id. Everything else is somebody else's, however alike.
The names were read in IM 2.0.0: connectors/EC2.py and connectors/OpenStack.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Protocol

from mayfly.errors import RemoteError

TAG = "mayfly-run"  # radl/partials/system.radl.j2
IM_TAG = "IM-INFRA-ID"  # what IM's EC2 connector gives the networks that it makes
NETWORKS = ("public", "private")  # radl/partials/networks.radl.j2
# A group for all nodes, one for each network; on OpenStack also networks, subnets and a router.
SUFFIXES = ("", *(f"-{net}" for net in NETWORKS), *(f"-sub{net}" for net in NETWORKS))
_GROUP = re.compile(r"im-([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})(?:-(?:public|private))?")


@dataclass(frozen=True)
class Thing:
    """Something that a run has in an account."""

    kind: str
    id: str
    place: str
    run: str
    state: str = ""  # as the provider says
    since: str | None = None  # ISO 8601, where the provider tells it
    going: bool = False  # on its way out, or removed with what it is attached to

    def __str__(self) -> str:
        """Kind, id and state: `instance i-1 (stopped)`."""
        return f"{self.kind} {self.id}" + (f" ({self.state})" if self.state else "")


@dataclass(frozen=True)
class Unlisted:
    """A kind that could not be listed, so that nobody knows whether there is anything of it."""

    kind: str
    why: str
    for_good: bool = False  # asking again will not help: a permission is missing


@dataclass(frozen=True)
class Listing:
    """What one place has that carries some marks, and what it could not tell."""

    place: str
    stages: tuple[tuple[str, ...], ...]
    """The kinds that were listed, in the order in which they can be removed: those of a stage may
    be in use by those of the stages before it."""
    things: tuple[Thing, ...]
    unlisted: tuple[Unlisted, ...] = ()
    notes: tuple[str, ...] = ()
    """What is beside our things and perhaps theirs, but nobody's by its marks: never removed."""
    infrastructures: Mapping[str, str] = field(default_factory=dict)
    """Infrastructures that became known by the way: id → run."""
    taken: str = ""  # ISO 8601 UTC

    @property
    def kinds(self) -> tuple[str, ...]:
        """All kinds that were listed, or had to be."""
        return tuple(kind for stage in self.stages for kind in stage)

    def count(self, kind: str) -> int | None:
        """How many there are of a kind; None when it could not be listed."""
        if any(unlisted.kind == kind for unlisted in self.unlisted):
            return None
        return sum(thing.kind == kind for thing in self.things)


@dataclass(frozen=True)
class Marks:
    """Which runs are looked for, and by which infrastructures of theirs (id → run)."""

    runs: frozenset[str] | None  # None: any that has our tag
    infrastructures: Mapping[str, str] = field(default_factory=dict)

    def owner(self, tags: Mapping[str, str], name: str | None = None) -> str | None:
        """Return the run that owns what carries these tags and this name, or None.

        Another run's tag is stronger than everything else.
        """
        if tagged := tags.get(TAG):
            return tagged if self.runs is None or tagged in self.runs else None
        if infrastructure := tags.get(IM_TAG):
            return self.infrastructures.get(infrastructure)
        return self.names().get(name) if name else None

    def names(self) -> dict[str, str]:
        """Return all names that IM makes of the infrastructures' ids: name → run."""
        return {
            f"im-{infrastructure}{suffix}": run
            for infrastructure, run in self.infrastructures.items()
            for suffix in SUFFIXES
        }

    def knowing(self, more: Mapping[str, str]) -> Marks:
        """Return marks that have these infrastructures, too."""
        return replace(self, infrastructures={**more, **self.infrastructures})


class Place(Protocol):
    """A region of an account, or all of it: what can be listed and removed there."""

    @property
    def name(self) -> str:
        """What it is, for people: `Amazon EC2, us-east-1`."""
        ...

    @property
    def grace_s(self) -> float:
        """How long what is there may take to go away by itself, in seconds."""
        ...

    @property
    def lag_s(self) -> float:
        """How long a listing may not know of what was just made, in seconds."""
        ...

    def look(self, marks: Marks) -> Listing:
        """List all that carries the marks; never raises for a kind that cannot be listed."""
        ...

    def remove(self, thing: Thing) -> None:
        """Ask for the removal of one thing; harmless when it is gone. Raises Refused."""
        ...


class Account(Protocol):
    """A cloud with the keys of now."""

    def who(self) -> str | None:
        """Return the account's or project's identity, None when it does not tell."""
        ...

    def place(self, region: str | None) -> Place:
        """Return one region, the default one for None."""
        ...


class Refused(RemoteError):
    """Something was not removed; `for_good` when asking again will not help."""

    def __init__(self, what: str, *, for_good: bool = False) -> None:
        super().__init__(what)
        self.for_good = for_good


def infrastructure_of(group: str) -> str | None:
    """Return the id in the name of a group that IM made, None for any other name."""
    found = _GROUP.fullmatch(group)
    return found[1] if found else None


def plain_tags(tags: Iterable[Mapping[str, Any]] | None) -> dict[str, str]:
    """Return a list of keys and values, as AWS gives tags, as a dictionary."""
    return {str(tag["Key"]): str(tag["Value"]) for tag in tags or ()}


def now() -> str:
    """This moment as ISO 8601 in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
