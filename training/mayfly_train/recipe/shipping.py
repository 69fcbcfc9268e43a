"""While a task runs: what it prints goes to the store in pieces, and its reports are read."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path

from mayfly_train.errors import NodeError
from mayfly_train.recipe import names, results, stop
from mayfly_train.recipe.patience import Patience
from mayfly_train.recipe.store import Store

EVERY_S = 2.0
STREAMS = ("stdout", "stderr")
_PIECE_BYTES = 8 << 20


class Tail:
    """The growing end of one file, in pieces that are numbered from 1."""

    def __init__(self, path: Path, prefix: str, store: Store) -> None:
        self._path, self._prefix, self._store = path, prefix, store
        self._place = self._pieces = 0

    def ship(self) -> None:
        """Put what is new. Raises NodeError; the piece is then tried again the next time."""
        if self._path.stat().st_size <= self._place:
            return
        with self._path.open("rb") as stream:
            while True:
                stream.seek(self._place)
                data = stream.read(_PIECE_BYTES)
                if not data:
                    return
                self._store.write(f"{self._prefix}{self._pieces + 1:06d}", data)
                self._place += len(data)
                self._pieces += 1


class Curve:
    """The steps and values of the objective that a task has printed so far."""

    def __init__(self, path: Path, objective: str) -> None:
        self._path, self._objective, self._place = path, objective, 0
        self.points: list[tuple[int, float]] = []

    def read(self) -> bool:
        """Read the new whole lines; whether there was a report among them."""
        before = len(self.points)
        with self._path.open("rb") as stream:
            stream.seek(self._place)
            for line in stream:
                if not line.endswith(b"\n"):
                    break
                self._place += len(line)
                document = results.of_line(line)
                point = results.step_of(document, self._objective) if document else None
                if point:
                    self.points.append(point)
        return len(self.points) > before


class Shipper:
    """A thread that ships and looks until it is told that the task has ended.

    It starts with the second tick only: most short tasks never have one.
    """

    def __init__(self, tails: list[Tail], look: Callable[[], None] | None) -> None:
        self._tails, self._look = tails, look
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin, when a task turns out to be no short one."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="shipper", daemon=True)
            self._thread.start()

    def end(self, patience: Patience) -> None:
        """Ship the rest. Raises NodeError when the store does not take it."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        for tail in self._tails:
            patience(tail.ship)

    def _run(self) -> None:
        while not self._ended.wait(EVERY_S):
            try:
                for tail in self._tails:
                    tail.ship()
                if self._look is not None:
                    self._look()
            except NodeError:
                continue  # the store may be back the next time; the end insists


class MedianWatch:
    """Compares a task's reports with the bars that the head keeps in the store."""

    def __init__(self, curve: Curve, store: Store, experiment: str, after: int, maximize: bool):
        self._curve, self._store = curve, store
        self._name, self._after, self._maximize = names.medians(experiment), after, maximize
        self.stop = False

    def look(self) -> None:
        """Read reports; `stop` is set when the rule says so."""
        if not self._curve.read():
            return
        data = self._store.read(self._name)
        if data is not None:
            bars = {int(step): value for step, value in json.loads(data).items()}
            self.stop = stop.should_stop(self._curve.points, bars, self._after, self._maximize)
