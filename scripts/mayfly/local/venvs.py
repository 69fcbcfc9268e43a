"""Environments of Python programs that we run but do not import; all platforms share them."""

from __future__ import annotations

import hashlib
import shutil
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

from mayfly.local import host
from mayfly.local.host import Progress
from mayfly.local.paths import Paths


def ensure(paths: Paths, name: str, requirements: Sequence[str], progress: Progress) -> Path:
    """Return the environment's directory, made with these requirements when it is missing."""
    text = "\n".join([*requirements, sys.version])
    final = paths.cached("venvs") / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    complete = final / ".complete"  # an environment cannot be renamed: its scripts have its path
    with paths.locked(final.name):
        if not complete.exists():
            progress(f"installing {', '.join(requirements)}")
            _make(final, requirements)
            complete.touch()
    return final


def _make(final: Path, requirements: Sequence[str]) -> None:
    shutil.rmtree(final, ignore_errors=True)
    venv.create(final, with_pip=True)
    pip = [
        str(final / "bin/python"),
        "-I",
        "-m",
        "pip",
        "install",
        "-q",
        "--disable-pip-version-check",
    ]
    # Most of what IM depends on it never imports; Python compiles the rest when it does.
    host.run([*pip, "--no-compile", *requirements])
