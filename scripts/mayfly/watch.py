"""Wait for a run: its nodes, their contextualization, and then the training that they supervise.

Training reports itself in `<run>/status.json`. A report that no longer changes is a failure with a
cause, never an endless wait.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from mayfly.display import duration
from mayfly.errors import LimitReached, RunFailed
from mayfly.im import BROKEN, READY, Manager, State

Report = Callable[[str, float | None], None]

EXPORTING, SUCCEEDED, FAILED = "exporting", "succeeded", "failed"
STOPPED = "stopped"  # by a limit of the job, with what there was exported
TASK = re.compile(r"^TASK \[(?P<name>[^\]]+)\]", re.MULTILINE)
FATAL = re.compile(r"(fatal|failed): \[|ERROR(?! executing)|Traceback ")
IGNORED = "...ignoring"
# IM goes on with the next stage after one has failed for good: (last try/tries).
GIVEN_UP = re.compile(r"^ERROR executing task (\S+): \((\d+)/\2\)", re.MULTILINE)
CAUSE_LENGTH = 300
EXPORT_FAILED = "export failed"
# What an IM that was restarted does not go on with by itself is given up after this long.
LOST_S = 60.0
UNKNOWN_POLLS = 15  # IM says "unknown" for a moment whenever a cloud does not answer


@dataclass(frozen=True)
class Pace:
    """How often to look, and how long is too long, in seconds; the clock is for tests."""

    interval: float = 2.0
    patience: float = 1800.0  # without any news
    idle: float = float("inf")  # with news, but without progress
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


class Silence:
    """Notices that a value has not changed for too long."""

    def __init__(self, clock: Callable[[], float], patience: float) -> None:
        self._clock = clock
        self._patience = patience
        self._value: Any = None
        self._since = clock()

    def too_long(self, value: Any) -> bool:
        """Return whether `value` has been the same for longer than the patience."""
        if value != self._value:
            self._value, self._since = value, self._clock()
        return self._clock() - self._since > self._patience


@dataclass(frozen=True)
class Status:
    """What `status.json` says; unknown keys are kept in `raw`."""

    state: str = "starting"
    updated: str = ""
    steps: int = 0
    global_step: int = 0
    samples_seen: int = 0
    samples_processed: int = 0
    examples_per_second: float | None = None
    loss: float | None = None
    accuracy: float | None = None
    eta_s: float | None = None
    phases: Mapping[str, float] = field(default_factory=dict)
    tasks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    export: Mapping[str, int] = field(default_factory=dict)
    error: Mapping[str, Any] | None = None
    reason: str | None = None
    stopped_because: str | None = None
    model_uri: str | None = None
    raw: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Status:
        """Return the status in a document; what is absent or null keeps its default."""
        known = {name for name in cls.__dataclass_fields__ if name != "raw"}
        given = {k: v for k, v in document.items() if k in known and v is not None}
        return cls(**given, raw=dict(document))

    def line(self) -> str:
        """Return the progress of training on one line."""
        parts = [f"step {self.global_step:,}" + (f" of {self.steps:,}" if self.steps else "")]
        if self.examples_per_second is not None:
            parts.append(f"{self.examples_per_second:,.0f} examples/s")
        if self.loss is not None:
            parts.append(f"loss {self.loss:.3f}")
        if self.accuracy is not None:
            parts.append(f"accuracy {self.accuracy:.4f}")
        if self.state == "training" and self.steps and self.global_step >= self.steps:
            parts.append("last evaluation")
        elif self.state == "training" and self.eta_s is not None:
            parts.append(f"ETA {duration(self.eta_s)}")
        return " · ".join(parts)

    def exported(self) -> tuple[str, float | None]:
        """Return a text and the fraction done of the upload."""
        done, total = self.export.get("bytes_done") or 0, self.export.get("bytes_total") or 0
        text = f"{done / 2**20:,.1f} of {total / 2**20:,.1f} MiB" if total else ""
        return text, min(1.0, done / total) if total else None

    @property
    def fraction(self) -> float | None:
        """The part of the training that is done, if its length is known."""
        return min(1.0, self.global_step / self.steps) if self.steps else None


class Broken(RunFailed):
    """A run that failed, with what is known of where: `details` has task, node and log_tail."""

    def __init__(
        self, message: str, hint: str | None = None, details: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(message, hint)
        self.details = dict(details or {})

    @property
    def log_tail(self) -> list[str]:
        """The last lines of what failed, possibly none."""
        return [str(line) for line in self.details.get("log_tail") or ()]


class NotExported(Broken):
    """A trained model that is not in the bucket: its nodes are kept, for it is only there."""


def wait_for_nodes(
    im: Manager, infrastructure: str, count: int, pace: Pace, report: Report
) -> None:
    """Return when all nodes run; raises Broken when one cannot be made."""
    silence = Silence(pace.clock, LOST_S)
    for state in _states(im, infrastructure, pace):
        up = sum(s in ("running", READY) for s in state.nodes.values())
        report(f"{up} of {count} nodes are up", up / count)
        if up >= count:
            return
        # The number is in it so that the time counts from IM's return.
        if silence.too_long((state, im.restarts)) and im.restarts:
            raise Broken(
                f"IM was restarted while it made the nodes: {up} of {count} are up",
                "start the run again",
            )


def wait_until_configured(
    im: Manager, infrastructure: str, pace: Pace, report: Report, on_poll: Callable[[], None]
) -> None:
    """Return when contextualization has ended well; `on_poll` is called at each look.

    Raises Broken with the last lines of IM's messages when it has not.
    """
    silence, restarts = Silence(pace.clock, pace.patience), 0
    for state in _states(im, infrastructure, pace):
        if state.infrastructure == READY:
            return
        if im.restarts > restarts:
            restarts = im.restarts
            report("IM was restarted: configuring again", None)
            im.reconfigure(infrastructure)
        messages = im.messages(infrastructure)
        report(current_task(messages), None)
        on_poll()
        if given_up := GIVEN_UP.search(messages):
            raise _contextualization_failed(f"task {given_up[1]}", messages)
        if silence.too_long((state, messages)):
            raise _contextualization_failed(f"no news in {duration(pace.patience)}", messages)


def _states(im: Manager, infrastructure: str, pace: Pace) -> Iterator[State]:
    silence = Silence(pace.clock, pace.patience)
    unknown = 0
    while True:
        state = im.state(infrastructure)
        _refuse_broken(im, infrastructure, state)
        unknown = unknown + 1 if "unknown" in (state.infrastructure, *state.nodes.values()) else 0
        if unknown > UNKNOWN_POLLS:
            raise Broken(f"IM has lost sight of its nodes: {describe(state)}")
        yield state
        if state.infrastructure == "pending" and silence.too_long(state):
            raise Broken(f"no node came up in {duration(pace.patience)}: {describe(state)}")
        pace.sleep(pace.interval)


def _refuse_broken(im: Manager, infrastructure: str, state: State) -> None:
    broken = [s for s in (state.infrastructure, *state.nodes.values()) if s in BROKEN]
    if not broken:
        return
    messages = im.messages(infrastructure)
    if "unconfigured" in broken:
        raise _contextualization_failed(describe(state), messages)
    details = {"log_tail": tail(messages)}
    raise Broken(f"the nodes were not made: {describe(state)}", details=details)


def _contextualization_failed(where: str, messages: str) -> Broken:
    details = {"log_tail": tail(messages)}
    return Broken(f"contextualization failed: {where}", cause(messages), details)


def describe(state: State) -> str:
    """Return the nodes' states on one line."""
    nodes = ", ".join(f"node {number} {s}" for number, s in sorted(state.nodes.items()))
    return nodes or state.infrastructure


