"""HDFS: a small client over WebHDFS, with hdfs-native as the fast path for long streams.

WebHDFS goes on when a DataNode has just died, hdfs-native is two to three times faster; so
streams start native, and callers ask for WebHDFS when a native one has failed.
"""

from __future__ import annotations

import json
import os
import posixpath
import re
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

import hdfs_native
import requests
from hdfs import InsecureClient
from hdfs.util import HdfsError

from mayfly_train.errors import BadInput, NodeError

CHUNK_BYTES = 4 << 20
BLOCK_BYTES = 128 << 20  # dfs.blocksize, of which each file that is open reserves one
PART_SUFFIX = ".part"
_QUOTA = re.compile(r"QuotaExceeded|quota of .* is exceeded", re.IGNORECASE)


class HdfsFailure(NodeError):
    """HDFS did not do what was asked."""


class HdfsFull(BadInput, HdfsFailure):
    """HDFS has no room, which waiting does not change."""


@dataclass(frozen=True)
class FileInfo:
    """One file or directory: absolute path, size in bytes, time of change in ms since 1970."""

    path: str
    size: int
    modified_ms: int
    is_directory: bool


class Hdfs:
    """A client for one NameNode, acting as `user` (HDFS' simple authentication)."""

    def __init__(self, rpc_url: str, http_url: str, user: str = "mayfly", timeout_s: int = 60):
        # hdfs-native has no user parameter: it reads this variable when a client is made.
        os.environ["HADOOP_USER_NAME"] = user
        self.rpc_url = rpc_url.rstrip("/")
        self.http_url = http_url.rstrip("/")
        self._timeout_s = timeout_s
        self.web = InsecureClient(self.http_url, user=user, timeout=timeout_s)
        self.native = hdfs_native.Client(self.rpc_url)

    def status(self, path: str) -> FileInfo | None:
        """What stands at this path, None when nothing does."""
        with clear_errors(self.http_url, path):
            found = self.web.status(path, strict=False)
        return _info(path, found) if found else None

    def list_directory(self, path: str) -> list[FileInfo]:
        """What a directory holds, sorted by path; empty when there is no such directory."""
        if self.status(path) is None:
            return []
        with clear_errors(self.http_url, path):
            found = self.web.list(path, status=True)
        return sorted(
            (_info(posixpath.join(path, name), status) for name, status in found),
            key=lambda info: info.path,
        )

    def walk(self, path: str) -> list[FileInfo]:
        """Every file below a directory, at any depth, sorted by path."""
        files = []
        for info in self.list_directory(path):
            files.extend(self.walk(info.path) if info.is_directory else [info])
        return files

    def make_directory(self, path: str) -> None:
        """Make a directory and those above it; nothing happens when it is there."""
        with clear_errors(self.http_url, path):
            self.web.makedirs(path)

    def delete(self, path: str, recursive: bool = False) -> bool:
        """Delete a file or directory; False when there was none."""
        with clear_errors(self.http_url, path):
            return bool(self.web.delete(path, recursive=recursive))

    def most_free_bytes(self) -> int:
        """The room on the live DataNode that has most of it, as the NameNode knows it."""
        query = f"{self.http_url}/jmx?qry=Hadoop:service=NameNode,name=NameNodeInfo"
        with clear_errors(self.http_url, "/jmx"):
            answer = requests.get(query, timeout=self._timeout_s)
            answer.raise_for_status()
            nodes = json.loads(answer.json()["beans"][0]["LiveNodes"])
        return max((int(node["remaining"]) for node in nodes.values()), default=0)

    def rename(self, source: str, target: str) -> None:
        """Move a file in one step; a file that stands at the target is replaced."""
        with clear_errors(self.rpc_url, source):
            self.native.rename(source, target, True)

    def rename_new(self, source: str, target: str) -> bool:
        """Move a file in one step to a name that is free; False when something has that name.

        Of several that try at once the NameNode lets one win.
        """
        try:
            with clear_errors(self.rpc_url, source):
                self.native.rename(source, target, False)
        except HdfsFailure:
            if self.status(target) is None:
                raise
            return self.status(source) is None  # it was done, and only the answer was lost
        return True

    def create_new(self, path: str) -> bool:
        """Make an empty file under a name that is free; False when something has that name.

        Of several that try at once the NameNode lets one win; no DataNode is needed for it.
        """
        options = hdfs_native.WriteOptions(overwrite=False, create_parent=True)
        try:
            with clear_errors(self.rpc_url, path):
                self.native.create(path, options).close()
        except HdfsFailure:
            # The NameNode has several errors for this; what stands there tells for sure.
            if self.status(path) is None:
                raise
            return False
        return True

    def touch(self, path: str, modified_ms: int) -> None:
        """Set the time of change of a file that is there, in ms since 1970."""
        with clear_errors(self.http_url, path):
            self.web.set_times(path, modification_time=modified_ms)

    def read_range(self, path: str, offset: int, length: int, web: bool = False) -> bytes:
        """`length` bytes from `offset` on, natively, or through WebHDFS when asked.

        Raises HdfsFailure when the file ends before.
        """
        with clear_errors(self.http_url if web else self.rpc_url, path):
            if web:
                with self.web.read(path, offset=offset, length=length) as reader:
                    data = bytes(reader.read())
            else:
                data = bytes(self.native.read(path).read_range(offset, length))
        if len(data) != length:
            raise HdfsFailure(
                f"HDFS has {len(data)} of {length} bytes at {offset} of {path} — stage it again"
            )
        return data

    def read_bytes(self, path: str) -> bytes:
        """The content of a small file."""
        with clear_errors(self.http_url, path), self.web.read(path) as reader:
            return bytes(reader.read())

    def write_bytes(self, path: str, data: bytes) -> None:
        """Put a small file in one step: readers see the old content or the new, never a part."""
        part = f"{path}.{uuid.uuid4().hex[:8]}{PART_SUFFIX}"
        with clear_errors(self.http_url, path):
            self.web.write(part, data=data, overwrite=True)
        self.rename(part, path)

    def read_chunks(self, path: str, web: bool = False) -> Iterator[bytes]:
        """The content of a file in pieces, natively, or through WebHDFS when asked."""
        with clear_errors(self.http_url if web else self.rpc_url, path):
            if web:
                with self.web.read(path, chunk_size=CHUNK_BYTES) as chunks:
                    yield from chunks
            else:
                reader = self.native.read(path)
                yield from reader.read_range_stream(0, len(reader))

    def write_chunks(self, path: str, chunks: Iterable[bytes], web: bool = False) -> None:
        """Write a file from pieces, natively, or through WebHDFS when asked.

        After an error a part of the file may stand at the path: write to a temporary name.
        Errors of `chunks` itself are passed on as they are.
        """
        source = _Guarded(chunks)
        try:
            if web:
                self._write_web(path, source)
            else:
                self._write_native(path, source)
        except Exception:
            if source.error is not None:
                raise source.error from None
            raise

    def _write_web(self, path: str, chunks: Iterable[bytes]) -> None:
        with clear_errors(self.http_url, path):
            self.web.write(path, data=chunks, overwrite=True)

    def _write_native(self, path: str, chunks: Iterable[bytes]) -> None:
        options = hdfs_native.WriteOptions(overwrite=True, create_parent=True)
        with clear_errors(self.rpc_url, path):
            writer = self.native.create(path, options)
            for chunk in chunks:
                writer.write(chunk)
            writer.close()


