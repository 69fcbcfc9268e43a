"""The head of a run: expands what is ready, hands tasks to the engine, and keeps the books."""

from __future__ import annotations

import contextlib
import re
import secrets
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mayfly_train.errors import NodeError
from mayfly_train.recipe import attempt, document, engine, gang, ledger, names, stop
from mayfly_train.recipe.attempt import Job
from mayfly_train.recipe.document import MAXIMIZE, Experiment, Recipe
from mayfly_train.recipe.engine import Engine, Report
from mayfly_train.recipe.expand import Context, Expansion, Task, references, resolve_globs, task_id
from mayfly_train.recipe.gang import Gang
from mayfly_train.recipe.ledger import Ledger, Row
from mayfly_train.recipe.lock import Lease
from mayfly_train.recipe.patience import Patience, PatientStore, is_away
from mayfly_train.recipe.shape import node_of
from mayfly_train.recipe.stage import SETTLED, Stage
from mayfly_train.recipe.store import Store, read_json, to_bytes

WINDOW = 3  # tasks handed to the engine for each that can run: enough that no slot waits
TURN_S, SHORT_S = 0.5, 0.001
LOOK_EVERY_S = 2.0
COPY_EVERY_S = 10.0
COPY_SHARE = 20  # copying the ledger takes at most a 20th of the time
DRAIN_S = 15.0

SUCCEEDED, FAILED, CANCELLED = "succeeded", "failed", "cancelled"
RETURNED = "returned"  # of an attempt: not begun, and nobody is to blame


@dataclass(frozen=True)
class Run:
    """What a head works on."""

    recipe: Recipe
    source: str
    """Digest of the packed source directory, empty without one."""
    store: Store
    find: Callable[[str], list[str]]
    """Lists what matches a glob."""

    @property
    def data(self) -> str:
        """What `{{data}}` stands for."""
        return self.recipe.data or f"{self.store.address}/data"


