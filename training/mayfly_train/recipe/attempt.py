"""One attempt at a task on a node: look for the marker, run, store, and leave the marker last.

A marker is written once, by whoever is first. Whatever an engine forgets or starts twice, a task
that has one does not run again.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from mayfly_train.errors import BadInput, NodeError
from mayfly_train.recipe import gang, identity, names, process, results, shipping, slots, sources
from mayfly_train.recipe.expand import Task, task_from
from mayfly_train.recipe.patience import Patience, PatientStore
from mayfly_train.recipe.shipping import Curve, MedianWatch, Shipper, Tail
from mayfly_train.recipe.slots import Records, Slot, Slots
from mayfly_train.recipe.store import Store, read_json, to_bytes
from mayfly_train.s3 import S3Error

DONE, FAILED, STOPPED, CANCELLED, BROKEN = "done", "failed", "stopped", "cancelled", "broken"
ACCEPTED = (DONE, STOPPED)
_ENDED = {BROKEN: "the worker was ended", CANCELLED: "cancelled"}
ROOM_BYTES = 64 << 10  # less is no room
FULL = "the node's disk is full"
_TAIL_BYTES = 2000
CLAIMS, CLAIM_S = 20, 0.25
_SCAN_BYTES = 1 << 20

Outcome = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """What the head asks a node for: a frozen task, and how to run and judge it."""

    attempt: str
    task: Mapping[str, Any]
    source: str
    data: str
    result: str
    timeout_s: int = 0
    objective: str = ""
    maximize: bool = True
    stop_after: int = 0
    nodes: int = 1
    """How many members the attempt has: more than one are a gang, and `attempt` is one's name."""
    rank: int = 0
    gang: str = ""
    urgent: bool = False
    """Its task was handed out before: it goes ahead of those that never were."""

    def to_json(self) -> dict[str, Any]:
        """What `Job(**document)` takes."""
        return dict(vars(self))


@dataclass
class Node:
    """What a worker has: a name, a place for files, the store, and who is to be ended."""

    name: str
    scratch: Path
    store: Store
    address: str = "127.0.0.1"
    """Where others of the run reach this node."""
    cancelled: set[str] = field(default_factory=set)
    closing: threading.Event = field(default_factory=threading.Event)
    """Set when the worker goes: what runs is ended, and counts as lost with its node."""

    def __post_init__(self) -> None:
        self.slots = Slots(self.scratch / process.SLOTS, self.name)
        self.identity = identity.own()
        self.records = Records(self.scratch / process.RUNNING / self.name, self.identity)
        self.environment = {
            name: value
            for name, value in os.environb.items()
            if not name.startswith((b"DASK_", b"MAYFLY_"))
        }
        # `python3` is the worker's own, with the packages that are installed for recipes, unless
        # the node has a framework of its own for tasks.
        first = os.environb.get(b"MAYFLY_PATH", b"")
        own = os.fsencode(Path(sys.executable).parent)
        rest = self.environment.get(b"PATH", os.defpath.encode())
        self.environment[b"PATH"] = b":".join(filter(None, (first, own, rest)))

    def has_room(self) -> bool:
        """Whether its disk has room for a task. What ended ones have left goes first: on a full
        disk no other would come and take its place."""
        if _is_full(self.scratch):
            self.slots.drop()
        return not _is_full(self.scratch)


def run(job: Job, node: Node) -> Outcome:
    """Run an attempt and return how it ended; what went wrong with the node is an outcome, too."""
    task = task_from(job.task)
    began = time.time()
    try:
        if job.attempt in node.cancelled:
            return {"state": CANCELLED, "attempt": job.attempt, "node": node.name}
        marker = read_json(_store(job, node), names.done(task.id))
        if marker is not None:
            return dict(marker)
        outcome = _run(job, task, node)
    except Exception as error:  # noqa: BLE001 (else an engine would decide what becomes of the task)
        # Not the command's fault: no room on the disk, or no way to the store.
        why = _end_of(job, node)
        outcome = {"state": why or BROKEN, "message": _ENDED[why] if why else _line(error)}
    outcome |= {
        "task": task.id,
        "attempt": job.attempt,
        "node": node.name,
        "digest": task.digest,
        "started": round(began, 3),
        "seconds": round(time.time() - began, 3),
    }
    return _leave(outcome, task, job, node)


