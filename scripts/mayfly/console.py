"""The two streams of a command: its result on standard output, everything else on standard error.

Errors are handled here and nowhere else: one line, and an exit code.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Mapping
from typing import Any

from rich.console import Console, RenderableType

from mayfly.errors import MayflyError
from mayfly.redact import Redactor
from mayfly_train.errors import NodeError

PIPE_WIDTH = 160
INTERRUPTED = 130  # what shells report for SIGINT


def emit(document: Mapping[str, Any], human: RenderableType | None, *, as_json: bool) -> None:
    """Print a command's result: the document with --json, else what people read (or nothing)."""
    if as_json:
        print(json.dumps(document, default=str), flush=True)
    elif isinstance(human, str):
        print(human, flush=True)
    elif human is not None:
        # A pipe has no width of its own; the usual 80 columns would cut the tables.
        Console(width=None if sys.stdout.isatty() else PIPE_WIDTH).print(human)


def report_error(error: BaseException, *, debug: bool, redact: Redactor | None = None) -> int:
    """Print what went wrong as one line on standard error and return the exit code for it.

    Only an error that was not raised on purpose is called internal; --debug adds its traceback.
    """
    hide = redact or Redactor()
    if debug and not isinstance(error, KeyboardInterrupt):
        sys.stderr.write(hide("".join(traceback.format_exception(error))))
    if isinstance(error, KeyboardInterrupt):
        line, code = "interrupted", INTERRUPTED
    elif isinstance(error, MayflyError | NodeError):
        line, code = " ".join(str(error).split()), error.exit_code
    else:
        what = " ".join(f"{type(error).__name__}: {error}".split())
        line = f"internal error: {what}" + ("" if debug else " (--debug shows the traceback)")
        code = 1
    sys.stderr.write(f"mayfly: {hide(line)}\n")
    return code
