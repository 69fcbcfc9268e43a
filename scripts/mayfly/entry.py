"""Where the `mayfly` command begins, and where errors become a line and an exit code.

`mayfly recipe` loads its own verbs only: all others take most of two seconds of a core, and a head
that was killed is to be at work again soon.
"""

from __future__ import annotations

import importlib
import io
import sys
from typing import Any

import typer

from mayfly.console import emit, report_error
from mayfly.errors import UserError
from mayfly.summary import explain

HELP = "Transient clusters for distributed training: one job file, one command, nothing left."
# typer carries its own copy of click, whose errors have no public name there.
_ClickError: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


def main() -> None:
    """Run the command line."""
    arguments, command = _split(sys.argv[1:])
    options = [word for word in arguments if word.startswith("--")]
    if "--json" in options:
        sys.stdin = io.StringIO()  # a program is not to be asked
    try:
        app = _recipes() if arguments[:1] == ["recipe"] else _module("mayfly.cli").app
        result = app(args=arguments, obj=command, prog_name="mayfly", standalone_mode=False)
        code = result if isinstance(result, int) else 0
    except _ClickError as error:
        line = " ".join(error.format_message().split())
        code = report_error(UserError(line, "see mayfly --help"), debug=False)
    except (Exception, KeyboardInterrupt) as error:
        if "--json" in options:
            emit({"ok": False, "error": explain(error)}, None, as_json=True)
        code = report_error(error, debug="--debug" in options)
    sys.exit(code)


def root() -> typer.Typer:
    """The command without its verbs."""
    return typer.Typer(
        name="mayfly",
        help=HELP,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )


def _recipes() -> typer.Typer:
    app = root()
    app.add_typer(_module("mayfly.recipe.commands").app, name="recipe")
    return app


def _module(name: str) -> Any:
    return importlib.import_module(name)


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    """Return our own words, and those after the first `--`, which belong to a command on a node."""
    if "--" not in words:
        return words, []
    place = words.index("--")
    return words[:place], words[place + 1 :]


if __name__ == "__main__":
    main()
