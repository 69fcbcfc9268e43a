"""What a task reports: a file, or lines of JSON among what it prints."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mayfly_train.errors import BadInput

LIMIT_BYTES = 1 << 20


def read(file: Path, lines: Iterable[bytes]) -> dict[str, Any]:
    """The results: of the file when there is one, else of the last line that is a JSON object.

    Raises BadInput for a file that is not a JSON object, or is too long, and for what is no file.
    """
    if os.path.lexists(file):
        if file.is_symlink() or not file.is_file():
            raise BadInput(f"{file.name} is no file — write one object into a file of this name")
        return _of_file(file)
    found: dict[str, Any] = {}
    for line in lines:
        document = of_line(line)
        if document is not None:
            found = document
    return found


def _of_file(file: Path) -> dict[str, Any]:
    if file.stat().st_size > LIMIT_BYTES:
        raise BadInput(f"{file.name} is longer than 1 MiB — leave numbers and short texts in it")
    try:
        document = _parse(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{file.name} is not JSON: {error} — write one object") from None
    if not isinstance(document, dict):
        raise BadInput(f"{file.name} is JSON, but not an object — write one object")
    return document


def of_line(line: bytes) -> dict[str, Any] | None:
    """The JSON object that a line is, None when it is something else."""
    line = line.strip()
    if not (line.startswith(b"{") and line.endswith(b"}")) or len(line) > LIMIT_BYTES:
        return None
    try:
        document = _parse(line)
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


def _parse(text: str | bytes) -> Any:
    """JSON; what Python programs write for numbers that are none (NaN) is null, and so is a number
    beyond all that can be stored (1e999)."""
    return json.loads(text, parse_constant=lambda _: None, parse_float=_finite)


def _finite(text: str) -> float | None:
    return number if math.isfinite(number := float(text)) else None


def value_of(results: Mapping[str, Any], objective: str) -> float | None:
    """The objective as a number; None when it is missing or no finite number."""
    value = results.get(objective) if objective else None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # a whole number of hundreds of digits
        return None


def step_of(document: Mapping[str, Any], objective: str) -> tuple[int, float] | None:
    """Step and value of a report on the way, None when the line is none."""
    step, value = document.get("step"), value_of(document, objective)
    if value is None or isinstance(step, bool) or not isinstance(step, int):
        return None
    return step, value
