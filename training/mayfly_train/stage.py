"""`stage`: copy a node's share of a dataset from S3 to HDFS.

Each file streams to a temporary name; its length and SHA-256 are compared with the manifest,
and only then it is renamed. So a file under its final name is whole, whatever broke before.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import posixpath
import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from mayfly_train import hdfs, manifest, s3
from mayfly_train.errors import BadInput, NodeError
from mayfly_train.framing import SUFFIXES, Framing
from mayfly_train.manifest import Entry, Manifest
from mayfly_train.retry import with_backoff
from mayfly_train.staging_progress import StagingProgress
from mayfly_train.verify import read_manifest

# Hadoop's input formats and our programs skip names that start with "_".
_STATE_DIRECTORY = "_staging"
# Each file waits for S3 and for HDFS in turn: several at a time keep both busy.
PARALLEL = 8
_SHARE = re.compile(r"(\d+)/(\d+)")
log = logging.getLogger(__name__)


class DamagedData(BadInput):
    """The bucket does not hold what the manifest says."""


class Store(Protocol):
    """What staging needs of HDFS; `hdfs.Hdfs` has it."""

    def status(self, path: str) -> hdfs.FileInfo | None: ...
    def walk(self, path: str) -> list[hdfs.FileInfo]: ...
    def most_free_bytes(self) -> int: ...
    def make_directory(self, path: str) -> None: ...
    def delete(self, path: str, recursive: bool = False) -> bool: ...
    def rename(self, source: str, target: str) -> None: ...
    def write_bytes(self, path: str, data: bytes) -> None: ...
    def read_chunks(self, path: str, web: bool = False) -> Iterator[bytes]: ...
    def write_chunks(self, path: str, chunks: Iterable[bytes], web: bool = False) -> None: ...


@dataclass(frozen=True)
class Job:
    """From where to where."""

    client: s3.S3Client
    source: s3.S3Uri
    store: Store
    directory: str

    def path(self, *parts: str) -> str:
        """A path below the directory in HDFS."""
        return posixpath.join(self.directory, *parts)


@dataclass(frozen=True)
class Share:
    """Which part of the files is this node's: part `index` of `count`."""

    index: int = 0
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> Share:
        """The share in `i/n`, with i from 0. Raises BadInput when it is something else."""
        found = _SHARE.fullmatch(text)
        if not found or int(found[1]) >= int(found[2]):
            raise BadInput(f"not a share: {text!r} — write i/n with i from 0 to n-1, such as 0/2")
        return cls(int(found[1]), int(found[2]))

    def of(self, files: tuple[Entry, ...]) -> list[Entry]:
        """Every count-th file in the order of size, so that the shares are about equal."""
        by_size = sorted(files, key=lambda entry: (-entry.size, entry.path))
        return by_size[self.index :: self.count]


@dataclass(frozen=True)
class Result:
    """What staging did: files and bytes of this share, how much of it was copied, seconds."""

    changed: bool
    files: int
    bytes: int
    copied_files: int
    copied_bytes: int
    seconds: float


def stage(job: Job, share: Share, progress: StagingProgress, parallel: int = PARALLEL) -> Result:
    """Copy this share of the dataset into HDFS; what is there already stays.

    Raises BadInput when the source or the directory is not what it should be, NodeError when
    copying fails again and again.
    """
    started = time.monotonic()
    dataset = with_backoff(lambda _: _read_dataset(job))
    sizes = _sizes_there(job, dataset)
    files = share.of(dataset.files)
    marker = job.path(_STATE_DIRECTORY, f"{dataset.digest()[:16]}-{share.index}-of-{share.count}")
    complete = job.store.status(marker) is not None
    progress.set_total(len(files), sum(entry.size for entry in files))
    there = _There(sizes, trusted=complete)
    copied = _Copier(job, progress, there, parallel).bring_all(files)
    if copied or not complete:
        if share.index == 0:
            text = dataset.to_json().encode()
            with_backoff(lambda _: job.store.write_bytes(job.path(manifest.NAME), text))
        with_backoff(lambda _: job.store.write_bytes(marker, b""))
    return Result(
        changed=bool(copied) or not complete,
        files=len(files),
        bytes=sum(entry.size for entry in files),
        copied_files=len(copied),
        copied_bytes=sum(entry.size for entry in copied),
        seconds=round(time.monotonic() - started, 2),
    )


