"""Follow a run from the chief's node to its end: status in S3, then the export, or the failure.

What happens next is a pure function of what is seen (`advance`); the loop around it only looks,
acts and tells. All that it must not forget lies on the board, so it can be killed and go on.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from mayfly_train import export, machine, markers, s3, topology
from mayfly_train.cluster import DEFAULT_PATH, Cluster, load_cluster
from mayfly_train.errors import NodeError
from mayfly_train.lifecycle import (
    ENDED,
    EXPORTING,
    FAILED,
    STARTING,
    STOPPED,
    STOPPING,
    SUCCEEDED,
    TASK_FAILED,
    TASK_STOPPED,
    TASK_SUCCEEDED,
    Limits,
    RunState,
    Seen,
    advance,
    dump_state,
    fail,
    parse_heartbeat,
    parse_state,
    resumed,
)
from mayfly_train.markers import Board
from mayfly_train.model_dir import open_model_dir
from mayfly_train.model_files import NothingThere
from mayfly_train.status import events_between, status_document

LOG = logging.getLogger(__name__)
TASK_ENDED = (TASK_SUCCEEDED, TASK_STOPPED, TASK_FAILED)


# --- acting ------------------------------------------------------------------------------------


class Bucket(Protocol):
    """Where the run's documents go, by their path below the run's URI."""

    def write(self, path: str, data: bytes, content_type: str) -> None: ...


Progressed = Callable[[int, int], None]
Export = Callable[[Mapping[str, Any], Progressed], None]


@dataclass
class S3Bucket:
    """The run's prefix in S3."""

    client: s3.S3Client
    run_uri: s3.S3Uri

    def write(self, path: str, data: bytes, content_type: str) -> None:
        """Put one small document."""
        s3.write_bytes(self.client, self.run_uri.join(path), data, content_type)


