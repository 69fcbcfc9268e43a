"""hdfs:// for fsspec, and so for Lightning's checkpoints, on top of hdfs-native's own.

Two things are added that a checkpoint needs. A file appears whole or not at all: it is written
under another name and renamed; hdfs-native's has no transactions, on which Lightning insists. And a
write that fails because a DataNode has just died is tried again, until the NameNode knows of it.
"""

from __future__ import annotations

import contextlib
import io
import logging
import posixpath
import secrets
import time
from typing import Any

from hdfs_native import FileReader, WriteOptions
from hdfs_native import fsspec as native

# The NameNode of role hadoop takes 40 s to declare a DataNode dead.
PATIENCE_S, PAUSE_S = 90.0, 5.0
READ_BUFFER_BYTES = 8 << 20  # small reads from HDFS are several times slower
LOG = logging.getLogger(__name__)


class HdfsFileSystem(native.HdfsFileSystem):
    """hdfs-native's file system with whole files, and readers that torch.load takes."""

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        path = self._strip_protocol(path)
        if mode == "wb":
            return WholeFile(self.client, path, commits=options.get("autocommit", True))
        opened = super()._open(path, mode)
        return (
            io.BufferedReader(Reader(opened.inner), READ_BUFFER_BYTES) if mode == "rb" else opened
        )


class Reader(FileReader):
    """A reader that can fill a buffer, which io's and torch's readers ask of one."""

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer as far as the file goes; returns how many bytes."""
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a place, and return it, which hdfs-native's does not."""
        super().seek(offset, whence)
        return self.tell()


class WholeFile(io.BytesIO):
    """Content in memory, which goes to HDFS when it is complete: at `close`, or at `commit`."""

    def __init__(self, client: Any, path: str, commits: bool) -> None:
        super().__init__()
        self._client, self._path, self._commits = client, path, commits
        self._content: bytes | None = None

    def close(self) -> None:
        """Take no more; without a transaction, write the file."""
        if self.closed:
            return
        self._content = self.getvalue()
        super().close()
        if self._commits:
            self.commit()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """An error while writing leaves no file."""
        if kind is not None:
            self._commits = False
        self.close()

    def commit(self) -> None:
        """Write the file under another name and rename it. Raises what HDFS says in the end."""
        self.close()
        end = time.monotonic() + PATIENCE_S
        while True:
            try:
                self._write()
            except (OSError, RuntimeError) as error:
                if time.monotonic() > end:
                    raise
                cause = str(error).partition("\\n")[0].partition("\n")[0]
                LOG.warning("%s is written again in %.0f s: %s", self._path, PAUSE_S, cause)
                time.sleep(PAUSE_S)
            else:
                self._content = None
                return

    def discard(self) -> None:
        """Forget the content."""
        self._commits, self._content = False, None

    def _write(self) -> None:
        directory, name = posixpath.split(self._path)
        part = f"{directory}/{name}.{secrets.token_hex(4)}.part"
        options = WriteOptions(overwrite=True, create_parent=True)
        try:
            with self._client.create(part, options) as writer:
                writer.write(self._content or b"")
            self._client.rename(part, self._path, True)
        except BaseException:
            with contextlib.suppress(OSError, RuntimeError):
                self._client.delete(part, False)
            raise