def _patience(job: Job, node: Node) -> Patience:
    """For a store that is away while an attempt is to go on: what has run for hours is not to be
    lost for minutes without one."""
    return Patience(lambda: _end_of(job, node))


def _store(job: Job, node: Node) -> Store:
    return PatientStore(node.store, _patience(job, node))


def _leave(outcome: Outcome, task: Task, job: Job, node: Node) -> Outcome:
    """Write the marker of a good end, or the record of another; a marker that is there wins."""
    try:
        if outcome["state"] in ACCEPTED and job.rank == 0:
            return _claim(names.done(task.id), outcome, _store(job, node))
        # Whoever is broken for want of a store has waited for it.
        store = node.store if outcome["state"] == BROKEN else _store(job, node)
        store.write(names.attempt(task.id, job.attempt), to_bytes(outcome))
    except NodeError as error:
        return {**outcome, "state": _end_of(job, node) or BROKEN, "message": _line(error)}
    return outcome


def _claim(name: str, outcome: Outcome, store: Store) -> Outcome:
    """The outcome that a task's marker has: this one, or that of whoever was first.

    A store may refuse a write because of another that is under way: then there is no marker yet,
    and perhaps never one of the other's.
    """
    for _ in range(CLAIMS):
        if store.create(name, to_bytes(outcome)):
            return outcome
        marker = read_json(store, name)
        if marker is not None:
            return dict(marker)
        time.sleep(CLAIM_S)
    raise NodeError(f"{store.address}/{name} can be neither written nor read")


def _run(job: Job, task: Task, node: Node) -> Outcome:
    with node.slots.one() as slot:
        slot.clear(keep_source=not job.source)
        if job.source:
            cache = node.scratch / "sources"
            sources.copy(job.source, slot.source, cache, _store(job, node))
        for name in task.inputs:
            _fetch(name, slot.inputs, node.scratch / process.OUTPUTS, _store(job, node))
        with slot.stdout.open("wb") as out, slot.stderr.open("wb") as err:
            ended = _commands(slot, (out, err), job, task, node)
        return _judge(ended, slot, job, task, node)


def _fetch(name: str, inputs: Path, cache: Path, store: Store) -> None:
    """Another task's output below `inputs`, as a link to the copy that this node keeps."""
    kept = cache / name
    prefix = f"outputs/{name}/"
    if not kept.exists():
        with slots.whole(kept) as new:
            for each in store.names(prefix):
                store.download(each, new / each[len(prefix) :])
    link = inputs / name.rpartition("/")[0]
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(kept.absolute(), target_is_directory=True)


def _commands(
    slot: Slot, streams: tuple[BinaryIO, BinaryIO], job: Job, task: Task, node: Node
) -> process.Ended:
    """Run the lines one after another while logs are shipped."""
    tails = [
        Tail(slot.path / name, names.log(task.id, job.attempt, name), node.store)
        for name in shipping.STREAMS
    ]
    watch = None
    if job.stop_after:
        curve = Curve(slot.stdout, job.objective)
        watch = MedianWatch(curve, node.store, task.experiment, job.stop_after, job.maximize)
    shipper = Shipper(tails, watch.look if watch else None)
    environment = _environment(slot, job, task, node)
    if job.nodes > 1:
        met = _place(job, node).meet(node.address)
        if isinstance(met, str):
            return process.Ended(0, met)
        environment.update((os.fsencode(name), value.encode()) for name, value in met.items())
    began = time.monotonic()

    def ask() -> str:
        if why := _end_of(job, node):
            return why
        if time.monotonic() - began > shipping.EVERY_S / 2:
            shipper.start()
        return STOPPED if watch is not None and watch.stop else ""

    def note(group: int) -> None:
        node.records.note(slot.number, group, job.attempt)

    ended = process.Ended(0)
    try:
        deadline = began + job.timeout_s if job.timeout_s else None
        for words in task.commands:
            command = process.Command(words, slot.source, environment, *streams, job.attempt)
            ended = process.run(command, deadline, ask, note)
            if ended.exit_code or ended.why:
                break
    finally:
        shipper.end(_patience(job, node))
    return ended


