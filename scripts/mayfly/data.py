"""`mayfly data put`: a directory or an archive → TFRecords, or files as they are, in a bucket."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from mayfly.errors import UserError
from mayfly_train import convert, framing, manifest, s3
from mayfly_train.convert import tfrecord
from mayfly_train.manifest import Entry, Manifest
from mayfly_train.retry import with_backoff
from mayfly_train.verify import read_manifest, verify_directory

Report = Callable[[str, float | None], None]
PARALLEL = 8
FILES = "files"  # the format of what is put as it is
FORMATS = (*convert.FORMATS, FILES)


@dataclass(frozen=True)
class Put:
    """What was put where, and how much of it had to be uploaded."""

    uri: str
    name: str
    files: int
    bytes: int
    uploaded_files: int
    uploaded_bytes: int
    seconds: float


def put(
    source: Path, uri: str, client: s3.S3Client, options: convert.Options, report: Report
) -> Put:
    """Convert the source when it is not TFRecords yet, and upload what the bucket lacks.

    Raises UserError, BadInput or S3Error: nothing to put, a source that cannot be read, a bucket
    that cannot be used; the bucket is tried before anything is converted.
    """
    target = s3.parse_uri(uri)
    s3.require_bucket(client, target)
    if options.format == FILES:
        return upload(source, describe_files(source, options.name), client, target, report)
    if holds_records(source):
        return upload(source, describe(source, options.name), client, target, report)
    with tempfile.TemporaryDirectory(prefix="mayfly-data-") as temporary:
        directory = Path(temporary) / "dataset"
        made = convert.convert(
            source,
            directory,
            options,
            lambda done, total: report(f"converting {source.name}", done / total),
        )
        return upload(directory, made, client, target, report)


def upload(
    directory: Path, dataset: Manifest, client: s3.S3Client, target: s3.S3Uri, report: Report
) -> Put:
    """Upload a dataset's files and, last, its manifest; files with the same digest stay."""
    started = time.monotonic()
    todo = _missing(dataset, client, target)
    counter = _Counter(sum(entry.size for entry in todo), f"uploading to {target}/", report)

    def send(entry: Entry) -> None:
        with_backoff(lambda _: _send(directory / entry.path, client, target.join(entry.path)))
        counter.add(entry.size)

    with ThreadPoolExecutor(PARALLEL) as pool:
        tasks = [pool.submit(send, entry) for entry in todo]
        try:
            for task in tasks:
                task.result()
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    where = target.join(manifest.NAME)
    s3.write_bytes(client, where, dataset.to_json().encode(), "application/json")
    return Put(
        uri=f"{target}/",
        name=str(dataset.extra.get("name", "")),
        files=len(dataset.files),
        bytes=dataset.total_bytes,
        uploaded_files=len(todo),
        uploaded_bytes=sum(entry.size for entry in todo),
        seconds=round(time.monotonic() - started, 2),
    )


def holds_records(source: Path) -> bool:
    """Whether this is a directory of TFRecord files, which needs no conversion."""
    return source.is_dir() and any(_records(source))


def describe_files(directory: Path, name: str | None = None) -> Manifest:
    """The manifest of whatever files a directory holds. Raises UserError when it holds none."""
    label = name or directory.resolve().name
    made = manifest.from_directory(directory, "dataset", format=FILES, name=label, source=label)
    if not made.files:
        raise UserError(f"no files in {directory}", "name the directory that holds the data")
    return made


def describe(directory: Path, name: str | None = None) -> Manifest:
    """The manifest of a directory of TFRecords: its own, checked, or one made from its files.

    Raises BadInput naming the first file with a damaged record: it would end a training.
    """
    said = verify_directory(directory) if (directory / manifest.NAME).exists() else None
    for path in sorted(_records(directory)):
        tfrecord.require_whole(path)
    if said:
        return said
    names = sorted(path.name for path in _records(directory))
    splits = {
        split: found
        for split in convert.SPLITS
        if (found := [file for file in names if file.startswith(split)])
    }
    if "train" not in splits:
        raise UserError(
            f"no training files in {directory}: {', '.join(names[:3])}",
            "their names must begin with train, validation or eval",
        )
    label = name or directory.resolve().name
    return manifest.from_directory(
        directory, "dataset", format="tfrecord", name=label, splits=splits, source=label
    )


def _records(directory: Path) -> list[Path]:
    return [path for path in directory.iterdir() if path.suffix in framing.SUFFIXES]


def _missing(dataset: Manifest, client: s3.S3Client, target: s3.S3Uri) -> list[Entry]:
    """The files that the bucket does not have with this digest and size."""
    try:
        known = read_manifest(client, target).by_path()
    except (s3.NotFound, manifest.BadManifest):
        return list(dataset.files)
    sizes = s3.list_sizes(client, target)
    return [
        entry
        for entry in dataset.files
        if known.get(entry.path) != entry or sizes.get(entry.path) != entry.size
    ]


def _send(path: Path, client: s3.S3Client, target: s3.S3Uri) -> None:
    with path.open("rb") as stream:
        s3.upload(client, target, stream)


class _Counter:
    """Tells how much of all bytes is done, from any thread."""

    def __init__(self, total: int, what: str, report: Report):
        self._total, self._what, self._report = total, what, report
        self._done, self._lock = 0, threading.Lock()

    def add(self, size: int) -> None:
        with self._lock:
            self._done += size
            self._report(self._what, self._done / self._total if self._total else 1.0)
