"""`resume-export`: take up the export of a run that has failed after its training succeeded.

The coordinator's memory on the board is moved back to exporting and the coordinator started again;
the export's journal in S3 then keeps what was copied before from being copied twice.
"""

from __future__ import annotations

import argparse
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

from mayfly_train import markers
from mayfly_train.cluster import DEFAULT_PATH, load_cluster
from mayfly_train.errors import BadInput, NodeError
from mayfly_train.lifecycle import EXPORTING, FAILED, RunState, dump_state, parse_state
from mayfly_train.markers import Board

UNIT = "mayfly-run.service"
STOP_S = 60


def resume(board: Board, run: str) -> None:
    """Move a failed run back to exporting. Raises BadInput when it has nothing to export."""
    document = markers.read_json(board, markers.MEMORY) or {}
    state = to_exporting(parse_state(document.get("state")), markers.DONE in board.names(), run)
    memory: dict[str, Any] = {**document, "state": dump_state(state)}
    markers.write_json(board, markers.MEMORY, memory)


def to_exporting(state: RunState | None, trained: bool, run: str) -> RunState:
    """The state from which the coordinator exports; an exporting one stays as it is."""
    if state is None or not (trained or state.stop):
        phase = state.phase if state else "not started"
        raise BadInput(
            f"run {run} has no trained model: {phase} — see `mayfly report {run}`, "
            f"or give it up with `mayfly destroy {run}`"
        )
    if state.phase not in (FAILED, EXPORTING):
        raise BadInput(f"run {run} is {state.phase} — only a failed export can be taken up again")
    return replace(state, phase=EXPORTING, exported=None, error=None, export=None)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `resume-export`."""
    parser.add_argument("--cluster", type=Path, default=DEFAULT_PATH, help="topology document")


def run(args: argparse.Namespace) -> int:
    """Resume the export of the run of cluster.json; returns 0. Needs root, for systemctl."""
    cluster = load_cluster(args.cluster)
    board = markers.board_of(cluster)
    markers.wait_for(board, STOP_S)
    document = markers.read_json(board, markers.MEMORY) or {}
    to_exporting(parse_state(document.get("state")), markers.DONE in board.names(), cluster.run)
    # A coordinator that still tries to tell its end would write its memory over ours.
    systemctl("stop")
    resume(board, cluster.run)
    systemctl("reset-failed")
    systemctl("start")
    return 0


def systemctl(verb: str) -> None:
    """Do something with the coordinator's unit; `reset-failed` may find nothing to do."""
    command = ["systemctl", verb, UNIT]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode and verb != "reset-failed":
        raise NodeError(f"systemctl {verb} {UNIT}: {done.stderr.strip()} — see journalctl")