class Coordinator:
    """One run's coordinator; `run` returns 0 once the end of the run has been told."""

    clock = staticmethod(time.time)

    def __init__(
        self, cluster: Cluster, board: Board, bucket: Bucket, export: Export, limits: Limits
    ) -> None:
        self.cluster = cluster
        self.board = board
        self.bucket = bucket
        self.export = export
        self.limits = limits
        now = self.clock()
        self.state = RunState(STARTING, started=now, stepped=now)
        self.seen = Seen()
        self.answered = now
        self.staging_s: float | None = None
        self._told: dict[str, Any] | None = None
        self._told_at = now
        self._events: list[dict[str, Any]] = []
        self._memory: dict[str, Any] | None = None
        self._asked: set[str] = set()

    def run(self) -> int:
        """Follow the run to its end."""
        markers.wait_for(self.board, self.limits.board)
        self._recall()
        while self.state.phase not in ENDED:
            self.step()
            if self.state.phase not in ENDED:
                time.sleep(self.limits.poll)
        self._tell_end()
        return 0

    def step(self) -> None:
        """Look once, act and tell."""
        try:
            self.seen = self._look()
            self.answered = self.clock()
        except NodeError as error:
            LOG.warning("coordinator: %s", error)
        now = self.clock()
        self.state = advance(self.state, self.seen, self.cluster, now, self.limits)
        if now - self.answered > self.limits.board and self.state.phase not in ENDED:
            self.state = fail(self.state, now, self._no_answer())
        self._ask_to_restart()
        self._ask_to_stop()
        self.tell()
        self._remember()
        if self.state.phase == EXPORTING:
            self._leave_logs()
            self._run_export()

    def _no_answer(self) -> str:
        address = urlsplit(self.cluster.namenode_http).hostname
        nodes = self.cluster.ps + self.cluster.workers
        name = next((node.name for node in nodes if node.address == address), address)
        silence = f"HDFS has not answered for {self.limits.board:.0f} s"
        return f"{silence} — its NameNode is on node {name}"

    def _ask_to_restart(self) -> None:
        """Leave a marker for each trainer that hangs; its supervisor starts it again."""
        for task, attempt in self.state.restarts.items():
            name = markers.restart_marker(task, attempt)
            if name in self._asked:
                continue
            try:
                self.board.write(name, b"{}\n")
                self._asked.add(name)
            except NodeError as error:
                LOG.warning("coordinator: %s not asked to restart: %s", task, error)

    def _ask_to_stop(self) -> None:
        """Have the chief save and end when a limit is reached, and then all others."""
        if self.state.stop is None:
            return
        name = markers.STOP if self.state.phase == STOPPING else markers.STOPPED
        if name in self._asked:
            return
        try:
            if name not in self.board.names():
                markers.write_json(self.board, name, asdict(self.state.stop))
            self._asked.add(name)
        except NodeError as error:
            LOG.warning("coordinator: %s not written: %s", name, error)

    def _look(self) -> Seen:
        names = self.board.names()
        heartbeats = dict(self.seen.heartbeats)
        for task in map(str, topology.placement(self.cluster)):
            if f"{task}.json" in names:
                heartbeat = parse_heartbeat(markers.read_json(self.board, f"{task}.json"))
                if heartbeat:
                    heartbeats[task] = heartbeat
        failed = None
        if markers.FAILED in names:
            failed = markers.read_json(self.board, markers.FAILED) or {}
        stopped = markers.STOPPED in names
        return Seen(heartbeats, markers.DONE in names, failed, stopped, at=self.clock())

    def _run_export(self) -> None:
        """Export; a failed export is a failed run."""
        document = self._document(self.clock())
        try:
            self.export({name: document[name] for name in export.FACTS}, self._export_progressed)
        except NodeError as error:
            self.state = fail(self.state, self.clock(), self._not_exported(error))
        else:
            phase = STOPPED if self.state.stop else SUCCEEDED
            self.state = replace(self.state, phase=phase, exported=self.clock())

    def _not_exported(self, error: NodeError) -> str:
        """What to tell; a run that was stopped too early has nothing that could be exported."""
        if self.state.stop and isinstance(error, NothingThere):
            return f"{self.state.stop.message}: stopped before there was a checkpoint"
        return f"export failed: {error}"

    def _export_progressed(self, done: int, total: int) -> None:
        self.state = replace(self.state, export={"bytes_done": done, "bytes_total": total})
        if self._told is None or self.clock() - self._told_at >= self.limits.poll:
            self.tell()

    def _document(self, now: float) -> dict[str, Any]:
        return status_document(
            self.cluster, self.state, self.seen.heartbeats, now, staging_s=self.staging_s
        )

    # --- telling ---

    def tell(self) -> None:
        """Write status.json and new events; a failure is logged, the next time may succeed."""
        now = self.clock()
        document = self._document(now)
        events = self._events + events_between(self._told, document)
        try:
            if events != self._events:
                lines = "".join(json.dumps(event) + "\n" for event in events)
                self.bucket.write("events.jsonl", lines.encode(), "application/x-ndjson")
            self.bucket.write("status.json", _encoded(document), "application/json")
        except NodeError as error:
            LOG.warning("coordinator: status not written: %s", error)
            return
        self._events, self._told, self._told_at = events, document, now

    def _tell_end(self) -> None:
        """Tell the end of the run; it counts as told only when S3 has it."""
        if self.state.phase == FAILED:
            self.tell()  # at once; what follows may wait for a board that does not answer
        self._end_tasks()
        self._leave_logs()
        self.tell_until_heard()
        self._remember()

    def tell_until_heard(self) -> None:
        """Repeat the last status until S3 has taken it. Raises NodeError when it never does."""
        end = self.clock() + self.limits.final_status
        while True:
            self.tell()
            if self._told is not None and self._told["state"] == self.state.phase:
                return
            if self.clock() > end:
                raise NodeError("the end of the run could not be written to S3 — see the log")
            time.sleep(self.limits.poll)

    def _end_tasks(self) -> None:
        """Give all tasks that are not lost time to end and to leave their logs: the last status
        says how each of them did. Of a failure that is not a task's they learn here."""
        end = time.monotonic() + self.limits.logs
        try:
            if self.state.phase == FAILED:
                self._mark_failed()
            while self._going() and time.monotonic() < end:
                time.sleep(min(1.0, self.limits.poll))
        except NodeError as error:
            LOG.warning("coordinator: %s", error)

    def _mark_failed(self) -> None:
        error = self.state.error or {}
        markers.mark_failed(
            self.board,
            error.get("task") or "coordinator",
            error.get("node") or self.cluster.workers[0].name,
            error.get("message") or "",
            error.get("log_tail") or [],
        )

    def _going(self) -> list[str]:
        """The tasks that have not ended yet, as far as they are heard."""
        self.seen = self._look()
        tasks = self.seen.heartbeats.items()
        return [t for t, h in tasks if h.state not in TASK_ENDED and t not in self.state.lost]

    def _leave_logs(self) -> None:
        """Copy the logs that the tasks have left on the board to S3."""
        for task in map(str, topology.placement(self.cluster)):
            try:
                log = self.board.read(f"{task}.log")
            except NodeError as error:
                LOG.warning("coordinator: logs not read: %s", error)
                return  # each further try would keep the run's end from being told
            try:
                if log is not None:
                    self.bucket.write(f"logs/{task}.log", log, "text/plain; charset=utf-8")
            except NodeError as error:
                LOG.warning("coordinator: log of %s not copied: %s", task, error)

    # --- remembering ---

    def _recall(self) -> None:
        document = markers.read_json(self.board, markers.MEMORY) or {}
        state = parse_state(document.get("state"))
        if state is not None:
            self.state = resumed(state, self.clock())
            self._events = list(document.get("events") or [])
            self._told = document.get("told")

    def _remember(self) -> None:
        document = {"state": dump_state(self.state), "events": self._events}
        if document == self._memory:
            return
        try:
            markers.write_json(self.board, markers.MEMORY, {**document, "told": self._told})
            self._memory = document
        except NodeError as error:
            LOG.warning("coordinator: state not kept: %s", error)


