"""One task on several nodes at once: its members start together, and end together.

A member is an attempt like any other, with a place of its own. Members meet in the store: each
says that it is there, the first one also where it can be reached; none starts before all are. What
comes of the task is decided here, by a function of how each has ended.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mayfly_train.recipe.store import Store, read_json, to_bytes

LOOK_S = 0.5
HERE, DONE = "here", "done"

Outcome = Mapping[str, Any]


def member(attempt: str, rank: int) -> str:
    """The name of a member's attempt."""
    return f"{attempt}.{rank}" if rank else attempt


@dataclass(frozen=True)
class Place:
    """A member's place: its rank among so many, and `ask` gives a reason for waiting no longer."""

    store: Store
    gang: str
    rank: int
    size: int
    ask: Callable[[], str]

    def meet(self, address: str) -> dict[str, str] | str:
        """Wait for all members, being at this address; the variables that a rendezvous by
        environment reads (https://docs.pytorch.org/docs/stable/distributed.html), or `ask`'s
        reason: others may wait for a slot for as long as what is in it takes, and when one of them
        is lost, the head ends this one."""
        port = _free_port(address) if self.rank == 0 else 0
        self.store.write(self._name(HERE, self.rank), to_bytes({"address": address, "port": port}))
        if why := self._wait(HERE):
            return why
        first = read_json(self.store, self._name(HERE, 0))
        return {
            "MASTER_ADDR": first["address"],
            "MASTER_PORT": str(first["port"]),
            "NODE_RANK": str(self.rank),
            "NNODES": str(self.size),
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": "0",
        }

    def part(self) -> str:
        """Say that this member has ended well, and, for the first one, wait until all have: it
        leaves the marker. `ask`'s reason why that is not to be, or nothing."""
        self.store.write(self._name(DONE, self.rank), to_bytes({}))
        return self._wait(DONE) if self.rank == 0 else ""

    def _wait(self, what: str) -> str:
        wanted = {self._name(what, rank) for rank in range(self.size)}
        while not wanted <= set(self.store.names(f"gangs/{self.gang}/{what}/")):
            if why := self.ask():
                return why
            time.sleep(LOOK_S)
        return ""

    def _name(self, what: str, rank: int) -> str:
        return f"gangs/{self.gang}/{what}/{rank:05d}.json"


def _free_port(address: str) -> int:
    """A port that nobody listens at. Another may take it before the task does: then the task
    fails, and is tried again with another one."""
    with socket.create_server((address, 0)) as server:
        return int(server.getsockname()[1])


@dataclass
class Gang:
    """The members of one attempt at a task, as the head sees them."""

    out: set[str]
    first: str
    """The member whose marker and output are the task's."""
    accepted: Outcome | None = None
    blamed: Outcome | None = None
    """How the member has ended that was the first not to end well."""

    def end(self, attempt: str, outcome: Outcome, well: bool) -> bool:
        """Take how a member has ended; whether the others are to be ended now."""
        self.out.discard(attempt)
        if well:
            if attempt == self.first or outcome["attempt"] != attempt:
                self.accepted = outcome  # a marker, perhaps of an earlier attempt
            return False
        news = self.blamed is None
        self.blamed = self.blamed or outcome
        return news and bool(self.out)

    def verdict(self) -> Outcome:
        """What comes of the task, when all members have come back."""
        found = self.accepted or self.blamed
        assert found is not None, "the first member has ended one way or the other"
        return found
