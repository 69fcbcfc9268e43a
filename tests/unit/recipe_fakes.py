"""What tests of recipes share: runs in directories, and engines that misbehave on purpose."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mayfly_train.errors import NodeError
from mayfly_train.recipe import sources
from mayfly_train.recipe.attempt import Job, Node
from mayfly_train.recipe.document import Experiment, Hardware, Recipe
from mayfly_train.recipe.engine import LOST, InProcessEngine, Report
from mayfly_train.recipe.globs import find
from mayfly_train.recipe.head import Head, Run
from mayfly_train.recipe.ledger import Ledger
from mayfly_train.recipe.store import DirectoryStore, Store

PYTHON = sys.executable


def python(code: str, *words: str) -> str:
    """A command line that runs Python code; single quotes are not to be in it."""
    assert "'" not in code
    return " ".join([PYTHON, "-c", f"'{code}'", *words])


@dataclass
class Lab:
    """A run whose store, ledger and node are directories of a test."""

    path: Path
    store: Store = field(init=False)

    def __post_init__(self) -> None:
        self.store = DirectoryStore(self.path / "store")

    def node(self, name: str = "node-0") -> Node:
        return Node(name, self.path / name, self.store)

    def ledger(self) -> Ledger:
        return Ledger(self.path / "head/ledger.sqlite")

    def run(self, *experiments: Experiment, source: Path | None = None) -> Run:
        digest = sources.put(source, self.store)
        recipe = Recipe("test", experiments)
        return Run(recipe, digest, self.store, lambda pattern: find(pattern, None, source))

    def work(self, run: Run, engine: Any = None) -> tuple[str, Ledger]:
        """Run to the end; the outcome, and the ledger."""
        engine = engine or InProcessEngine(self.node())
        ledger = self.ledger()
        try:
            return Head(run, ledger, engine).work(), ledger
        finally:
            engine.close()


class FakeAwayStore:
    """A store that fails the next `failures` calls of some kinds, and then works again."""

    def __init__(self, store: Store, *kinds: str, error: NodeError | None = None) -> None:
        self._store, self._kinds = store, kinds
        self._error = error or NodeError("the store is away")
        self.failures, self.failed = 0, 0
        self.when_failed: Callable[[], object] = lambda: None

    def __getattr__(self, name: str) -> Any:
        true = getattr(self._store, name)
        if name not in self._kinds:
            return true

        def call(*words: Any) -> Any:
            if self.failures:
                self.failures -= 1
                self.failed += 1
                self.when_failed()
                raise self._error
            return true(*words)

        return call


def head_on(lab: Lab, engine: InProcessEngine, only: Experiment) -> Head:
    """A head that has begun; each `_turn` is a test's."""
    head = Head(lab.run(only), lab.ledger(), engine)
    head._lease.take()
    head._begin()
    return head


class FakeLossyEngine(InProcessEngine):
    """Loses the attempts whose number, counted from 1, is in `lost`: before or after they ran."""

    def __init__(self, node: Node, lost: Iterable[int], after: bool = False) -> None:
        super().__init__(node)
        self.lost, self.after, self.jobs = set(lost), after, list[Job]()

    def submit(self, jobs: Sequence[Job], wanted: Hardware) -> None:
        for job in jobs:
            self.jobs.append(job)
            if len(self.jobs) in self.lost and not self.after:
                self._news.put(Report(job.attempt, LOST, self.node.name, message="node lost"))
            else:
                super().submit([job], wanted)

    def _run(self, job: Job) -> None:
        super()._run(job)

    def wait(self, timeout_s: float) -> list[Report]:
        found = super().wait(timeout_s)
        if not self.after:
            return found
        numbers = {job.attempt: number for number, job in enumerate(self.jobs, start=1)}
        return [
            Report(each.attempt, LOST, each.node, message="node lost")
            if each.outcome is not None and numbers[each.attempt] in self.lost
            else each
            for each in found
        ]
