"""How a run ends: what is said and recorded, and what becomes of its nodes."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

from mayfly import export
from mayfly.destroy import destroyer_of
from mayfly.display import Display, Phases
from mayfly.errors import LimitReached, MayflyError
from mayfly.failover import Attempt
from mayfly.job import Ready, Tools
from mayfly.ledger import Record, Unwritable
from mayfly.services import Services
from mayfly.summary import PHASES, failure_document, stopped_document, success_document
from mayfly.watch import Broken, Status


@dataclass(frozen=True)
class Ending:
    """What is known at the end: the last status, what went wrong, and how much is left."""

    status: Status
    error: BaseException | None
    leftovers: int
    cost: dict[str, Any] | None
    attempts: list[Attempt]


@dataclass(frozen=True)
class Outcome:
    """How a run ended: the document for --json, and the error if it did not end well."""

    document: dict[str, Any]
    error: BaseException | None = None


def note_failure(ready: Ready, tools: Tools, error: BaseException) -> None:
    """Record why a run failed, and show the last lines of what failed."""
    interrupted = isinstance(error, KeyboardInterrupt)
    outcome = "stopped" if isinstance(error, LimitReached) else "failed"
    outcome = "interrupted" if interrupted else outcome
    cause = "interrupted" if interrupted else tools.display.redact(str(error))
    with suppress(Unwritable):  # the nodes are to be destroyed all the same
        tools.ledger.set_outcome(ready.run.id, outcome, cause)
    if isinstance(error, Broken):
        for line in error.log_tail:
            tools.display.say(f"  | {line}")
    if interrupted:
        tools.display.say(
            "interrupted: destroying what was made;"
            f" Ctrl-C again leaves that to `mayfly destroy {ready.run.id}`"
        )


def kept(ready: Ready, tools: Tools) -> int:
    """Leave the nodes, say so, and return how many things there are."""
    tools.ledger.set_state(ready.run.id, "kept")
    if not (ready.job.keep or ready.services.machines):  # those have no timer
        export.hold_nodes(ready.services.im, tools.ledger.get(ready.run.id), tools.display.say)
    tools.display.say(f"nodes are kept: remove them with `mayfly destroy {ready.run.id}`")
    return count_leftovers(ready.services, tools, tools.ledger.get(ready.run.id))


def say_what_is_left(ready: Ready, tools: Tools) -> int:
    """Name what an interrupted destroy left, and return how many things there are."""
    record = tools.ledger.get(ready.run.id)
    try:
        left = destroyer_of(ready.services, tools.ledger).prove(record).left()
    except MayflyError as error:
        left = [f"what nobody could list ({error.message})"]
    named = ", ".join(left) or f"infrastructure {record.infrastructure or 'unknown'}"
    tools.display.say(f"left: {named}; remove it with `mayfly destroy {record.run}`")
    return len(left)


def destroy_nodes(ready: Ready, tools: Tools, phases: Phases, hurried: bool) -> int:
    """Destroy the nodes; who has pressed Ctrl-C before leaves with the next one."""
    destroyer = destroyer_of(ready.services, tools.ledger)
    patience = nullcontext() if hurried else patiently(tools.display, ready.run.id)
    with phases.phase("destroy") as report, patience:
        record = tools.ledger.get(ready.run.id)
        return destroyer.destroy(record, lambda text: report(text, None)).count


def count_leftovers(services: Services, tools: Tools, record: Record) -> int:
    """Return how many things of the run are there now; what nobody can tell counts as one."""
    proof = destroyer_of(services, tools.ledger).prove(record)
    return proof.count or int(not proof.clean)


def conclude(ready: Ready, tools: Tools, phases: Phases, ending: Ending) -> Outcome:
    run, error, leftovers = ready.run.id, ending.error, ending.leftovers
    seconds = {name: phases.seconds.get(name, 0.0) for name in PHASES}
    if error is None or isinstance(error, LimitReached):
        document = success_document(run, ready.uri, ending.status, seconds, leftovers)
    else:
        document = failure_document(run, error, seconds, leftovers, tools.display.redact)
    if isinstance(error, LimitReached):
        document = stopped_document(document, ending.status, error)
    document["cost"] = ending.cost
    document["attempts"] = [attempt.document() for attempt in ending.attempts]
    with suppress(Unwritable):
        tools.ledger.set_summary(run, document)
    return Outcome(document, error)


@contextmanager
def patiently(display: Display, run: str) -> Iterator[None]:
    """While nodes are destroyed, the first Ctrl-C only says so; the second one leaves."""

    def explain(number: int, frame: object) -> None:
        del number, frame
        display.say(f"still destroying; Ctrl-C again leaves that to `mayfly destroy {run}`")
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = signal.signal(signal.SIGINT, explain)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