class Head:
    """Runs a recipe to its end, from wherever ledger and markers are."""

    def __init__(
        self,
        run: Run,
        book: Ledger,
        workers: Engine,
        show: Callable[[list[dict[str, Any]]], None] | None = None,
    ) -> None:
        self._run, self._ledger, self._engine, self._show = run, book, workers, show
        self._working = False  # when it does not, a store that is away is not waited for
        self._patience = Patience(lambda: not self._working, _say)
        self._store = PatientStore(run.store, self._patience)
        self._lease = Lease(self._store)
        self._stages: dict[str, Stage] = {}
        self._states: dict[str, tuple[str, str]] = {}  # of experiments: state and message
        self._out: dict[str, tuple[Stage, Task]] = {}
        self._gangs: dict[str, Gang] = {}
        self._broken: dict[str, str] = {}  # the node that each task was broken on the last time
        self._trouble: dict[str, str] = {}  # of experiments: what keeps tasks from nodes, if any
        self._markers: dict[str, set[int]] = {}
        self._cancelled = self._found = False
        self._dirty = True
        self._looked = self._copied = 0.0
        self._copy_every = COPY_EVERY_S
        self._new_curves: set[str] = set()

    def work(self) -> str:
        """SUCCEEDED, FAILED or CANCELLED, when every experiment has ended.

        Raises BadInput for what only a run shows (a glob that matches nothing), NodeError when the
        store or the ledger fail for good: a store for longer than `patience` has, in which no task
        could begin or end well either. An exception leaves a run that can be resumed.
        """
        self._lease.take()
        with self._lease.kept():
            return self._work()

    def _work(self) -> str:
        self._ledger.worked_by(self._lease.id)
        try:
            self._begin()
            self._working = True
            while self._turn():
                pass
            return self._end()
        finally:
            self._working = False
            try:
                self._drain()
            finally:
                with contextlib.suppress(NodeError, OSError):
                    if self._lease.is_ours():  # else another head's copy is newer
                        self._copy_ledger()
                        self._lease.release()

    # --- begin and end ---

    def _begin(self) -> None:
        with self._ledger.batch():
            known = {each["name"]: each for each in self._ledger.experiments()}
            for experiment in self._run.recipe.experiments:
                before = known.get(experiment.name, {"state": "waiting", "message": ""})
                self._set(experiment.name, before["state"], before["message"] or "")

    def _end(self) -> str:
        self._tell()
        if self._cancelled:
            return CANCELLED
        return SUCCEEDED if all(self._is(name, "done") for name in self._states) else FAILED

    def _set(self, name: str, state: str, message: str = "", tasks: int | None = None) -> None:
        """Record where an experiment is, when that is new."""
        if self._states.get(name) != (state, message) or tasks is not None:
            self._states[name] = (state, message)
            self._ledger.set_experiment(name, state, tasks, message)

    def _is(self, name: str, *states: str) -> bool:
        return self._states[name][0] in states

    def _drain(self) -> None:
        """End what runs, and wait for it: nothing of ours is left running."""
        self._engine.cancel(list(self._out))
        deadline = time.monotonic() + DRAIN_S
        while self._out and time.monotonic() < deadline:
            with self._ledger.batch():
                self._handle(self._engine.wait(TURN_S), again=False)
        with self._ledger.batch():
            for _, task in self._out.values():
                self._ledger.wait_again(task)
        self._out.clear()

    # --- one turn ---

    def _turn(self) -> bool:
        """Expand, submit, listen; False when there is nothing left to do."""
        self._found = False
        with self._ledger.batch():
            self._expand()
            jobs = self._take()
        for wanted, batch in jobs:
            self._engine.submit(batch, wanted)
        if not self._out and not self._stages:
            return False
        # Tasks whose markers were found have made room for others: nothing is to be waited for.
        reports = self._engine.wait(SHORT_S if self._found else TURN_S)
        with self._ledger.batch():
            self._handle(reports, again=True)
            self._close_stages()
        self._look()
        return not self._cancelled

    def _expand(self) -> None:
        """Start each experiment whose needs are done; skip those whose needs will never be."""
        for experiment in self._run.recipe.experiments:
            name = experiment.name
            if name in self._stages or self._is(name, *SETTLED):
                continue
            if any(self._is(need, "failed", "skipped") for need in experiment.needs):
                self._set(name, "skipped", "what it needs has failed")
            elif all(self._is(need, "done") for need in experiment.needs):
                self._stages[name] = self._start(experiment)
                self._markers[name] = self._new_markers(name)
                self._set(name, "running", tasks=self._stages[name].count)

    def _start(self, experiment: Experiment) -> Stage:
        """An experiment's stage; what it is expanded from is kept, and is the same ever after."""
        where = names.expansion(experiment.name)
        kept = read_json(self._store, where)
        if kept is None:
            context = self._context(experiment)
            resolved = resolve_globs(experiment, context, self._find)
            parts = {"data": context.data, "best": context.best, "all": context.all}
            recipe = Recipe("", (resolved,)).to_json()
            kept = {"recipe": recipe, "context": parts}
            if not self._store.create(where, to_bytes(kept)):
                kept = read_json(self._store, where)
        (resolved,) = document.from_json(kept["recipe"]).experiments
        return Stage(Expansion(resolved, Context(**kept["context"])), self._ledger)

    def _find(self, pattern: str) -> list[str]:
        """What matches a glob; a bucket that does not exist, say, is told at once."""
        return self._patience(self._run.find, pattern, passes=is_away)

    def _new_markers(self, name: str) -> set[int]:
        """The tasks of an experiment that are finished, by their markers, and of which the ledger
        does not know it: few, unless it is an old copy."""
        prefix = f"{names.DONE}{name}/"
        files = (file.removeprefix(prefix) for file in self._store.names(prefix))
        found = {int(file[: -len(".json")]) for file in files if re.fullmatch(r"\d+\.json", file)}
        found.difference_update(self._ledger.numbers(name, ledger.FINISHED))
        return found

    def _context(self, experiment: Experiment) -> Context:
        best, every = {}, {}
        for name in references(experiment):
            other, which, _ = name.split(".")
            if which == "all":
                rows = self._ledger.rows(other, ledger.FINISHED)
                every[other] = [_output(row) for row in rows]
            elif row := self._best(other):
                best[other] = _output(row)
        return Context(self._run.data, best, every)

    def _best(self, name: str) -> Row | None:
        search = self._run.recipe.experiment(name).search
        if search.objective:
            return self._ledger.best(name, search.direction == MAXIMIZE)
        return next(iter(self._ledger.rows(name, ledger.FINISHED)), None)

    def _take(self) -> list[tuple[document.Hardware, list[Job]]]:
        """Attempts for the engine: as many as keep every slot busy, and no more."""
        members = self._engine.members()
        found = []
        for name, stage in self._stages.items():
            wanted = stage.experiment.hardware
            slots = engine.slots_for(members, wanted)
            waits = engine.why_no_room(members, wanted) or self._trouble.get(name, "")
            self._set(name, "running", waits)
            room = self._room(stage, slots) if wanted.nodes == 1 else self._gang_room(stage, slots)
            tasks = self._unfinished(stage, room)
            jobs = [job for task in tasks for job in self._jobs(stage, task)]
            if jobs:
                found.append((wanted, jobs))
        return found

    def _room(self, stage: Stage, slots: int) -> int:
        """How many more tasks of an experiment to hand out now.

        In batches, because the engine's work for one submission hardly grows with its tasks. What
        came back with a lost node does not wait for one: it was handed out before.
        """
        if not slots:
            return 0
        batch = self._engine.together(stage.experiment.name) * slots
        window, limit = WINDOW * batch, stage.experiment.workers
        if limit and limit <= window:
            window, left = limit, limit - stage.running
            returned = min(left, stage.returned)
        else:
            left, returned = window - stage.running, stage.returned
        least = max(1, min(batch, window - slots))
        return left if left >= least else returned

    def _gang_room(self, stage: Stage, slots: int) -> int:
        """How many more gangs there is room for: no two of them ever wait for each other's slots,
        for all members that are out have one, or get one as other tasks end."""
        free = slots - len(self._gangs)
        limit = stage.experiment.workers or slots
        return max(0, min(free // stage.experiment.hardware.nodes, limit - stage.running))

    def _unfinished(self, stage: Stage, most: int) -> list[Task]:
        """Tasks to run; one whose marker is in the store already is accepted instead."""
        done = self._markers[stage.experiment.name]
        found = []
        for task in stage.take(most):
            marker = None
            if task.number in done:
                marker = read_json(self._store, names.done(task.id))
            if marker is None:
                found.append(task)
                continue
            if marker["digest"] != task.digest:
                raise NodeError(
                    f"{names.done(task.id)} is of another command — this run's store was changed"
                )
            self._accept(stage, task, marker)
            self._found = True
        return found

    def _jobs(self, stage: Stage, task: Task) -> list[Job]:
        """An attempt at a task: one, or one for each of the nodes that it takes at once."""
        name = f"{task.experiment}-{task.number:06d}-{secrets.token_hex(4)}"
        nodes = stage.experiment.hardware.nodes
        members = [gang.member(name, rank) for rank in range(nodes)]
        if nodes > 1:
            self._gangs.update(dict.fromkeys(members, Gang(set(members), name)))
        for member in members:
            self._ledger.submit(task, member)
            self._out[member] = (stage, task)
        alone = self._job(stage, task, name)
        return [
            replace(alone, attempt=member, rank=rank, nodes=nodes, gang=name)
            for rank, member in enumerate(members)
        ]

    def _job(self, stage: Stage, task: Task, name: str) -> Job:
        search = stage.experiment.search
        return Job(
            attempt=name,
            task=task.to_json(),
            source=self._run.source,
            data=self._run.data,
            result=stage.experiment.result,
            timeout_s=stage.experiment.timeout_s,
            objective=search.objective,
            maximize=search.direction == MAXIMIZE,
            stop_after=search.stop_after,
            urgent=stage.was_out(task),
        )

    # --- what attempts report ---

    def _handle(self, reports: list[Report], again: bool) -> None:
        for report in reports:
            if report.attempt not in self._out:
                continue  # an attempt that was given up: its marker counts, its news do not
            self._dirty = True
            together = self._gangs.get(report.attempt)
            if report.kind == engine.STARTED:
                counts = together is None or together.first == report.attempt
                self._ledger.start(report.attempt, report.node, counts)
                continue
            stage, task = self._out.pop(report.attempt)
            if together is not None:
                self._end_member(together, stage, task, report, again)
                continue
            if report.kind == engine.RETURNED:
                self._ledger.end(report.attempt, {"state": RETURNED, "message": report.message})
                self._ledger.wait_again(task)
                stage.back(task)
                continue
            outcome = report.outcome or self._outcome(task, report)
            if outcome["attempt"] != report.attempt:
                message = f"{outcome['attempt']} was first"
                self._ledger.end(report.attempt, {"state": "superseded", "message": message})
            self._settle(stage, task, outcome, again)

    def _end_member(
        self, together: Gang, stage: Stage, task: Task, report: Report, again: bool
    ) -> None:
        """One of several nodes is done with a task: when not well, all are, and try again."""
        del self._gangs[report.attempt]
        if report.kind == engine.RETURNED:
            outcome: Mapping[str, Any] = {"state": RETURNED, "attempt": report.attempt}
        else:
            outcome = report.outcome or self._outcome(task, report)
        self._ledger.end(report.attempt, outcome)
        if together.end(report.attempt, outcome, outcome["state"] in attempt.ACCEPTED):
            self._engine.cancel(list(together.out))
        if not together.out:
            self._settle(stage, task, together.verdict(), again)

    def _outcome(self, task: Task, report: Report) -> Mapping[str, Any]:
        """How an attempt ended of which only that is known: its marker or record says it."""
        for name in (names.done(task.id), names.attempt(task.id, report.attempt)):
            with contextlib.suppress(NodeError):
                found = read_json(self._store, name)
                if found is not None:
                    return dict(found)
        state = "cancelled" if report.message == "cancelled" else "lost"
        message = report.message or "its node was lost"
        return {"state": state, "attempt": report.attempt, "message": message}

    def _settle(self, stage: Stage, task: Task, outcome: Mapping[str, Any], again: bool) -> None:
        state = outcome["state"]
        if state in attempt.ACCEPTED:
            self._accept(stage, task, outcome)
            return
        self._ledger.end(outcome["attempt"], outcome)
        if attempt.FULL in str(outcome.get("message")):
            where = node_of(str(outcome.get("node") or "")) or "a node"
            self._trouble[task.experiment] = f"{where} takes nothing: {attempt.FULL}"
        blameless = state in (attempt.CANCELLED, RETURNED) or not again
        if blameless or (state == attempt.BROKEN and self._was_there(stage, task, outcome)):
            self._ledger.wait_again(task)
            stage.back(task)
            return
        command = state == attempt.FAILED
        row = self._ledger.row(task.experiment, task.number)
        assert row is not None, "it was frozen before it was submitted"
        most = stage.experiment.task_retries if command else stage.experiment.node_retries
        had = row.failures if command else row.node_losses
        left = had < most
        blamed = ledger.COMMAND if command else ledger.NODE
        self._ledger.blame(task, blamed, ledger.WAITING if left else ledger.FAILED, outcome)
        if left:
            stage.back(task)
        else:
            stage.settle()

    def _was_there(self, stage: Stage, task: Task, outcome: Mapping[str, Any]) -> bool:
        """Whether the node that a task is broken on was the last one, too, while others would do.
        These are busy, perhaps for hours, so it came back to the one node that is not; this says
        no more of the task than the first time."""
        node = node_of(str(outcome.get("node") or ""))
        before, self._broken[task.id] = self._broken.get(task.id), node
        others = (each for each in self._engine.members() if node_of(each.name) != node)
        return before == node and any(each.room(stage.experiment.hardware) for each in others)

    def _accept(self, stage: Stage, task: Task, outcome: Mapping[str, Any]) -> None:
        self._ledger.accept(task, outcome)
        self._trouble.pop(task.experiment, None)
        stage.settle()
        if stage.experiment.search.stop_after:
            self._new_curves.add(task.experiment)

    def _close_stages(self) -> None:
        for name, stage in list(self._stages.items()):
            if stage.over:
                state, message = stage.verdict()
                self._set(name, state, message)
                del self._stages[name], self._markers[name]

    # --- from time to time ---

    def _look(self) -> None:
        """Renew the lease, listen for a cancellation, tell the median rule, copy the ledger."""
        if time.monotonic() - self._looked < LOOK_EVERY_S:
            return
        self._looked = time.monotonic()
        self._lease.renew()
        self._cancelled = self._store.read(names.CANCEL) is not None
        for name in self._new_curves:
            bars = stop.medians(self._ledger.curves(name, stop.MOST))
            self._store.write(names.medians(name), to_bytes(bars))
        self._new_curves.clear()
        self._tell()
        if self._dirty and time.monotonic() - self._copied > self._copy_every:
            self._copied = time.monotonic()
            with contextlib.suppress(NodeError, OSError):  # it is tried again; markers are there
                self._copy_ledger()

    def _tell(self) -> None:
        if self._show is not None:
            self._show(self._ledger.experiments())

    def _copy_ledger(self) -> None:
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as directory:
            copy = Path(directory) / names.LEDGER
            self._ledger.copy_to(copy)
            self._run.store.upload(names.LEDGER, copy)
        self._copied, self._dirty = time.monotonic(), False
        self._copy_every = max(COPY_EVERY_S, COPY_SHARE * (self._copied - began))


def _say(text: str) -> None:
    print(f"mayfly: {text}", file=sys.stderr)


def _output(row: Row) -> str:
    return f"{task_id(row.task.experiment, row.task.number)}/{row.accepted}"
