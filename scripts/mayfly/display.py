"""What the user sees while a command works: phases with their progress and time, on stderr.

On a terminal, bars that redraw themselves; elsewhere plain lines, one for each thing that changed.
Standard output is left to results.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, Task, TaskID, TextColumn
from rich.text import Text

from mayfly.redact import Redactor

DONE, FAILED, INTERRUPTED = "done", "FAILED", "interrupted"  # how phases end
PLAIN_INTERVAL = 10.0  # seconds between two plain lines about the same, still running, phase


class Display(Protocol):
    """Where progress goes."""

    redact: Redactor

    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...
    def start(self, phase: str) -> None: ...
    def update(self, phase: str, text: str, fraction: float | None = None) -> None: ...
    def finish(self, phase: str, seconds: float, *, how: str = DONE, text: str = "") -> None: ...
    def say(self, text: str) -> None: ...


@dataclass
class Phases:
    """Measures phases and tells a display about them.

    `seconds` has the duration of every phase that has begun, in order.
    """

    display: Display
    clock: Callable[[], float] = time.monotonic
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[Callable[[str, float | None], None]]:
        """Measure a block; it receives a function that reports a text and a fraction done."""
        started = self.clock()
        self.display.start(name)

        def report(text: str, fraction: float | None = None) -> None:
            self.display.update(name, text, fraction)

        try:
            yield report
        except BaseException as error:
            self.seconds[name] = self.clock() - started
            how = INTERRUPTED if isinstance(error, KeyboardInterrupt) else FAILED
            self.display.finish(name, self.seconds[name], how=how)
            raise
        self.seconds[name] = self.clock() - started
        self.display.finish(name, self.seconds[name])

    def record(self, name: str, seconds: float, text: str = "") -> None:
        """Add a phase that somebody else measured."""
        self.seconds[name] = seconds
        self.display.finish(name, seconds, text=text)


class PlainDisplay:
    """One line for each change; for pipes, CI and --json."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self.redact = Redactor()
        self._console = console
        self._clock = clock
        self._shown: dict[str, tuple[float, str]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._shown.clear()

    def start(self, phase: str) -> None:
        self._shown[phase] = (self._clock(), "")
        self._line(f"{phase} …")

    def update(self, phase: str, text: str, fraction: float | None = None) -> None:
        last, shown = self._shown.get(phase, (float("-inf"), ""))
        if text == shown or (shown and self._clock() - last < PLAIN_INTERVAL):
            return
        self._shown[phase] = (self._clock(), text)
        percent = f" {fraction:4.0%}" if fraction is not None else ""
        self._line(f"{phase}{percent} {text}")

    def finish(self, phase: str, seconds: float, *, how: str = DONE, text: str = "") -> None:
        self._shown.pop(phase, None)
        took = f"{'in' if how == DONE else 'after'} {duration(seconds)}"
        self._line(f"{phase} {how} {took}{' · ' + text if text else ''}")

    def say(self, text: str) -> None:
        self._line(text)

    def _line(self, text: str) -> None:
        self._console.print(Text(self.redact(text)), soft_wrap=True, highlight=False)


class RichDisplay:
    """A bar for each phase, redrawn in place; for terminals."""

    def __init__(self, console: Console) -> None:
        self.redact = Redactor()
        self._console = console
        self._progress = Progress(
            SpinnerColumn(finished_text="[green]✓"),
            TextColumn("[bold]{task.description:<18}"),
            BarColumn(bar_width=24),
            _Seconds("{task.elapsed}", justify="right"),
            TextColumn("{task.fields[text]}", markup=False),
            console=console,
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def start(self, phase: str) -> None:
        self._tasks[phase] = self._progress.add_task(phase, total=None, text="", seconds=None)

    def update(self, phase: str, text: str, fraction: float | None = None) -> None:
        if phase not in self._tasks:
            self.start(phase)
        self._progress.update(
            self._tasks[phase],
            text=self.redact(text),
            total=None if fraction is None else 1.0,
            completed=fraction or 0.0,
        )

    def finish(self, phase: str, seconds: float, *, how: str = DONE, text: str = "") -> None:
        if phase not in self._tasks:
            self.start(phase)
        task = self._tasks[phase]
        if how == DONE:
            self._progress.update(task, total=1.0, completed=1.0, seconds=seconds)
            if text:
                self._progress.update(task, text=self.redact(text))
        else:
            self._progress.update(task, seconds=seconds, text=how.lower())
            self._progress.stop_task(task)

    def say(self, text: str) -> None:
        self._progress.console.print(Text(self.redact(text)), highlight=False)


class _Seconds(TextColumn):
    """Time since a phase began, or the time that it took."""

    def render(self, task: Task) -> Text:
        seconds = task.fields.get("seconds")
        if seconds is None:
            seconds = task.elapsed or 0.0
        return Text(f"{duration(seconds):>8}", style="cyan")


def make_display(*, plain: bool) -> Display:
    """Return the display that suits standard error."""
    console = Console(stderr=True)
    if plain or not console.is_terminal:
        return PlainDisplay(console)
    return RichDisplay(console)


def duration(seconds: float) -> str:
    """Return seconds as people read them: 4.2 s, 3 min 07 s, 2 h 05 min."""
    if seconds < 60:  # noqa: PLR2004
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:  # noqa: PLR2004
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"