def _place(job: Job, node: Node) -> gang.Place:
    store = _store(job, node)
    return gang.Place(store, job.gang, job.rank, job.nodes, lambda: _end_of(job, node))


def _end_of(job: Job, node: Node) -> str:
    """Why an attempt is to end at once; empty when it is not."""
    if node.closing.is_set():
        return BROKEN
    return CANCELLED if job.attempt in node.cancelled else ""


def _environment(slot: Slot, job: Job, task: Task, node: Node) -> dict[bytes, bytes]:
    """The worker's own environment, what the recipe adds, and where things are."""
    added = {
        **task.environment,
        "MAYFLY_TASK": task.id,
        process.ATTEMPT: job.attempt,
        process.WORKER: node.identity,
        "MAYFLY_OUTPUT": str(slot.output),
        "MAYFLY_DATA": job.data,
    }
    encoded = {os.fsencode(name): os.fsencode(value) for name, value in added.items()}
    return {**node.environment, **encoded}


def _judge(ended: process.Ended, slot: Slot, job: Job, task: Task, node: Node) -> Outcome:
    """What the end of the commands means; a good end has its output stored."""
    outcome: Outcome = {"exit_code": ended.exit_code}
    if bad := _bad_end(ended, slot, job):
        return {**outcome, "state": bad[0], "message": bad[1]}
    try:
        found = results.read(slot.output / job.result, _lines(slot.stdout))
        files = _upload(slot.output, names.output(task.id, job.attempt), _store(job, node))
        if job.nodes > 1 and (why := _place(job, node).part()):
            return {**outcome, "state": why, "message": _ENDED[why]}
    except S3Error:
        raise  # keys that may not write, say: not the command's fault
    except BadInput as error:
        return {**outcome, "state": FAILED, "message": _line(error)}
    if job.stop_after:
        curve = Curve(slot.stdout, job.objective)
        curve.read()
        outcome["curve"] = curve.points
    return {
        **outcome,
        "state": STOPPED if ended.why == STOPPED else DONE,
        "results": found,
        "value": results.value_of(found, job.objective),
        "files": files,
    }


def _bad_end(ended: process.Ended, slot: Slot, job: Job) -> tuple[str, str] | None:
    """State and reason of an end that is no good one."""
    if ended.why in _ENDED:
        return ended.why, _ENDED[ended.why]
    if ended.why == "timeout":
        return FAILED, f"took longer than {job.timeout_s} s"
    if not ended.exit_code or ended.why == STOPPED:
        return None
    message = _failure(ended.exit_code, slot.stderr)
    if _is_full(slot.path):
        return BROKEN, f"{FULL}: {message}"
    return FAILED, message


def _upload(output: Path, prefix: str, store: Store) -> int:
    """Store every file of an output directory; links that lead out of it are refused."""
    if output.is_symlink() or not output.is_dir():
        raise BadInput("the output directory was taken away, or is a link — leave it where it is")
    with os.scandir(output) as entries:
        if next(entries, None) is None:
            return 0
    inside, count = output.resolve(), 0
    for path in sorted(output.rglob("*")):
        if path.is_symlink() and inside not in path.resolve().parents:
            raise BadInput(f"the output {path.name} is a link that leads out of the directory")
        if path.is_file():
            store.upload(prefix + path.relative_to(output).as_posix(), path)
            count += 1
    return count


def _failure(code: int, stderr: Path) -> str:
    """How the command failed, and the last line that it had to say."""
    how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
    with contextlib.suppress(OSError):
        with stderr.open("rb") as stream:
            stream.seek(max(0, stderr.stat().st_size - _TAIL_BYTES))
            said = [line for line in stream.read().decode(errors="replace").splitlines() if line]
        if said:
            return f"{how}: {said[-1].strip()[:300]}"
    return how


def _is_full(directory: Path) -> bool:
    """Whether there is no room where the command worked: then it may have failed for that."""
    return shutil.disk_usage(directory).free < ROOM_BYTES


def _lines(path: Path) -> deque[bytes]:
    """The last lines of a file, at most so many bytes of it."""
    if not path.stat().st_size:
        return deque()
    with path.open("rb") as stream:
        stream.seek(max(0, path.stat().st_size - _SCAN_BYTES))
        return deque(stream)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:500]
