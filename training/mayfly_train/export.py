"""`export`: copy a trained model from its directory to S3 and write its manifest last.

A journal in S3 remembers what was copied, so an export that broke goes on where it was; and the
manifest says that all is whole: it is written when the size of every object was read back.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

from mayfly_train import manifest, model_files, s3
from mayfly_train.cluster import DEFAULT_PATH, load_cluster
from mayfly_train.errors import NodeError
from mayfly_train.manifest import Entry, Manifest
from mayfly_train.model_dir import open_model_dir
from mayfly_train.model_files import ModelFile
from mayfly_train.retry import with_backoff

JOURNAL = "status/export.json"
FACTS = ("steps", "global_step", "accuracy", "samples_seen", "samples_processed", "reason")
Progress = Callable[[int, int], None]


class NotWhole(NodeError):
    """S3 does not hold what it said it had taken."""


@dataclass(frozen=True)
class ExportSettings:
    """What to export where; `facts` (see FACTS) go into the manifest beside the run's id."""

    client: s3.S3Client
    run: str
    run_uri: s3.S3Uri
    model_dir: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    parallel: int = 4


def export_run(
    settings: ExportSettings, store: model_files.Reader, on_progress: Progress | None = None
) -> Manifest:
    """Copy the model and return its manifest, which then stands in S3.

    Safe to repeat: what was copied and has not changed since is not copied again. Calls
    on_progress(bytes done, bytes in all) from several threads, one at a time. Raises NodeError
    when there is no model or S3 does not take it; then no manifest stands in S3.
    """
    found = model_files.find(store, settings.model_dir)
    exporter = _Exporter(settings, store, found, on_progress)
    where = settings.run_uri.join(manifest.NAME)
    with_backoff(lambda _: s3.delete(settings.client, where))
    entries = exporter.bring_all(found.files)
    if found.checkpoint_state is not None:
        entries.append(exporter.put_checkpoint_state(found.checkpoint_state))
    made = manifest.build("model", entries, run=settings.run, **settings.facts)
    with_backoff(lambda _: _require_sizes(settings, made))
    text = made.to_json().encode()
    with_backoff(lambda _: s3.write_bytes(settings.client, where, text, "application/json"))
    return made


def check_writable(client: s3.S3Client, run_uri: s3.S3Uri) -> None:
    """Write a small object below the run's address and delete it. Raises S3Error."""
    probe = run_uri.join("status", "probe")
    s3.write_bytes(client, probe, b"", "text/plain")
    s3.delete(client, probe)


class _Exporter:
    """Copies single files, remembering in the journal what has been copied."""

    def __init__(
        self,
        settings: ExportSettings,
        store: model_files.Reader,
        found: model_files.ModelFiles,
        on_progress: Progress | None,
    ):
        self._settings, self._store, self._on_progress = settings, store, on_progress
        self._lock = threading.Lock()
        self._done, self._total = 0, sum(file.source.size for file in found.files)
        self._journal = _read_journal(settings)

    def bring_all(self, files: tuple[ModelFile, ...]) -> list[Entry]:
        """Copy what the journal lacks; returns all entries. After an error no file is begun."""
        with ThreadPoolExecutor(self._settings.parallel) as pool:
            tasks = [pool.submit(self._bring, file) for file in files]
            try:
                return [task.result() for task in tasks]
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise

    def put_checkpoint_state(self, state: bytes) -> Entry:
        """Write the file that tells TensorFlow which checkpoint is the last."""
        entry = Entry(
            f"checkpoints/{model_files.CHECKPOINT_STATE}",
            len(state),
            hashlib.sha256(state).hexdigest(),
        )
        where = self._settings.run_uri.join(entry.path)
        with_backoff(lambda _: s3.write_bytes(self._settings.client, where, state, "text/plain"))
        return entry

    def _bring(self, file: ModelFile) -> Entry:
        remembered = self._remembered(file)
        if remembered is not None:
            self._count(file.source.size)
            return remembered
        # Reading through WebHDFS is slower and survives more.
        entry = with_backoff(lambda attempt: self._copy(file, web=attempt > 0))
        self._remember(file, entry)
        return entry

    def _copy(self, file: ModelFile, web: bool) -> Entry:
        stream = HashingStream(self._store.read_chunks(file.source.path, web=web), self._count)
        try:
            where = self._settings.run_uri.join(file.target)
            s3.upload(self._settings.client, where, cast(BinaryIO, stream))
            # A file that its writer never closed is listed without its last block, and read with
            # it. HDFS files only grow: more bytes than were listed are a whole file.
            if stream.size < file.source.size:
                raise NodeError(
                    f"{file.source.path} has {stream.size} bytes, not {file.source.size} — "
                    "it ended early"
                )
        except BaseException:
            self._count(-stream.size)
            raise
        return Entry(file.target, stream.size, stream.hexdigest())

    def _remembered(self, file: ModelFile) -> Entry | None:
        known = self._journal.get(file.target)
        now = [file.source.size, file.source.modified_ms]
        if not known or [known["size"], known["modified_ms"]] != now:
            return None
        where = self._settings.run_uri.join(file.target)
        if with_backoff(lambda _: s3.size_of(self._settings.client, where)) != known["size"]:
            return None
        return Entry(file.target, known["size"], known["sha256"])

    def _remember(self, file: ModelFile, entry: Entry) -> None:
        with self._lock:
            self._journal[entry.path] = {
                "size": entry.size,
                "sha256": entry.sha256,
                "modified_ms": file.source.modified_ms,
            }
            where = self._settings.run_uri.join(JOURNAL)
            with_backoff(lambda _: s3.write_json(self._settings.client, where, self._journal))

    def _count(self, size: int) -> None:
        with self._lock:
            self._done += size
            self._total = max(self._total, self._done)  # a file may be longer than it was listed
            if self._on_progress:
                self._on_progress(self._done, self._total)