@dataclass(frozen=True)
class _There:
    """The size of each file that was in HDFS at the start, by path.

    Where they are trusted a file of the right size is whole; elsewhere its SHA-256 tells.
    """

    sizes: Mapping[str, int]
    trusted: bool


class _Stopped(Exception):
    """Another file failed for good, so this one need not go on."""


class _Copier:
    """Brings files of one dataset into HDFS.

    The NameNode is asked as little as may be: it answers for every file of every node.
    """

    def __init__(self, job: Job, progress: StagingProgress, there: _There, parallel: int):
        self._job, self._progress, self._there = job, progress, there
        self._parallel = parallel
        self._directories: set[str] = set()  # that were made
        self._stopped = threading.Event()

    def bring_all(self, entries: list[Entry]) -> list[Entry]:
        """Copy what is missing; returns what was copied. The first error stops the others."""
        with ThreadPoolExecutor(self._parallel) as pool:
            tasks = {pool.submit(self._bring, entry): entry for entry in entries}
            try:
                done, _ = wait(tasks, return_when=FIRST_EXCEPTION)
                errors = [error for task in done if (error := task.exception())]
                if errors:
                    raise errors[0]
            except BaseException:
                self._stopped.set()
                pool.shutdown(wait=True, cancel_futures=True)
                raise
        return [entry for task, entry in tasks.items() if task.result()]

    def _bring(self, entry: Entry) -> bool:
        """Copy a file unless it is there; returns whether it was copied."""
        copied = not self._is_there(entry)
        if copied:
            try:
                # A native write fails when a DataNode has just died; WebHDFS then still works.
                with_backoff(lambda attempt: self._copy(entry, web=attempt > 0))
            except BaseException as error:
                self._delete_part(entry)
                if isinstance(error, hdfs.HdfsFailure):
                    self._require_room(entry)
                raise
        else:
            self._progress.add(entry.size)
        self._progress.add(0, files=1)
        return copied

    def _is_there(self, entry: Entry) -> bool:
        path = self._job.path(entry.path)
        if self._there.sizes.get(path) != entry.size:
            return False
        if self._there.trusted:
            return True
        return with_backoff(lambda attempt: self._sha256(path, attempt > 0)) == entry.sha256

    def _sha256(self, path: str, web: bool) -> str:
        digest = hashlib.sha256()
        for chunk in self._job.store.read_chunks(path, web=web):
            digest.update(chunk)
        return digest.hexdigest()

    def _part(self, entry: Entry) -> str:
        return self._job.path(_STATE_DIRECTORY, f"{entry.path}{hdfs.PART_SUFFIX}")

    def _delete_part(self, entry: Entry) -> None:
        """Give back the room of a file that will not be finished now."""
        try:
            self._job.store.delete(self._part(entry))
        except NodeError as error:
            log.warning("a part of %s is left in HDFS: %s", entry.path, error)

    def _require_room(self, entry: Entry) -> None:
        """Raise HdfsFull when no DataNode takes a further block; HDFS itself names no cause."""
        try:
            free = self._job.store.most_free_bytes()
        except NodeError:
            return
        if free < self._parallel * hdfs.BLOCK_BYTES:
            raise hdfs.HdfsFull(
                f"HDFS is full: no DataNode has room for {entry.path} ({free >> 20} MiB free) — "
                "use larger disks or more workers, or delete files"
            )

    def _copy(self, entry: Entry, web: bool) -> None:
        final, part = self._job.path(entry.path), self._part(entry)
        stream = _Stream(self._job, entry, self._progress, self._stopped)
        try:
            self._job.store.write_chunks(part, stream, web=web)
            found = self._job.store.status(part)
            stream.require_whole(found.size if found else 0)
        except BaseException:
            stream.take_back()
            raise
        self._make_directory(posixpath.dirname(final))
        self._job.store.rename(part, final)

    def _make_directory(self, directory: str) -> None:
        if directory not in self._directories:
            self._job.store.make_directory(directory)
            self._directories.add(directory)


