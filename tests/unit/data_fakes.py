"""Stand-ins for unit tests of staging and export."""

from __future__ import annotations

import posixpath
import struct
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from mayfly_train.hdfs import FileInfo, HdfsFailure


class FakeHdfs:
    """HDFS in a dictionary. A write that breaks leaves its part, as the real one does."""

    def __init__(self, files: dict[str, bytes] | None = None) -> None:
        self.files = dict(files or {})
        self.failing_writes: Callable[[str, bool], int | None] = lambda path, web: None
        self.free = 1 << 40
        self.writes: list[tuple[str, bool]] = []

    def status(self, path: str) -> FileInfo | None:
        if path in self.files:
            return FileInfo(path, len(self.files[path]), 1, False)
        return None

    def walk(self, path: str) -> list[FileInfo]:
        return [
            FileInfo(name, len(data), len(name), False)
            for name, data in sorted(self.files.items())
            if name.startswith(path.rstrip("/") + "/")
        ]

    def make_directory(self, path: str) -> None:
        assert posixpath.isabs(path)

    def most_free_bytes(self) -> int:
        return self.free

    def delete(self, path: str, recursive: bool = False) -> bool:
        return self.files.pop(path, None) is not None

    def rename(self, source: str, target: str) -> None:
        self.files[target] = self.files.pop(source)

    def read_bytes(self, path: str) -> bytes:
        return self.files[path]

    def read_chunks(self, path: str, web: bool = False) -> Iterator[bytes]:
        data = self.files[path]
        yield from (data[start : start + 7] for start in range(0, len(data), 7))

    def write_bytes(self, path: str, data: bytes) -> None:
        self.files[path] = data

    def write_chunks(self, path: str, chunks: Iterable[bytes], web: bool = False) -> None:
        self.writes.append((path, web))
        limit = self.failing_writes(path, web)
        self.files[path] = b""
        for chunk in chunks:
            self.files[path] += chunk
            if limit is not None and len(self.files[path]) > limit:
                self.files[path] = self.files[path][:limit]
                raise HdfsFailure(f"a DataNode died while {path} was written")


class RecordingProgress:
    """What staging tells a StagingProgress, without a thread."""

    def __init__(self) -> None:
        self.total: tuple[int, int] | None = None
        self.bytes = 0
        self.files = 0

    def set_total(self, files: int, size: int) -> None:
        self.total = (files, size)

    def add(self, size: int, files: int = 0) -> None:
        self.bytes += size
        self.files += files


def record_of(data: bytes) -> bytes:
    """A file with one TFRecord, 16 bytes longer than the data; its checksums are left out."""
    return struct.pack("<QI", len(data), 0) + data + struct.pack("<I", 0)


def make_bucket(client: Any, name: str, objects: dict[str, bytes]) -> None:
    """A bucket with these objects."""
    client.create_bucket(Bucket=name)
    for key, data in objects.items():
        client.put_object(Bucket=name, Key=key, Body=data)
