"""Another process that works on a run: a real one, which does nothing but hold the run's lock."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HOLD = """
import sys
from pathlib import Path
from mayfly.ledger import Ledger
with Ledger(Path(sys.argv[1])).alone(sys.argv[2], sys.argv[3]):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def working(ledger: Path, run: str, command: str = "mayfly deploy") -> Iterator[subprocess.Popen]:
    """Another process at work on a run, in the block; it may be killed there."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(ledger), run, command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.stdin.close()
        process.wait(timeout=30)
        process.stdout.close()
