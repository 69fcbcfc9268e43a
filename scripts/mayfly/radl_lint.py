"""What is wrong with a RADL file, by line: what the real parser says, and what it lets pass.

The parser (PyPI's RADL, the one that IM uses) accepts some texts that fail much later or do
nothing at all. Each check here is one such trap.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml
from radl.radl import RADLParseException
from radl.radl_parse import parse_radl

from mayfly.errors import UserError
from mayfly.unresolved import marks

_OUTPORTS = re.compile(r"outports\s*=\s*'([^']*)'")
_CONTAINS = re.compile(r"contains\s*\(([^()]*)\)")
_QUOTED = re.compile(r"'(?:[^\\']|\\.)*'")
_COMMENT = re.compile(r"('(?:[^\\']|\\.)*')|#.*")
_STRANGE = re.compile(r"[^\w.,()\[\]=<>@\s-]|(?<![\w.-])-")
_SENTENCE = re.compile(r"^\s*(network|system|configure)\s+([A-Za-z_.][\w.-]*)")
_CONTEXT = re.compile(r"\bsystem\s+([A-Za-z_.][\w.-]*)\s+configure\s+([A-Za-z_.][\w.-]*)")
_DEPLOY = re.compile(r"^\s*deploy\s+([A-Za-z_.][\w.-]*)\s+(\d+)")
_PARSER_LINE = re.compile(r"^Line \d+: ")
_IM_ADDS = ("hosts", "become", "gather_facts")
_HIGHEST_PORT = 65535


@dataclass(frozen=True, order=True)
class Finding:
    """One thing that is wrong."""

    line: int
    """Line in the file, from 1; 0 when it is not known."""
    message: str
    """What is wrong, and what to write instead."""

    def __str__(self) -> str:
        return f"{self.line}: {self.message}"


@dataclass(frozen=True)
class _Recipe:
    """The lines between @begin and @end, and where the first one stands."""

    start: int
    lines: tuple[str, ...]
    closed: bool

    @property
    def end(self) -> int:
        """The number of the line that ends the recipe."""
        return self.start + len(self.lines)


def lint(text: str, *, dry_run: bool = False) -> list[Finding]:
    """All findings in a RADL text, in order of lines; empty when IM would take it.

    What `deploy` finds out later may stand open in the text of a dry run, and only there.
    """
    outside, recipes = _split(text)
    found = {
        *(() if dry_run else _unresolved(text)),
        *_skipped_characters(outside),
        *_outports(outside),
        *_contains(outside),
        *_old_applications(outside),
        *_unknown_names(outside),
        *(finding for recipe in recipes for finding in _end(recipe, outside)),
        *(finding for recipe in recipes for finding in _recipe(recipe)),
    }
    # The parser stops at its first error, which often is a consequence of one found above.
    return sorted(found) or _parser(text)


def lint_file(path: Path) -> list[Finding]:
    """All findings in a RADL file. Raises UserError when it cannot be read."""
    try:
        return lint(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        cause = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UserError(f"cannot read {path}: {cause}", "give the path of a RADL file") from None


def _split(text: str) -> tuple[list[str], list[_Recipe]]:
    """The lines outside of recipes (others blank, comments removed), and the recipes."""
    outside: list[str] = []
    recipes: list[_Recipe] = []
    body: list[str] | None = None
    for number, line in enumerate(text.splitlines(), start=1):
        if body is None:
            code = _COMMENT.sub(lambda match: match[1] or "", line)
            outside.append(code)
            body = [] if code.rstrip().endswith("@begin") else None
        elif line.startswith("@end"):
            recipes.append(_Recipe(number - len(body), tuple(body), closed=True))
            outside.append(line.removeprefix("@end"))
            body = None
        else:
            body.append(line)
            outside.append("")
    if body is not None:
        recipes.append(_Recipe(len(outside) - len(body) + 1, tuple(body), closed=False))
    return outside, recipes


def _unresolved(text: str) -> Iterator[Finding]:
    for number, line in enumerate(text.splitlines(), start=1):
        for name in marks(line):
            message = f"{name} is left open: a dry run wrote this — `mayfly plan` without it fills"
            yield Finding(number, f"{message} it in")


def _skipped_characters(lines: list[str]) -> Iterator[Finding]:
    """The parser leaves out, silently, what it does not know: it reads -1 as 1."""
    text = _QUOTED.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), "\n".join(lines))
    for match in _STRANGE.finditer(text):
        number = text.count("\n", 0, match.start()) + 1
        yield Finding(number, f"{match[0]!r} outside of quotes: the parser skips it — remove it")


def _outports(lines: list[str]) -> Iterator[Finding]:
    for number, line in enumerate(lines, start=1):
        for match in _OUTPORTS.finditer(line):
            value = match[1]
            if re.search(r"\s", value):
                yield Finding(number, f"blank in outports '{value}' — write '22/tcp,80/tcp'")
            # What stands before a dash may be a CIDR, whose numbers are no ports.
            without_networks = re.sub(r"\d+(?:\.\d+){3}/\d+", "", value)
            for port in re.findall(r"\d+", without_networks):
                if not 1 <= int(port) <= _HIGHEST_PORT:
                    yield Finding(number, f"port {port} does not exist — use 1 to {_HIGHEST_PORT}")


def _contains(lines: list[str]) -> Iterator[Finding]:
    text = "\n".join(lines)
    for match in _CONTAINS.finditer(text):
        if "," in _QUOTED.sub("", match[1]):
            number = text.count("\n", 0, match.start()) + 1
            yield Finding(number, "comma in contains (…) — write (name='x' and version='1')")


def _old_applications(lines: list[str]) -> Iterator[Finding]:
    for number, line in enumerate(lines, start=1):
        if "'ansible.modules." in line:
            yield Finding(
                number,
                "ansible.modules.… installs nothing since IM 1.14 — "
                "write ansible.roles.… or ansible.collections.…",
            )


def _unknown_names(lines: list[str]) -> Iterator[Finding]:
    known: dict[str, set[str]] = {"network": set(), "system": set(), "configure": set()}
    for line in lines:
        match = _SENTENCE.match(line)
        if match and not _CONTEXT.search(line):
            known[match[1]].add(match[2])
    for number, line in enumerate(lines, start=1):
        uses = [("system", m[1]) for m in _DEPLOY.finditer(line)]
        for match in _CONTEXT.finditer(line):
            uses += [("system", match[1]), ("configure", match[2])]
        for match in re.finditer(r"\.connection\s*=\s*'([^']*)'", line):
            uses.append(("network", match[1]))
        for kind, name in uses:
            if name not in known[kind]:
                names = ", ".join(sorted(known[kind])) or "none"
                yield Finding(number, f"unknown {kind} {name!r} — defined here: {names}")


def _end(recipe: _Recipe, outside: list[str]) -> Iterator[Finding]:
    """A recipe's line that starts with @end closes the block: what follows must be `)`."""
    if not recipe.closed:
        yield Finding(len(outside), "a recipe has no @end — put @end alone on a line")
        return
    following = "".join(outside[recipe.end - 1 :]).strip()
    if not following.startswith(")"):
        yield Finding(recipe.end, "a line that starts with @end ends the recipe — indent it")


def _recipe(recipe: _Recipe) -> Iterator[Finding]:
    try:
        content = yaml.safe_load("\n".join(recipe.lines))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or "cannot be parsed"
        yield Finding(recipe.start + (mark.line if mark else 0), f"not YAML: {problem}")
        return
    for play in content if isinstance(content, list) else []:
        for key in play if isinstance(play, dict) else []:
            line = _line_of(key, recipe)
            if key in _IM_ADDS:
                yield Finding(line, f"{key} in a configure block: IM adds its own — remove it")
            elif str(key).endswith("import_playbook"):
                yield Finding(line, "import_playbook in a configure block — put the plays there")


def _line_of(key: str, recipe: _Recipe) -> int:
    pattern = re.compile(rf"^\s*(?:-\s+)?{re.escape(key)}\s*:")
    hits = (n for n, line in enumerate(recipe.lines) if pattern.match(line))
    return recipe.start + next(hits, 0)


def _parser(text: str) -> list[Finding]:
    """What the real parser and its checks say."""
    try:
        parse_radl(text).check()
    except RADLParseException as error:
        message = _PARSER_LINE.sub("", " ".join(str(error).split()))
        return [Finding(error.line or 0, message)]
    return []
