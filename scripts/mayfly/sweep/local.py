"""What carries an infrastructure's label, as a place: the Docker Engine of CLOUD=local."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from mayfly.errors import MayflyError
from mayfly.sweep.things import Listing, Marks, Refused, Thing, Unlisted, now

KINDS = ("container", "network", "volume")
ORPHAN_S = 5.0  # what is there so long after IM forgot it has nobody else to remove it


class Traces(Protocol):
    """A listing of what carries an infrastructure's label."""

    def leftovers(self, infrastructure_id: str) -> list[str]: ...
    def remove(self, infrastructure_id: str) -> None: ...
    def wipe(self, infrastructure_id: str) -> object: ...


@dataclass
class Engine:
    """This machine's engine, by its labels."""

    traces: Traces
    name: str = "the Docker Engine of this machine"
    grace_s: float = ORPHAN_S
    lag_s: float = 0.0
    _of: dict[str, str] = field(default_factory=dict)  # id → the infrastructure it belongs to
    _asked: set[str] = field(default_factory=set)  # infrastructures, since the last look

    def look(self, marks: Marks) -> Listing:
        """List containers, networks and volumes of the infrastructures."""
        things: list[Thing] = []
        unlisted: dict[str, Unlisted] = {}
        self._asked.clear()
        for infrastructure, run in marks.infrastructures.items():
            try:
                left = self.traces.leftovers(infrastructure)
            except MayflyError as error:
                unlisted |= {kind: Unlisted(kind, error.message) for kind in KINDS}
                continue
            for each in left:
                kind, _, what = each.rpartition(" ")
                self._of[what] = infrastructure
                things.append(Thing(kind or KINDS[0], what, self.name, run))
        missing = tuple(unlisted.values())
        return Listing(self.name, (KINDS,), tuple(things), missing, taken=now())

    def remove(self, thing: Thing) -> None:
        """Remove all that carries the label of the thing's infrastructure. Raises Refused."""
        infrastructure = self._of[thing.id]
        if infrastructure in self._asked:
            return  # it went with the first one
        self._asked.add(infrastructure)
        try:
            self.traces.remove(infrastructure)
        except MayflyError as error:
            raise Refused(f"{thing}: {error.message}") from error
