"""What the benches on a kept cluster share: its nodes, commands on them, and the machine."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / part) for part in ("scripts", "training", "tests", "tests/e2e")]

from faults import lab as kept  # noqa: E402
from faults import nodes as node_tools  # noqa: E402, F401 (for the benches)
from machine import nodes  # noqa: E402

import testenv  # noqa: E402 (the path must be set before)
from mayfly.engines import ESTIMATOR  # noqa: E402
from mayfly.local import platform as local  # noqa: E402


@contextlib.contextmanager
def deploy(engine: str = ESTIMATOR, bucket: Any = None, workers: int = 2) -> Iterator[kept.Lab]:
    """Workers, and a ps where the engine has one, without any training; destroyed at the end.

    MAYFLY_TEST_LAB may name a run whose kept nodes are used and left, for several benches in a row.
    """
    os.environ.update(testenv.environment())
    platform = local.up(note)
    if run_id := os.environ.get("MAYFLY_TEST_LAB"):
        yield kept.attach(platform, bucket, run_id, nodes(platform))
        return
    lab = kept.deploy(platform, bucket, engine, workers=workers)
    try:
        yield lab
    finally:
        lab.destroy()


def node_command(lab: kept.Lab, node: str, script: str, text: str = "") -> str:
    """Run a shell script on a node with this text as its input; its standard output."""
    docker = ["docker", "-H", lab.platform.docker_host, "exec", "-i", lab.containers[node]]
    done = subprocess.run(
        [*docker, "sh", "-c", script], input=text, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{script[:80]} on {node}: exit {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout


def note(message: str) -> None:
    """Tell whoever waits."""
    print(message, file=sys.stderr, flush=True)


def machine() -> dict[str, Any]:
    """What runs it, and how busy it is."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cores": os.cpu_count(),
        "memory_gib": round(pages / 2**30),
        "kernel": os.uname().release,
        "load": os.getloadavg(),
    }


def say(document: dict[str, Any], before: dict[str, Any]) -> None:
    """Print the result with the machine and its load before and after."""
    print(json.dumps({**document, "machine": before, "load_after": os.getloadavg()}))
