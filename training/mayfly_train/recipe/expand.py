"""From an experiment to its tasks, one at a time and each as it will be for ever."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from mayfly_train.errors import BadInput
from mayfly_train.recipe import template
from mayfly_train.recipe.document import Experiment, canonical
from mayfly_train.recipe.space import Space, Value, texts_of

OUTPUT = "../output"  # of a task, seen from the copy of the source that it starts in
INPUTS = "../inputs"
_BLOCK = 1024


class Task(NamedTuple):
    """One command with its arguments, as it is run every time."""

    experiment: str
    number: int
    parameters: Mapping[str, Any]
    commands: Sequence[Sequence[str]]
    environment: Mapping[str, str]
    inputs: Sequence[str] = ()
    """Outputs of other tasks that it reads: `<task>/<attempt>`, below the run's outputs."""

    @property
    def id(self) -> str:
        """The name of the task: experiment and number."""
        return task_id(self.experiment, self.number)

    def to_json(self) -> dict[str, Any]:
        """All that is frozen."""
        return {
            "experiment": self.experiment,
            "number": self.number,
            "parameters": dict(self.parameters),
            "commands": [list(words) for words in self.commands],
            "environment": dict(self.environment),
            "inputs": list(self.inputs),
        }

    @property
    def frozen(self) -> str:
        """The text that is stored; a rerun is made from it and not from the recipe."""
        return canonical(self.to_json())

    @property
    def digest(self) -> str:
        """SHA-256 of `frozen`."""
        return hashlib.sha256(self.frozen.encode()).hexdigest()


def task_id(experiment: str, number: int) -> str:
    """`experiment/000123`."""
    return f"{experiment}/{number:06d}"


def task_from(document: Mapping[str, Any]) -> Task:
    """The task in a document that `Task.to_json` has made."""
    return Task(**document)


@dataclass(frozen=True)
class Context:
    """What the run adds to a recipe: where data is, and what earlier experiments have left."""

    data: str
    best: Mapping[str, str]
    """Experiment → output of its best task, `<task>/<attempt>`."""
    all: Mapping[str, Sequence[str]]
    """Experiment → outputs of all its finished tasks."""
    planned: bool = False
    """Nothing has run yet: references to outputs stay as they are written."""


class Expansion:
    """The tasks of one experiment whose needs are done and whose globs are resolved."""

    def __init__(self, experiment: Experiment, context: Context) -> None:
        """Raises BadInput when an experiment that it reads from has left no output."""
        self.experiment = experiment
        self.space = Space(experiment.parameters, experiment.samples, experiment.search.seed)
        self.count = self.space.count
        fixed, self._inputs = _fixed(experiment, context)
        self._fixed = list(fixed.values())
        self._name, self._variables = experiment.name, experiment.environment
        self._names = [*self.space.names, *fixed]
        self._lines = [
            template.Renderer(template.parse(line, experiment.shell), self._names, experiment.shell)
            for line in experiment.command
        ]

    def task(self, number: int) -> Task:
        """Task `number` of `count`, by its number alone."""
        return next(self.block(number, number + 1))

    def tasks(self, start: int = 0) -> Iterator[Task]:
        """All tasks from `start` on, made when they are asked for."""
        for first in range(start, self.count, _BLOCK):
            yield from self.block(first, min(first + _BLOCK, self.count))

    def block(self, start: int, stop: int) -> Iterator[Task]:
        """Tasks start … stop - 1."""
        return self._block(range(start, stop), self.space.columns(start, stop))

    def with_values(self, number: int, values: Sequence[Value]) -> Task:
        """Task `number` with values that someone else has chosen."""
        return next(self._block(range(number, number + 1), [[value] for value in values]))

    def _block(self, numbers: range, columns: Sequence[Sequence[Value]]) -> Iterator[Task]:
        size = len(numbers)
        texts = [texts_of(column) for column in columns]
        texts += [[text] * size for text in self._fixed]
        names, rows = self.space.names, zip(*columns) if columns else itertools.repeat((), size)
        return map(
            Task,
            itertools.repeat(self._name),
            numbers,
            [dict(zip(names, row)) for row, _ in zip(rows, numbers)],
            zip(*(line(texts) for line in self._lines)),
            self._environments(texts, size),
            itertools.repeat(self._inputs),
        )

    def _environments(
        self, texts: Sequence[Sequence[str]], size: int
    ) -> Iterable[Mapping[str, str]]:
        if not self._variables:
            return itertools.repeat({}, size)
        rows = (dict(zip(self._names, row)) for row in zip(*texts))
        return [{name: template.fill(text, row) for name, text in self._variables} for row in rows]


def resolve_globs(experiment: Experiment, context: Context, find: Any) -> Experiment:
    """The experiment with the files that its globs match, as `find(pattern)` lists them.

    Raises BadInput when one matches nothing, or a file whose name is not text.
    """
    resolved = []
    for parameter in experiment.parameters:
        if parameter.kind == "glob":
            pattern = template.fill(parameter.pattern, {"data": context.data})
            found = tuple(find(pattern))
            if not found:
                raise BadInput(
                    f"{experiment.name}.{parameter.name}: nothing matches {pattern!r} — check the "
                    "pattern, and what is there"
                )
            for name in found:
                _require_text(name, f"{experiment.name}.{parameter.name}")
            parameter = replace(parameter, kind="values", values=found, pattern="")
        resolved.append(parameter)
    return replace(experiment, parameters=tuple(resolved))


def _require_text(name: str, parameter: str) -> None:
    """Raise BadInput for a name that is not UTF-8: no task with it could be frozen or stored."""
    try:
        name.encode()
    except UnicodeEncodeError:
        raise BadInput(
            f"{parameter}: the name of a file that matches is not UTF-8: {name!r} — rename it"
        ) from None


def references(experiment: Experiment) -> list[str]:
    """The placeholders that stand for another experiment's output."""
    lines = (template.parse(line, experiment.shell) for line in experiment.command)
    names = itertools.chain.from_iterable(template.names_in(line) for line in lines)
    texts = (template.text_names(text) for _, text in experiment.environment)
    found = itertools.chain(names, itertools.chain.from_iterable(texts))
    return list(dict.fromkeys(name for name in found if "." in name))


def _fixed(experiment: Experiment, context: Context) -> tuple[dict[str, str], list[str]]:
    """What placeholders that are the same for all tasks stand for, and the outputs they need."""
    fixed, inputs = {"data": context.data, "output": OUTPUT}, []
    for name in references(experiment):
        other, which, _ = name.split(".")
        if context.planned:
            fixed[name] = f"{{{{{name}}}}}"
        elif which == "best":
            if other not in context.best:
                raise BadInput(f"{experiment.name}: {other} has no best task — look at its results")
            inputs.append(context.best[other])
            fixed[name] = f"{INPUTS}/{context.best[other].rpartition('/')[0]}"
        else:
            inputs += context.all.get(other, ())
            fixed[name] = f"{INPUTS}/{other}"
    return fixed, list(dict.fromkeys(inputs))
