"""The worker nodes of a run, kept as many as are of use: looks at IM and the head, and acts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from mayfly.errors import RemoteError
from mayfly.im import Manager
from mayfly.im import Node as ImNode
from mayfly.ledger import Ledger
from mayfly.recipe.cluster import WORKER, more_nodes
from mayfly.recipe.elastic import (
    GONE,
    MAKING,
    UNKNOWN,
    UP,
    Actions,
    Clocks,
    Node,
    Situation,
    decide,
)

EVERY_S = 10.0


@dataclass
class Fleet:
    """One run's workers. Every call to IM is in the run ledger before it is made."""

    run: str
    infrastructure: str
    wish: int
    im: Manager
    ledger: Ledger
    say: Callable[[str], None]
    clock: Callable[[], float]
    asked: set[str] = field(default_factory=set)
    """Nodes that were added, and of which it is not known yet whether they are of use."""
    _failures: int = 0
    _failed_at: float = 0.0
    _looked_at: float = float("-inf")
    _idle: Clocks = field(default_factory=Clocks)
    _missing: Clocks = field(default_factory=Clocks)
    _making: Clocks = field(default_factory=Clocks)
    _restarts: int = 0

    def __post_init__(self) -> None:
        self._restarts = self.im.restarts

    def look(self, progress: Mapping[str, Any]) -> Actions:
        """Look at the nodes, now and then, and do what is to be done; returns it.

        An IM that does not answer or refuses is asked again later.
        """
        now = self.clock()
        if now - self._looked_at < EVERY_S:
            return Actions()
        self._looked_at = now
        try:
            situation = self._situation(progress, now)
            self._go_on_configuring()
        except RemoteError as error:
            self.say(f"the nodes cannot be looked at: {error}")
            return Actions()
        actions = decide(situation)
        self._do(actions, {node.number: node for node in situation.nodes})
        return actions

    def _situation(self, progress: Mapping[str, Any], now: float) -> Situation:
        state = self.im.state(self.infrastructure)
        found = [node for node in self.im.nodes(self.infrastructure) if node.group == WORKER]
        seen: Mapping[str, Mapping[str, int]] = progress.get("nodes", {})
        idle = {n.name: n.name in seen and not seen[n.name]["running"] for n in found}
        missing = {n.name: n.state in (UP, UNKNOWN) and n.name not in seen for n in found}
        making = {n.name: n.state in MAKING for n in found}
        making_s = self._making.update(making, now)
        idle_s, missing_s = self._idle.update(idle, now), self._missing.update(missing, now)
        self._judge(found)
        return Situation(
            wish=self.wish,
            left=int(progress.get("left", 0)),
            together=int(progress.get("together", 0)),
            slots=max((each["slots"] for each in seen.values()), default=1),
            nodes=tuple(
                Node(
                    n.number,
                    n.name,
                    n.state,
                    idle_s.get(n.name, 0.0),
                    missing_s.get(n.name, 0.0),
                    making_s.get(n.name, 0.0),
                )
                for n in found
            ),
            busy=state.infrastructure not in (UP, *GONE),
            failures=self._failures,
            since_failure_s=now - self._failed_at,
        )

    def _go_on_configuring(self) -> None:
        """An IM that was restarted does not go on with what it was doing by itself."""
        if self.im.restarts > self._restarts:
            self._restarts = self.im.restarts
            self.say("IM was restarted: configuring again")
            self.im.reconfigure(self.infrastructure)

    def _judge(self, found: list[ImNode]) -> None:
        """Count how nodes came out that were added: failures put off the next, a success none."""
        states = {node.number: node.state for node in found}
        up = {number for number in self.asked if states.get(number) == UP}
        lost = {number for number in self.asked if states.get(number) in (None, *GONE)}
        self.asked -= up | lost
        if lost:
            self._fail()
        elif up:
            self._failures = 0

    def _fail(self) -> None:
        self._failures += 1
        self._failed_at = self.clock()

    def _do(self, actions: Actions, nodes: Mapping[str, Node]) -> None:
        if actions.remove:
            names = ", ".join(f"{nodes[n].name} ({nodes[n].state})" for n in actions.remove)
            self.say(f"removing {names}")
            with suppress(RemoteError), self.ledger.intent(self.run, "shrink", names):
                self.im.remove(self.infrastructure, actions.remove)
        if actions.add:
            self.say(f"adding {actions.add} nodes")
            try:
                with self.ledger.intent(self.run, "grow", f"{actions.add} nodes") as step:
                    added = self.im.add(self.infrastructure, more_nodes(actions.add))
                    step.detail = ", ".join(added)
            except RemoteError as error:
                self.say(f"no nodes were added: {error}")
                self._fail()
            else:
                self.asked.update(added)
