"""What no single key shows: the graph of experiments, and placeholders that mean something."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import PurePosixPath

from mayfly.errors import UserError, nearest
from mayfly.recipe.lines import Lines
from mayfly_train.recipe import template
from mayfly_train.recipe.document import Experiment, Recipe

BUILT_IN = ("data", "output")
WHICH = ("best", "all")
_REFERENCE_PARTS = 3

Path = tuple[object, ...]


def check(recipe: Recipe, lines: Lines, sourced: bool = True) -> Recipe:
    """The recipe with its experiments in an order that suits their needs. `sourced`: tasks start
    in a copy of a directory, where relative paths mean something.

    Raises UserError for the first thing that is wrong, with its line.
    """
    known = {each.name: each for each in recipe.experiments}
    for experiment in recipe.experiments:
        _check_needs(experiment, known, lines)
    ordered = _ordered(known, lines)
    for experiment in recipe.experiments:
        _check_placeholders(experiment, known, lines)
        _check_globs(experiment, sourced, lines)
    return Recipe(recipe.name, ordered, recipe.image, recipe.data)


def _check_globs(experiment: Experiment, sourced: bool, lines: Lines) -> None:
    """Refuse relative patterns that lead where a task does not start."""
    for parameter in experiment.parameters:
        pattern = parameter.pattern
        if parameter.kind != "glob" or pattern.startswith(("/", "s3://", "{{")):
            continue
        if sourced and ".." not in PurePosixPath(pattern).parts:
            continue
        where = lines.of(("experiments", experiment.name, "parameters", parameter.name))
        why = "leads out of the source" if sourced else "is relative, and there is no source"
        raise UserError(
            f"{where}: glob {pattern!r} {why}, which is all that tasks get a copy of",
            "write the whole path, or {{data}}/…",
        )


def _check_needs(experiment: Experiment, known: dict[str, Experiment], lines: Lines) -> None:
    for name in experiment.needs:
        if name not in known:
            where = lines.of(("experiments", experiment.name, "needs"))
            guess = nearest(name, known)
            advice = f"did you mean {guess!r}?" if guess else f"known: {', '.join(known)}"
            raise UserError(f"{where}: {experiment.name} needs {name!r}, which is unknown", advice)


def _ordered(known: dict[str, Experiment], lines: Lines) -> tuple[Experiment, ...]:
    """Each after what it needs, else as in the file."""
    done: dict[str, Experiment] = {}

    def visit(name: str, above: tuple[str, ...]) -> None:
        if name in above:
            circle = " → ".join([*above[above.index(name) :], name])
            where = lines.of(("experiments", name, "needs"))
            what = f"{where}: experiments need each other in a circle: {circle}"
            raise UserError(what, "take one of these needs away")
        if name not in done:
            for need in known[name].needs:
                visit(need, (*above, name))
            done[name] = known[name]

    for name in known:
        visit(name, ())
    return tuple(done.values())


def _check_placeholders(experiment: Experiment, known: dict[str, Experiment], lines: Lines) -> None:
    used = set()
    for path, name in _placeholders(experiment, lines):
        used.add(name)
        where = lines.of(("experiments", experiment.name, *path))
        if "." in name:
            _check_reference(experiment, name, known, where)
        elif name not in (allowed := _allowed(experiment, path)):
            guess = nearest(name, allowed)
            advice = f"did you mean {guess!r}?" if guess else f"known here: {', '.join(allowed)}"
            raise UserError(f"{where}: {{{{{name}}}}} stands for nothing", advice)
    for parameter in experiment.parameters:
        if parameter.name not in used:
            where = lines.of(("experiments", experiment.name, "parameters", parameter.name))
            raise UserError(
                f"{where}: parameter {parameter.name!r} is not used",
                f"put {{{{{parameter.name}}}}} into the command, or take it away",
            )


def _allowed(experiment: Experiment, path: Path) -> list[str]:
    if path[0] == "parameters":
        return ["data"]
    return [*(parameter.name for parameter in experiment.parameters), *BUILT_IN]


def _placeholders(experiment: Experiment, lines: Lines) -> Iterator[tuple[Path, str]]:
    """Each placeholder, and where it stands."""

    def names(path: Path, read: Callable[[], list[str]]) -> Iterator[tuple[Path, str]]:
        try:
            found = read()
        except template.BadTemplate as error:
            where = lines.of(("experiments", experiment.name, *path))
            what, _, advice = str(error).partition(": ")
            raise UserError(f"{where}: {experiment.name}.{path[0]} {what}", advice) from None
        yield from ((path, name) for name in found)

    for number, line in enumerate(experiment.command):
        yield from names(
            ("command", number),
            lambda line=line: list(template.names_in(template.parse(line, experiment.shell))),  # type: ignore[misc]
        )
    for name, text in experiment.environment:
        yield from names(("environment", name), lambda text=text: template.text_names(text))  # type: ignore[misc]
    for parameter in experiment.parameters:
        if parameter.kind == "glob":
            yield from names(
                ("parameters", parameter.name),
                lambda pattern=parameter.pattern: template.text_names(pattern),  # type: ignore[misc]
            )


def _check_reference(
    experiment: Experiment, name: str, known: dict[str, Experiment], where: str
) -> None:
    """`train.best.output`: of an experiment that is needed, and that has a best task."""
    parts = name.split(".")
    shown = f"{{{{{name}}}}}"
    if len(parts) != _REFERENCE_PARTS or parts[1] not in WHICH or parts[2] != "output":
        advice = "write {{NAME.best.output}} or {{NAME.all.output}}"
        raise UserError(f"{where}: {shown} stands for nothing", advice)
    other = known.get(parts[0])
    if other is None:
        guess = nearest(parts[0], known)
        advice = f"did you mean {guess!r}?" if guess else f"known: {', '.join(known)}"
        raise UserError(f"{where}: {shown} is of an experiment that is unknown", advice)
    if other.name not in _all_needs(experiment, known):
        raise UserError(
            f"{where}: {shown} is of an experiment that {experiment.name} does not wait for",
            f"add needs: [{other.name}]",
        )
    if parts[1] == "best" and not other.search.objective and _many(other):
        raise UserError(
            f"{where}: {shown}: {other.name} has many tasks, and nothing says which is the best",
            "give it search.objective",
        )


def _all_needs(experiment: Experiment, known: dict[str, Experiment]) -> set[str]:
    found, ahead = set(), list(experiment.needs)
    while ahead:
        name = ahead.pop()
        if name not in found:
            found.add(name)
            ahead += known[name].needs
    return found


def _many(experiment: Experiment) -> bool:
    return experiment.samples > 1 or any(
        parameter.kind in ("glob", "integers") or len(parameter.values) > 1
        for parameter in experiment.parameters
    )
