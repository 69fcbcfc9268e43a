"""A YAML file with the line of each of its keys, so that errors can say where."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from mayfly.errors import UserError

Key = tuple[str, ...]


class Lines:
    """Lines by path of keys; what has none is looked up in what holds it."""

    def __init__(self, file: Path, found: dict[Key, int]) -> None:
        self._file, self._found = file, found

    def of(self, path: Sequence[object]) -> str:
        """`recipe.yml, line 12`."""
        key = tuple(str(part) for part in path)
        while key and key not in self._found:
            key = key[:-1]
        line = self._found.get(key)
        return f"{self._file}, line {line}" if line else str(self._file)


def read(file: Path) -> tuple[dict[str, Any], Lines]:
    """The content as written, and its lines. Raises UserError when it is no mapping of keys."""
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"cannot read the recipe {file}: {error.strerror}", "give the path of a recipe file"
        ) from None
    except UnicodeDecodeError:
        raise UserError(f"{file} is not a recipe: not UTF-8 text", "see docs/recipes.md") from None
    return parse(text, file)


def parse(text: str, file: Path) -> tuple[dict[str, Any], Lines]:
    """The same for a text; `file` is only named."""
    try:
        node = yaml.compose(text, yaml.SafeLoader)
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{file}, line {mark.line + 1}" if mark else str(file)
        problem = getattr(error, "problem", None) or "cannot be parsed"
        raise UserError(f"{where} is not YAML: {problem}", "correct it there") from None
    if not isinstance(content, dict) or node is None:
        raise UserError(f"{file} is not a recipe: it is not a mapping", "see docs/recipes.md")
    found: dict[Key, int] = {}
    try:
        _walk(node, (), found, file)
    except RecursionError:
        raise UserError(f"{file} contains itself", "write out what its aliases stand for") from None
    return content, Lines(file, found)


def _walk(node: yaml.Node, path: Key, found: dict[Key, int], file: Path) -> None:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            place, line = (*path, str(key.value)), key.start_mark.line + 1
            if place in found:
                advice = f"it was there on line {found[place]}: keep one of them"
                raise UserError(f"{file}, line {line}: {key.value!r} is there twice", advice)
            found[place] = line
            _walk(value, place, found, file)
    elif isinstance(node, yaml.SequenceNode):
        for number, value in enumerate(node.value):
            place = (*path, str(number))
            found[place] = value.start_mark.line + 1
            _walk(value, place, found, file)