def current_task(messages: str) -> str:
    """Return the name of the Ansible task that the messages end in."""
    found = TASK.findall(messages)
    return found[-1].rpartition(" : ")[2] if found else "preparing the nodes"


def tail(messages: str, lines: int = 30) -> list[str]:
    """Return the lines that explain a failure: the first task that failed, or the last lines."""
    every = [line.rstrip() for line in messages.splitlines() if line.strip()]
    failed = _first_failure(every)
    if failed is None:
        return every[-lines:]
    task = next((n for n in range(failed, -1, -1) if every[n].startswith("TASK [")), failed)
    later = range(failed + 1, len(every))
    end = next((n for n in later if every[n].startswith(("PLAY RECAP", "TASK ["))), len(every))
    return every[task : min(end, task + lines)]


def cause(messages: str) -> str | None:
    """Return the first line that reports a failure, shortened; None when there is none."""
    every = [line.rstrip() for line in messages.splitlines() if line.strip()]
    failed = _first_failure(every)
    if failed is None:
        return None
    line = every[failed]
    return line if len(line) <= CAUSE_LENGTH else line[: CAUSE_LENGTH - 1] + "…"


def _first_failure(lines: list[str]) -> int | None:
    following = [*lines, ""][1:]
    pairs = enumerate(zip(lines, following, strict=True))
    return next((n for n, (line, after) in pairs if FATAL.match(line) and after != IGNORED), None)


def wait_for_status(
    states: Collection[str],
    read: Callable[[], Status | None],
    nodes: Callable[[], str],
    pace: Pace,
    on_status: Callable[[Status], None],
) -> Status:
    """Return the first status whose state is one of `states`.

    `read` gets the status, None while there is none; `nodes` describes the nodes, asked only to
    explain a silence. Raises Broken when the run says so, says nothing new for too long, or stands
    still for too long; LimitReached when a limit stopped it before there was a checkpoint.
    """
    silence = Silence(pace.clock, pace.patience)
    standstill = Silence(pace.clock, pace.idle)
    last = Status()
    while True:
        status = read()
        if status is not None and status != last:
            last = status
            on_status(last)
        if last.state in states:
            return last
        if last.state == FAILED:
            raise failure(last)
        if silence.too_long((last.state, last.updated)):
            known = last.line() if last.updated else "it never reported"
            raise Broken(
                f"the run has given no sign of life for {duration(pace.patience)}: {known}",
                hint=nodes(),
                details=last.error,
            )
        if standstill.too_long((last.state, last.global_step, last.export)):
            raise Broken(
                f"no progress for {duration(pace.idle)} (limits.idle): {last.line()}", nodes()
            )
        pace.sleep(pace.interval)


def stopped(status: Status) -> LimitReached:
    """Return the exception that says which limit ended a run, and how far it had come."""
    why = status.stopped_because or f"limits.{status.reason} was reached"
    message = f"{why}: stopped at step {status.global_step:,} of {status.steps:,}"
    return LimitReached(str(status.reason), message, "what there was is exported")


def failure(status: Status) -> Broken | LimitReached:
    """Return the exception that says what a failed status says."""
    error = status.error or {}
    if status.reason and str(error.get("message")).startswith(status.stopped_because or "\0"):
        return LimitReached(status.reason, str(error.get("message")), "nothing is exported")
    where = " on ".join(str(error[key]) for key in ("task", "node") if error.get(key))
    message = str(error.get("message") or "no cause given")
    return Broken(f"the run failed: {where + ': ' if where else ''}{message}", details=error)
