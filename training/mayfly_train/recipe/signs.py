"""Files that a node's dead-man timer and role `engine` look for: the run goes on, or has ended."""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path

ALIVE, ENDED = "alive", "ended"
DIRECTORY = Path("/var/lib/mayfly")


def add_option(parser: argparse.ArgumentParser) -> None:
    """The option that says where they are."""
    parser.add_argument(
        "--signs", type=Path, default=DIRECTORY, help="directory of alive and ended"
    )


def leave(directory: Path, sign: str) -> None:
    """Leave a sign, or renew its time; a node without room for it has other cares."""
    with contextlib.suppress(OSError):
        (directory / sign).touch()