class _Guarded:
    """An iterable that remembers the error that its source raised.

    HTTP libraries wrap errors of a request body; the caller wants the body's own error.
    """

    def __init__(self, chunks: Iterable[bytes]):
        self._chunks = chunks
        self.error: Exception | None = None

    def __iter__(self) -> Iterator[bytes]:
        try:
            yield from self._chunks
        except Exception as error:
            self.error = error
            raise


def split_url(url: str) -> tuple[str, str]:
    """The NameNode's address and the path in `hdfs://host:port/path`."""
    parts = urlsplit(url)
    if parts.scheme != "hdfs" or not parts.netloc or not parts.path:
        raise HdfsFailure(f"not an HDFS address: {url!r} — write hdfs://host:port/path")
    return f"hdfs://{parts.netloc}", posixpath.normpath(parts.path)


@contextmanager
def clear_errors(server: str, path: str) -> Iterator[None]:
    """Turn what the two libraries raise into one HdfsFailure of one line."""
    try:
        yield
    except NodeError:
        raise
    except requests.ConnectionError as error:
        raise HdfsFailure(f"cannot reach HDFS at {server} for {path} — is it running?") from error
    except (HdfsError, requests.RequestException, OSError, RuntimeError) as error:
        first_line = str(error).strip().partition("\n")[0][:300]
        reason = first_line or type(error).__name__
        if _QUOTA.search(str(error)):
            raise HdfsFull(
                f"HDFS is full: the quota for {path} is used up — raise the quota or delete files"
            ) from error
        raise HdfsFailure(f"HDFS at {server} failed for {path}: {reason}") from error


def _info(path: str, status: dict[str, object]) -> FileInfo:
    return FileInfo(
        path=path,
        size=int(str(status["length"])),
        modified_ms=int(str(status["modificationTime"])),
        is_directory=status["type"] == "DIRECTORY",
    )