class _Stream:
    """One file from S3 in chunks, hashed and counted on the way."""

    def __init__(self, job: Job, entry: Entry, progress: StagingProgress, stopped: threading.Event):
        self._job, self._entry, self._progress, self._stopped = job, entry, progress, stopped
        self._digest, self._size = hashlib.sha256(), 0
        self._framing = Framing(entry.size) if entry.path.endswith(SUFFIXES) else None

    def __iter__(self) -> Iterator[bytes]:
        for chunk in s3.read_chunks(self._job.client, self._job.source.join(self._entry.path)):
            if self._stopped.is_set():
                raise _Stopped
            self._digest.update(chunk)
            if self._framing:
                self._framing.feed(chunk)
            self._size += len(chunk)
            self._progress.add(len(chunk))
            yield chunk

    def take_back(self) -> None:
        """Uncount the bytes of an attempt that failed."""
        self._progress.add(-self._size)

    def require_whole(self, stored_bytes: int) -> None:
        """Raise DamagedData or HdfsFailure unless what was read and stored is the file."""
        entry, sha256 = self._entry, self._digest.hexdigest()
        if (self._size, sha256) != (entry.size, entry.sha256):
            raise DamagedData(
                f"{self._job.source.join(entry.path)} does not match its manifest: {self._size} "
                f"bytes with SHA-256 {sha256[:12]}…, not {entry.size} with {entry.sha256[:12]}… — "
                "put the data again"
            )
        if self._framing and not self._framing.whole:
            raise DamagedData(
                f"{self._job.source.join(entry.path)} ends within a record, though its manifest "
                "agrees: it was cut before it was put — make the file again and put it"
            )
        if stored_bytes != entry.size:
            raise hdfs.HdfsFailure(
                f"HDFS has {stored_bytes} of {entry.size} bytes: {entry.path} — copy it again"
            )


def _read_dataset(job: Job) -> Manifest:
    source = f"{job.source}/"
    sizes = s3.list_sizes(job.client, job.source)
    if not sizes:
        raise BadInput(f"nothing under {source} — put the data there with: mayfly data put")
    if manifest.NAME not in sizes:
        raise BadInput(f"no {manifest.NAME} under {source} — put the data with: mayfly data put")
    dataset = read_manifest(job.client, job.source)
    if dataset.kind != "dataset" or not dataset.files:
        raise BadInput(f"not a dataset: {source} — name the address given to: mayfly data put")
    manifest.require_match(dataset, sizes, source)
    return dataset


def _sizes_there(job: Job, dataset: Manifest) -> dict[str, int]:
    """The size of each file that is in HDFS, by path, once for all of them.

    Raises BadInput for another dataset's files: they would be trained on together with these.
    """
    ours = {job.path(name) for name in (*dataset.by_path(), manifest.NAME)}
    state = job.path(_STATE_DIRECTORY, "")
    found = {info.path: info.size for info in job.store.walk(job.directory)}
    strangers = [
        path
        for path in found
        if path not in ours and not path.startswith(state) and not path.endswith(hdfs.PART_SUFFIX)
    ]
    if strangers:
        raise BadInput(
            f"files of another dataset in HDFS: {strangers[0]} (one of {len(strangers)}) — "
            "name another directory or delete them"
        )
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `stage`."""
    parser.add_argument("source", help="s3://bucket/prefix with a manifest.json")
    parser.add_argument("destination", help="hdfs://host:port/directory")
    parser.add_argument("--namenode-http", required=True, help="WebHDFS: http://host:9870")
    parser.add_argument("--user", default="mayfly", help="HDFS user (default: mayfly)")
    parser.add_argument("--share", default="0/1", help="this node's part: i/n with i from 0")
    parser.add_argument(
        "--parallel", type=int, default=PARALLEL, help=f"files at a time (default: {PARALLEL})"
    )
    parser.add_argument("--run-uri", help="where to write status/staging-<i>.json")
    s3.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Stage, and print what was done as one line of JSON. Returns 0."""
    share = Share.parse(args.share)
    source = s3.parse_uri(args.source)
    rpc_url, directory = hdfs.split_url(args.destination)
    client = s3.connect(s3.settings_from(args))
    put = _status_writer(client, args.run_uri, share)
    with StagingProgress(put, {"share": share.index}) as progress:
        store = hdfs.Hdfs(rpc_url, args.namenode_http, args.user)
        result = stage(Job(client, source, store, directory), share, progress, args.parallel)
    print(json.dumps(asdict(result)))
    return 0


def _status_writer(client: s3.S3Client, run_uri: str | None, share: Share) -> Any:
    if not run_uri:
        return lambda _document: None
    where = s3.parse_uri(run_uri).join("status", f"staging-{share.index}.json")
    return lambda document: s3.write_json(client, where, document)