def _encoded(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, indent=1).encode() + b"\n"


# --- the command -------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `coordinate`."""
    parser.add_argument("--cluster", type=Path, default=DEFAULT_PATH, help="topology document")
    s3.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Follow the run that the topology document names to its end."""
    cluster = load_cluster(args.cluster)
    client = s3.connect(s3.settings_from(args))
    run_uri = s3.parse_uri(cluster.run_uri)
    open_model_dir(cluster)  # a wrong one is told now, not after hours

    def export_model(facts: Mapping[str, Any], progressed: Progressed) -> None:
        store, model_dir = open_model_dir(cluster)
        settings = export.ExportSettings(client, cluster.run, run_uri, model_dir, facts)
        export.export_run(settings, store, progressed)

    coordinator = Coordinator(
        cluster, markers.board_of(cluster), S3Bucket(client, run_uri), export_model, Limits()
    )
    coordinator.state = replace(coordinator.state, born=machine.born())
    coordinator.staging_s = staging_seconds(client, run_uri)
    return coordinator.run()


def staging_seconds(client: s3.S3Client, run_uri: s3.S3Uri) -> float | None:
    """How long the slowest node took to stage its share; None when no node has told."""
    shares = run_uri.join("status")
    try:
        names = [name for name in s3.list_sizes(client, shares) if name.startswith("staging-")]
        documents = [s3.read_json(client, shares.join(name)) for name in names]
    except NodeError as error:
        LOG.warning("coordinator: staging's status not read: %s", error)
        return None
    return max((float(document.get("seconds") or 0) for document in documents), default=None)
