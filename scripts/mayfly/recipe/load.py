"""A recipe file, checked once: the published form and ours become one frozen recipe."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from mayfly.errors import UserError, nearest
from mayfly.recipe import lines as yaml_lines
from mayfly.recipe.check import check
from mayfly.recipe.lines import Lines
from mayfly.recipe.model import Experiment, Parameter, RecipeFile
from mayfly.spec import CHECKOUT, PROBLEMS, without_users
from mayfly_train.recipe.document import Recipe

BUILT_IN = CHECKOUT / "training/recipes"
ONLY = "main"  # the experiment of a recipe in the published form


@dataclass(frozen=True)
class Loaded:
    """A recipe, and the file that it came from."""

    recipe: Recipe
    file: Path
    text: str
    source: Path | None
    """The directory that each task gets a copy of."""


def load(file: Path, name: str | None = None) -> Loaded:
    """The recipe in a file, or of a built-in one's name; `name` is used instead of its own.

    Raises UserError for the first thing that is wrong, with the file's line.
    """
    file = _find(file)
    content, lines = yaml_lines.read(file)
    return _load(content, lines, file, name)


def _find(file: Path) -> Path:
    built_in = BUILT_IN / f"{file.name.removesuffix('.yml')}.yml"
    return built_in if not file.is_file() and len(file.parts) == 1 and built_in.exists() else file


def _load(content: dict[str, Any], lines: Lines, file: Path, name: str | None) -> Loaded:
    published = "experiments" not in content
    values = _as_experiments(content) if published else dict(content)
    values["name"] = name or content.get("name") or _name_of(file)
    try:
        model = RecipeFile.model_validate(values)
    except ValidationError as error:
        raise _explain(error, lines, published) from None
    where = _Published(lines) if published else lines
    recipe = _with_whole_data(check(model.plain(), where, model.source is not None), file)
    source = None if model.source is None else (file.parent / model.source).resolve()
    if source is not None and not source.is_dir():
        where_it_is = lines.of(["source"])
        raise UserError(f"{where_it_is}: source {model.source!r} is no directory", "name one")
    return Loaded(recipe, file, file.read_text(encoding="utf-8"), source)


def _with_whole_data(recipe: Recipe, file: Path) -> Recipe:
    """The recipe with its data's path as seen from anywhere: tasks start in a directory of their
    own, where one that is relative to the file would mean another."""
    if not recipe.data or "://" in recipe.data:
        return recipe
    return replace(recipe, data=str((file.parent / recipe.data).absolute()))


def _as_experiments(content: dict[str, Any]) -> dict[str, Any]:
    """The published form, one experiment without a name, in the form of ours."""
    common = {"name", "image", "framework", "source", "data"}
    own = {key: value for key, value in content.items() if key not in common}
    top = {key: value for key, value in content.items() if key in common}
    return {**top, "experiments": {ONLY: own}}


class _Published(Lines):
    """Lines of a file whose one experiment is the file."""

    def __init__(self, lines: Lines) -> None:
        self._lines = lines

    def of(self, path: Sequence[object]) -> str:
        return self._lines.of(path[2:])


def _name_of(file: Path) -> str:
    """A run's name from the file's."""
    name = re.sub(r"[^a-z0-9]+", "-", file.stem.lower()).strip("-")
    return name if re.match(r"[a-z]", name) else f"recipe-{name}"


_PROBLEMS: dict[str, Callable[[dict[str, Any]], str]] = {
    **PROBLEMS,
    "float_parsing": lambda _: "must be a number",
    "string_pattern_mismatch": lambda _: "use a-z, 0-9 and _ (a recipe's name: -), a letter first",
    "too_short": lambda _: "must have one at least",
}


def _explain(error: ValidationError, lines: Lines, published: bool) -> UserError:
    """The first of the errors, unknown keys before others, with its line."""
    errors = error.errors(include_url=False)
    first = min(errors, key=lambda item: item["type"] != "extra_forbidden")
    path = [part for part in first["loc"] if part != "[key]"]
    shown = path[2:] if published and path[:1] == ["experiments"] else path
    where = lines.of(shown)
    key = ".".join(str(part) for part in shown)
    if first["type"] == "extra_forbidden":
        return _unknown_key(path, shown, where)
    if first["type"] == "missing":
        return UserError(f"{where}: {key} is not set", "add it to the recipe")
    context = first.get("ctx", {})
    if first["type"] == "value_error":
        problem = str(context["error"])
    else:
        describe = _PROBLEMS.get(first["type"])
        problem = describe(context) if describe else first["msg"]
    value = "" if isinstance(first["input"], dict) else f" is {first['input']!r}"
    what = f"{where}: {key or 'the recipe'}{value}"
    return UserError(without_users(what), without_users(problem))


def _unknown_key(path: Sequence[object], shown: Sequence[object], where: str) -> UserError:
    *_, key = path
    known = _known_keys(path[:-1])
    inside = f" in {'.'.join(str(part) for part in shown[:-1])}" if shown[:-1] else ""
    guess = nearest(str(key), known)
    advice = f"did you mean {guess!r}?" if guess else f"known keys: {', '.join(known)}"
    return UserError(f"{where}: unknown key {key!r}{inside}", advice)


def _known_keys(parents: Sequence[object]) -> list[str]:
    """The keys of the model at a path of the file."""
    model: type[BaseModel] = RecipeFile
    for place, name in enumerate(parents):
        if place == 0 and name == "experiments":
            continue
        if parents[0] == "experiments" and place == 1:
            model = Experiment
        elif name == "parameters":
            model = Parameter
        elif model is not Parameter:
            annotation = model.model_fields[str(name)].annotation
            choices = [x for x in (annotation, *get_args(annotation)) if isinstance(x, type)]
            model = next((c for c in choices if issubclass(c, BaseModel)), model)
    return sorted(model.model_fields)