class HashingStream(io.RawIOBase):
    """A stream over chunks that hashes and counts what is read.

    `read(n)` returns n bytes unless the end is near, as multipart uploads need.
    """

    def __init__(self, chunks: Iterator[bytes], count: Callable[[int], None]):
        self._chunks, self._count = chunks, count
        self._rest, self._digest, self.size = b"", hashlib.sha256(), 0

    def readable(self) -> bool:
        """Always."""
        return True

    def hexdigest(self) -> str:
        """The SHA-256 of what has been read so far."""
        return self._digest.hexdigest()

    def read(self, size: int = -1) -> bytes:
        """The next bytes; all that are left when size is negative."""
        parts, length = [self._rest], len(self._rest)
        while size < 0 or length < size:
            chunk = next(self._chunks, b"")
            if not chunk:
                break
            parts.append(chunk)
            length += len(chunk)
        data = b"".join(parts)
        end = len(data) if size < 0 else size
        taken, self._rest = data[:end], data[end:]
        self._digest.update(taken)
        self.size += len(taken)
        self._count(len(taken))
        return taken


def _read_journal(settings: ExportSettings) -> dict[str, Any]:
    where = settings.run_uri.join(JOURNAL)
    try:
        journal = with_backoff(lambda _: s3.read_json(settings.client, where))
    except s3.NotFound:
        return {}
    return journal if isinstance(journal, dict) else {}


def _require_sizes(settings: ExportSettings, made: Manifest) -> None:
    sizes = {
        entry.path: s3.size_of(settings.client, settings.run_uri.join(entry.path))
        for entry in made.files
    }
    there = {path: size for path, size in sizes.items() if size is not None}
    wrong = manifest.differences(made, there)
    if wrong:
        raise NotWhole(f"the model in S3 is not whole: {wrong[0]} — export it again")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `export`."""
    parser.add_argument("--cluster", type=Path, default=DEFAULT_PATH, help="topology document")
    parser.add_argument("--check", metavar="URI", help="only prove that it can be written")
    s3.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Export the run of cluster.json by hand, with the figures of its last status; returns 0."""
    client = s3.connect(s3.settings_from(args))
    if args.check:
        check_writable(client, s3.parse_uri(args.check))
        return 0
    cluster = load_cluster(args.cluster)
    uri = s3.parse_uri(cluster.run_uri)
    try:
        status = s3.read_json(client, uri.join("status.json"))
    except s3.NotFound:
        status = {}
    store, model_dir = open_model_dir(cluster)
    settings = ExportSettings(
        client, cluster.run, uri, model_dir, {name: status.get(name) for name in FACTS}
    )
    made = export_run(settings, store)
    where = str(uri.join(manifest.NAME))
    print(json.dumps({"manifest": where, "files": len(made.files), "bytes": made.total_bytes}))
    return 0
