"""Stand-ins for unit tests of preprocessing: an HDFS that nodes share, and small datasets."""

from __future__ import annotations

import gzip
import hashlib
import io
import posixpath
import random
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from PIL import Image
from tests.unit.data_fakes import RecordingProgress

from mayfly_train import manifest
from mayfly_train.hdfs import FileInfo, HdfsFailure
from mayfly_train.manifest import Entry
from mayfly_train.preprocess import Options, Work
from mayfly_train.preprocess.claims import Pace

SOURCE, DESTINATION = "/mayfly/data", "/mayfly/preprocessed"
QUICK = Pace(look=0.01, renew=0.02, silent=0.5, stuck=5.0)
NAMES = (
    "train-images-idx3-ubyte", "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte",
)  # fmt: skip


class FakeSharedHdfs:
    """HDFS in a dictionary, for several threads: each method happens in one step, as it does at
    the NameNode; its answer then travels for up to `travel_s`, in which others get ahead.
    `before_write` is called with a path and whether it is WebHDFS's."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.modified: dict[str, int] = {}
        self.lock = threading.Lock()
        self.before_write: Callable[[str, bool], None] = lambda path, web: None
        self.created: list[str] = []  # by create_new
        self.written: list[str] = []  # by write_chunks, whole
        self.ranges: list[tuple[str, int, int]] = []
        self.travel_s = 0.0
        self._tick = 0

    def _travel(self) -> None:
        if self.travel_s:
            time.sleep(random.uniform(0, self.travel_s))

    def _put(self, path: str, data: bytes) -> None:
        self._tick += 1
        self.files[path], self.modified[path] = data, self._tick

    def put(self, path: str, data: bytes) -> None:
        """A file that was there before."""
        with self.lock:
            self._put(path, data)

    def names(self, directory: str = DESTINATION) -> list[str]:
        """Relative names below a directory, without the state of preprocessing."""
        return [
            posixpath.relpath(info.path, directory)
            for info in self.walk(directory)
            if "/_preprocess/" not in info.path
        ]

    def status(self, path: str) -> FileInfo | None:
        with self.lock:
            found = None
            if path in self.files:
                found = FileInfo(path, len(self.files[path]), self.modified[path], False)
        self._travel()
        return found

    def walk(self, path: str) -> list[FileInfo]:
        with self.lock:
            found = [
                FileInfo(name, len(data), self.modified[name], False)
                for name, data in sorted(self.files.items())
                if name.startswith(path.rstrip("/") + "/")
            ]
        self._travel()
        return found

    def list_directory(self, path: str) -> list[FileInfo]:
        return [info for info in self.walk(path) if posixpath.dirname(info.path) == path]

    def make_directory(self, path: str) -> None:
        assert posixpath.isabs(path)

    def delete(self, path: str, recursive: bool = False) -> bool:
        with self.lock:
            return self.files.pop(path, None) is not None

    def create_new(self, path: str) -> bool:
        with self.lock:
            if path in self.files:
                return False
            self._put(path, b"")
            self.created.append(path)
        self._travel()
        return True

    def rename_new(self, source: str, target: str) -> bool:
        with self.lock:
            if source not in self.files:
                raise HdfsFailure(f"no such file: {source}")
            if target in self.files:
                return False
            self._put(target, self.files.pop(source))
        self._travel()
        return True

    def touch(self, path: str, modified_ms: int) -> None:
        with self.lock:
            self._put(path, self.files[path])

    def read_bytes(self, path: str) -> bytes:
        with self.lock:
            return self.files[path]

    def write_bytes(self, path: str, data: bytes) -> None:
        self.put(path, data)

    def read_range(self, path: str, offset: int, length: int, web: bool = False) -> bytes:
        with self.lock:
            self.ranges.append((path, offset, length))
            data = self.files[path][offset : offset + length]
        if len(data) != length:
            raise HdfsFailure(f"{path} ends before {offset + length}")
        return data

    def read_chunks(self, path: str, web: bool = False) -> Iterator[bytes]:
        data = self.read_bytes(path)
        yield from (data[start : start + 997] for start in range(0, len(data), 997))

    def write_chunks(self, path: str, chunks: Iterable[bytes], web: bool = False) -> None:
        self.put(path, b"")
        for chunk in chunks:
            self.before_write(path, web)
            with self.lock:
                self._put(path, self.files[path] + chunk)
        self.written.append(path)


class Progress(RecordingProgress):
    """What preprocessing tells, without a thread."""

    def set_done(self, files: int) -> None:
        self.files = files


def idx(values: np.ndarray) -> bytes:
    """An IDX file of unsigned bytes."""
    header = struct.pack(">HBB", 0, 8, values.ndim)
    return header + struct.pack(f">{values.ndim}I", *values.shape) + values.tobytes()


def pictures(train: int, evaluation: int, side: int = 4) -> dict[str, np.ndarray]:
    """Random pictures and labels, by the names of their files."""
    chance = np.random.default_rng(train)
    values = {}
    for name, count in zip(NAMES, (train, train, evaluation, evaluation), strict=True):
        shape = (count, side, side) if "images" in name else (count,)
        values[name] = chance.integers(0, 256 if "images" in name else 10, shape, np.uint8)
    return values


def stage(store: FakeSharedHdfs, files: dict[str, bytes], directory: str = SOURCE) -> None:
    """A dataset as staging leaves it."""
    for name, data in files.items():
        store.put(f"{directory}/{name}", data)
    entries = [Entry(n, len(d), hashlib.sha256(d).hexdigest()) for n, d in files.items()]
    made = manifest.build("dataset", entries, name="Small", format="files")
    store.put(f"{directory}/{manifest.NAME}", made.to_json().encode())


def staged_idx(
    train: int = 50, evaluation: int = 12, packed: bool = False
) -> tuple[FakeSharedHdfs, dict[str, np.ndarray]]:
    """An HDFS with the four files, and what is in them."""
    store, values = FakeSharedHdfs(), pictures(train, evaluation)
    files = {name: idx(array) for name, array in values.items()}
    if packed:
        files = {f"{name}.gz": gzip.compress(data) for name, data in files.items()}
    stage(store, files)
    return store, values


def png(pixels: np.ndarray) -> bytes:
    """An image file with these pixels, uint8 [rows, columns, 3]."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def work(store: Any, options: Options, node: str = "n1", pace: Pace = QUICK) -> Work:
    """A node's work."""
    return Work(store, SOURCE, DESTINATION, options, node, pace)
