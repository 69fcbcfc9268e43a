"""Run runc, without asking for capabilities that this machine does not have.

A machine may itself be a container or a small virtual machine with a reduced bounding set. Docker
hands `--privileged` containers every capability it knows, and runc then fails on the first one that
cannot be given. Set as the runtime of our own engine on such machines, and only there.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mayfly.local.host import missing_capabilities  # noqa: E402


def main(arguments: Sequence[str]) -> None:
    """Amend the container's or the process' description, then become runc."""
    missing = {
        f"CAP_{name}" for name in missing_capabilities(Path("/proc/self/status").read_text())
    }
    if "create" in arguments or "run" in arguments:
        bundle = Path(option(arguments, "--bundle", "-b") or ".")
        amend(bundle / "config.json", missing)
    elif "exec" in arguments and (process := option(arguments, "--process", "-p")):
        amend(Path(process), missing)
    os.execvp("runc", ["runc", *arguments])


def option(arguments: Sequence[str], long: str, short: str) -> str | None:
    """The value of an option in any of its three spellings."""
    for argument, following in zip(arguments, [*arguments[1:], None], strict=True):
        if argument in (long, short):
            return following
        if argument.startswith(f"{long}="):
            return argument.partition("=")[2]
    return None


def amend(path: Path, missing: set[str]) -> None:
    """Take the missing capabilities out of a config.json or process.json (OCI runtime spec)."""
    document = json.loads(path.read_text())
    process: dict[str, Any] = document.get("process", document)
    sets: dict[str, list[str]] = process.get("capabilities") or {}
    for name, granted in sets.items():
        sets[name] = [one for one in granted if one not in missing]
    path.write_text(json.dumps(document))


if __name__ == "__main__":
    main(sys.argv[1:])
