"""Stand-ins for the services that the control side talks to."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from mayfly.errors import RemoteError
from mayfly.im import Node, State


class FakeClock:
    """Time that passes only when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@dataclass
class FakeIM:
    """An IM whose infrastructures are in a dictionary: id → what its next states are."""

    states: dict[str, list[State]] = field(default_factory=dict)
    text: str = ""
    node_texts: dict[str, str] = field(default_factory=dict)
    radls: dict[str, str] = field(default_factory=dict)
    refusals: list[str] = field(default_factory=list)  # answers to the next destroy calls
    asked: list[str] = field(default_factory=list)
    polls_until_gone: int = 0
    going: dict[str, int] = field(default_factory=dict)
    restarts: int = 0
    reconfigured: list[str] = field(default_factory=list)
    wiped: list[str] = field(default_factory=list)
    forgotten: list[str] = field(default_factory=list)

    def create(self, radl: str) -> str:
        identity = f"infra-{len(self.radls)}"
        self.radls[identity] = radl
        return identity

    def state(self, infrastructure: str) -> State:
        if infrastructure in self.going:
            return State("deleting", {})
        if infrastructure not in self.radls and infrastructure not in self.states:
            raise RemoteError("Invalid infrastructure ID or access not granted.")
        queue = self.states.get(infrastructure) or [State("running", {"0": "running"})]
        return queue.pop(0) if len(queue) > 1 else queue[0]

    def messages(self, infrastructure: str) -> str:
        return self.text

    def node_messages(self, infrastructure: str, number: str) -> str:
        return self.node_texts.get(number, "")

    def nodes(self, infrastructure: str) -> list[Node]:
        return []

    def infrastructures(self) -> list[str]:
        for identity in list(self.going):
            self.going[identity] -= 1
            if self.going[identity] < 0:
                del self.going[identity]
                self.radls.pop(identity, None)
        return list(self.radls)

    def find(self, text: str) -> list[str]:
        return [identity for identity, radl in self.radls.items() if text in radl]

    def reconfigure(self, infrastructure: str) -> None:
        self.reconfigured.append(infrastructure)

    def wipe(self, infrastructures: Collection[str]) -> None:
        assert not set(infrastructures) & set(self.radls), "it would be wiped alive"
        self.wiped.extend(infrastructures)

    def destroy(self, infrastructure: str) -> None:
        self.asked.append(infrastructure)
        if self.refusals:
            raise RemoteError(self.refusals.pop(0))
        self.going[infrastructure] = self.polls_until_gone

    def forget(self, infrastructure: str) -> None:
        self.forgotten.append(infrastructure)
        self.radls.pop(infrastructure, None)


@dataclass
class FakeTraces:
    """A cloud whose listing of a label shortens by one with every look, unless they are orphans."""

    left: list[str] = field(default_factory=list)
    orphans: bool = False
    stuck: bool = False
    removed: list[str] = field(default_factory=list)
    wiped: list[str] = field(default_factory=list)

    def leftovers(self, infrastructure_id: str) -> list[str]:
        now = list(self.left)
        if self.left and not (self.stuck or self.orphans):
            self.left.pop()
        return now

    def remove(self, infrastructure_id: str) -> None:
        self.removed.append(infrastructure_id)
        if not self.stuck:
            self.left.clear()

    def wipe(self, infrastructure_id: str) -> None:
        self.wiped.append(infrastructure_id)


@dataclass
class FakeDisplay:
    """Remembers what was shown."""

    lines: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        from mayfly.redact import Redactor

        self.redact = Redactor()

    def __enter__(self) -> FakeDisplay:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def start(self, phase: str) -> None:
        self.lines.append(f"{phase} started")

    def update(self, phase: str, text: str, fraction: float | None = None) -> None:
        self.lines.append(f"{phase}: {text}")

    def finish(self, phase: str, seconds: float, *, how: str = "done", text: str = "") -> None:
        self.lines.append(f"{phase} {how}")

    def say(self, text: str) -> None:
        self.lines.append(text)
