"""IDX files in HDFS, read by ranges: each shard reads only its own pictures and labels.

A gzipped file has no ranges, so each node unpacks it once, to a temporary file of its own.
"""

from __future__ import annotations

import gzip
import math
import posixpath
import shutil
import struct
import tempfile
import zlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import IO, Protocol

import numpy as np

from mayfly_train.convert.idx import DIGITS, PARTS, UNSIGNED_BYTE, spellings
from mayfly_train.errors import BadInput
from mayfly_train.preprocess.encode import Batch, Shape
from mayfly_train.preprocess.store import Store

BATCH_BYTES = 4 << 20
_IMAGE_DIMENSIONS = 3


class Ranges(Protocol):
    """Bytes of a file by their place."""

    def read(self, offset: int, length: int, web: bool) -> bytes: ...


@dataclass(frozen=True)
class Stored:
    """A plain file in HDFS."""

    store: Store
    path: str

    def read(self, offset: int, length: int, web: bool) -> bytes:
        """Those bytes. Raises HdfsFailure when the file ends before."""
        return self.store.read_range(self.path, offset, length, web)


@dataclass(frozen=True)
class Unpacked:
    """The content of a gzipped file, in a temporary file of this node."""

    file: IO[bytes]
    path: str

    def read(self, offset: int, length: int, web: bool) -> bytes:  # noqa: ARG002 (it is here)
        """Those bytes. Raises BadInput when the content ends before."""
        self.file.seek(offset)
        data = self.file.read(length)
        if len(data) != length:
            raise BadInput(f"{self.path} ends after {offset + len(data)} bytes — put it again")
        return data


@dataclass(frozen=True)
class IdxFile:
    """One file: where its values begin, and their shape."""

    ranges: Ranges
    start: int
    shape: tuple[int, ...]

    def items(self, start: int, stop: int, web: bool) -> bytes:
        """The values of the items from `start` to `stop` of the first dimension."""
        size = math.prod(self.shape[1:])
        return self.ranges.read(self.start + start * size, (stop - start) * size, web)


@dataclass(frozen=True)
class IdxSource:
    """Images and labels of each split; `train` from the training files, `eval` from t10k."""

    files: dict[str, tuple[IdxFile, IdxFile]]
    class_names: tuple[str, ...] | None = None

    @property
    def counts(self) -> dict[str, int]:
        """Split → examples."""
        return {split: images.shape[0] for split, (images, _) in self.files.items()}

    @property
    def shape(self) -> Shape:
        """Of one image: (1, rows, columns)."""
        rows, columns = self.files["train"][0].shape[1:]
        return 1, rows, columns

    def batches(self, split: str, start: int, stop: int, web: bool) -> Iterator[Batch]:
        """The examples of a range, some MB at a time."""
        images, labels = self.files[split]
        step = max(1, BATCH_BYTES // math.prod(self.shape))
        for first in range(start, stop, step):
            last = min(first + step, stop)
            pixels = np.frombuffer(images.items(first, last, web), np.uint8)
            values = np.frombuffer(labels.items(first, last, web), np.uint8)
            yield pixels.reshape(last - first, *self.shape), values.astype(np.int64)


def is_idx(names: Collection[str]) -> bool:
    """Whether these files (relative names) have the four of MNIST's format among them."""
    return all(_spelled(names, name) for pair in PARTS.values() for name in pair)


def open_idx(store: Store, directory: str, names: Collection[str]) -> IdxSource:
    """The four files in a directory. Raises BadInput when they are not what their names say."""
    files = {}
    for split, pair in PARTS.items():
        images, labels = (
            _open(store, posixpath.join(directory, _spelled(names, name))) for name in pair
        )
        if len(images.shape) != _IMAGE_DIMENSIONS or labels.shape != images.shape[:1]:
            raise BadInput(
                f"images {images.shape} and labels {labels.shape} of {split} in {directory} do "
                "not fit — download them again"
            )
        files[split] = (images, labels)
    train, evaluation = (files[split][0].shape for split in ("train", "eval"))
    if train[1:] != evaluation[1:]:
        raise BadInput(f"images of {train[1:]} to train and {evaluation[1:]} to test — get one set")
    if not train[0]:
        raise BadInput(f"no training images in {directory} — download them again")
    return IdxSource(files)


def class_names(classes: int) -> tuple[str, ...]:
    """Names for labels from 0 on: IDX files have none."""
    return tuple(str(label) for label in range(max(classes, len(DIGITS))))


def _spelled(names: Collection[str], name: str) -> str:
    return next((spelling for spelling in spellings(name) if spelling in names), "")


def _open(store: Store, path: str) -> IdxFile:
    ranges: Ranges = _unpack(store, path) if path.endswith(".gz") else Stored(store, path)
    zero, kind, dimensions = struct.unpack(">HBB", ranges.read(0, 4, False))
    if zero != 0 or kind != UNSIGNED_BYTE or not dimensions:
        raise BadInput(f"not an IDX file of unsigned bytes: {path} — download it again")
    shape = struct.unpack(f">{dimensions}I", ranges.read(4, 4 * dimensions, False))
    return IdxFile(ranges, 4 + 4 * dimensions, shape)


def _unpack(store: Store, path: str) -> Unpacked:
    content = tempfile.TemporaryFile()  # noqa: SIM115 (kept until the process ends)
    with tempfile.TemporaryFile() as packed:
        for chunk in store.read_chunks(path):
            packed.write(chunk)
        packed.seek(0)
        try:
            with gzip.GzipFile(fileobj=packed) as stream:
                shutil.copyfileobj(stream, content, 1 << 20)
        except (OSError, EOFError, zlib.error) as error:
            raise BadInput(f"cannot unpack {path}: {error} — download it again") from None
    return Unpacked(content, path)
