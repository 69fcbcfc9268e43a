"""Tell the run that a task has failed for good: systemd calls this when it restarts it no more."""

from __future__ import annotations

import argparse
from pathlib import Path

from mayfly_train import markers, topology
from mayfly_train.cluster import DEFAULT_PATH, load_cluster


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `failed`."""
    parser.add_argument("--task", required=True, help="the task that failed")
    parser.add_argument("--cluster", type=Path, default=DEFAULT_PATH, help="topology document")


def run(args: argparse.Namespace) -> int:
    """Leave the FAILED marker with the last lines of the task's log."""
    cluster = load_cluster(args.cluster)
    task = topology.parse_task(args.task)
    board = markers.board_of(cluster)
    markers.wait_for(board, 120)
    heartbeat = markers.read_json(board, f"{task}.json") or {}
    code = heartbeat.get("exit_code")
    detail = "without an exit code" if code is None else f"with exit code {code}"
    message = f"{task} ended {detail} and is not restarted any more"
    tail = markers.log_tail(markers.log_path(str(task)))
    markers.mark_failed(board, str(task), topology.node_of(cluster, task).name, message, tail)
    return 0
