"""Commands with placeholders: words are split before values are put in, so no value can be two.

A line is split as a shell would, but nothing else of a shell happens. With `shell: true` a line
goes to bash whole, and finds values that are not plain in variables.
"""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Union

PLACEHOLDER = re.compile(r"\{\{\s*([A-Za-z_]\w*(?:\.\w+)*)\s*\}\}")
SHELL = ("bash", "-e", "-o", "pipefail", "-c")
_OPERATORS = re.compile(r"\|\|?|&&?|;|>>?|<|`|\$\(")
_ODD = re.compile(r"\{\{[^}]*\}\}|\{\{|\}\}")


class BadTemplate(ValueError):
    """A command that cannot be read; the text says what to do."""


@dataclass(frozen=True)
class Name:
    """A placeholder."""

    name: str


Word = tuple[Union[str, Name], ...]
Line = tuple[Word, ...]


def parse(text: str, shell: bool = False) -> Line:
    """The words of one line. Raises BadTemplate."""
    _require_whole_placeholders(text)
    marked, names = _with_marks(text)
    if shell:
        _refuse_quoted(text)
        return tuple((word,) for word in SHELL) + (_parts(marked.strip(), names),)
    found = _unquoted_operator(text)
    if found:
        raise BadTemplate(
            f"has {found!r}, which only a shell understands: set shell: true, or put it in quotes"
        )
    try:
        words = shlex.split(marked)
    except ValueError as error:
        problem = str(error).lower()
        raise BadTemplate(f"is not a command: {problem}: close the quote, or escape it") from None
    if not words:
        raise BadTemplate("is empty: write the command to run")
    return tuple(_parts(word, names) for word in words)


def names_in(line: Line) -> Iterator[str]:
    """The placeholders of a line."""
    for word in line:
        for part in word:
            if isinstance(part, Name):
                yield part.name


def text_names(text: str) -> list[str]:
    """The placeholders of a text that is no command, such as a pattern."""
    _require_whole_placeholders(text)
    return PLACEHOLDER.findall(text)


def fill(text: str, values: Mapping[str, str]) -> str:
    """A text that is no command, with its placeholders filled in."""
    return PLACEHOLDER.sub(lambda match: values[match[1]], text)


class Renderer:
    """A line as a function of columns of values, made once and called for each block of tasks."""

    def __init__(self, line: Line, names: Sequence[str], shell: bool) -> None:
        """`names` is the order in which `__call__` gets the columns."""
        places = {name: place for place, name in enumerate(names)}
        self._shell = shell
        self._words = [
            tuple(places[part.name] if isinstance(part, Name) else part for part in word)
            for word in line
        ]

    def __call__(self, columns: Sequence[Sequence[str]]) -> list[tuple[str, ...]]:
        """The words to run, for each task of the block."""
        size = len(columns[0])
        if not self._shell:
            return list(zip(*(_column(word, columns, size) for word in self._words)))
        quoted = [_for_shell(place, column) for place, column in enumerate(columns)]
        *words, script = (_column(word, quoted, size) for word in self._words)
        used = {part for part in self._words[-1] if isinstance(part, int)}
        set_before = zip(*(_variables(place, columns[place]) for place in sorted(used)))
        scripts = map("".join, zip(map("".join, set_before), script)) if used else script
        return list(zip(*words, scripts))


def _for_shell(place: int, column: Sequence[str]) -> list[str]:
    """Values as they stand in a script: plain ones as they are, others as variables.

    Quotes would do where a word begins, but not in a here-document, a comment or backticks, and a
    value there must not be run.
    """
    return [value if _is_plain(value) else f'"$mayfly_{place}"' for value in column]


def _variables(place: int, column: Sequence[str]) -> list[str]:
    """What sets the variables that `_for_shell` has put in, at the very start of the script."""
    return ["" if _is_plain(v) else f"mayfly_{place}={shlex.quote(v)}\n" for v in column]


def _is_plain(value: str) -> bool:
    return shlex.quote(value) == value


def _column(
    word: tuple[str | int, ...], columns: Sequence[Sequence[str]], size: int
) -> Iterable[str]:
    """One word, for each task of the block."""
    parts = [columns[p] if isinstance(p, int) else itertools.repeat(p, size) for p in word]
    return parts[0] if len(parts) == 1 else map("".join, zip(*parts))


def _require_whole_placeholders(text: str) -> None:
    for match in _ODD.finditer(text):
        if not PLACEHOLDER.fullmatch(match[0]):
            raise BadTemplate(f"has {match[0]!r}, which is no placeholder: write {{{{name}}}}")
    if "\0" in text:
        raise BadTemplate("contains a NUL character, which no command can have")


def _with_marks(text: str) -> tuple[str, list[str]]:
    """The text with each placeholder as one character that nobody types, for shlex to keep."""
    names: list[str] = []

    def mark(match: re.Match[str]) -> str:
        names.append(match[1])
        return "\0"

    return PLACEHOLDER.sub(mark, text), names


def _parts(word: str, names: list[str]) -> Word:
    """The parts of a word; takes as many of `names` as it has marks."""
    pieces = word.split("\0")
    parts: list[str | Name] = []
    for number, piece in enumerate(pieces):
        if number:
            parts.append(Name(names.pop(0)))
        if piece or len(pieces) == 1:
            parts.append(piece)
    return tuple(parts)


def _outside_quotes(text: str) -> Iterator[tuple[int, str]]:
    """Each character with the quote that it stands in, empty outside of any."""
    quote, skip = "", False
    for place, character in enumerate(text):
        if skip:
            skip = False
        elif character == "\\" and quote != "'":
            skip = True
        elif character == quote:
            quote = ""
        elif not quote and character in "'\"":
            quote = character
        else:
            yield place, quote
            continue
        yield place, "\\"


def _unquoted_operator(text: str) -> str:
    inside = dict(_outside_quotes(text))
    bare = "".join(c if not inside.get(place) else " " for place, c in enumerate(text))
    found = _OPERATORS.search(PLACEHOLDER.sub("", bare))
    return found[0] if found else ""


def _refuse_quoted(text: str) -> None:
    inside = dict(_outside_quotes(text))
    for match in PLACEHOLDER.finditer(text):
        if inside.get(match.start(), ""):
            raise BadTemplate(
                f"has {match[0]} inside quotes: take them away, the value is quoted already"
            )
