"""Where a run's checkpoints and model are: in HDFS, or a path that all nodes have mounted.

Whoever reads them asks here once, and then needs not know which of the two it is.
"""

from __future__ import annotations

import os
import posixpath
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mayfly_train import hdfs
from mayfly_train.cluster import Cluster
from mayfly_train.errors import NodeError
from mayfly_train.hdfs import FileInfo
from mayfly_train.model_files import Reader

CHUNK_BYTES = 4 << 20


def open_model_dir(cluster: Cluster) -> tuple[Reader, str]:
    """What reads the run's model directory, and the directory's path for it.

    Asks no server. Raises NodeError when the directory is neither an hdfs:// address nor a path.
    """
    if cluster.model_dir.startswith("/"):
        return Mounted(), posixpath.normpath(cluster.model_dir)
    _, path = hdfs.split_url(cluster.model_dir)
    return hdfs.Hdfs(cluster.namenode_rpc, cluster.namenode_http), path


class Mounted:
    """Files of this machine's file tree, read as `hdfs.Hdfs` reads its own."""

    def walk(self, path: str) -> list[FileInfo]:
        """Every file below a directory, sorted by path; empty when there is no such directory."""
        with clear_errors(path):
            return sorted(_files(path), key=lambda info: info.path)

    def read_bytes(self, path: str) -> bytes:
        """The content of a small file."""
        with clear_errors(path):
            return Path(path).read_bytes()

    def read_chunks(self, path: str, web: bool = False) -> Iterator[bytes]:
        """The content of a file in pieces; there is only one way, so `web` changes nothing."""
        del web
        with clear_errors(path), Path(path).open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                yield chunk


@contextmanager
def clear_errors(path: str) -> Iterator[None]:
    """Turn what the file system says into a NodeError of one line."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise NodeError(
            f"cannot read {path}: {reason} — is it mounted? See journalctl -u mayfly-store"
        ) from error


def _files(directory: str) -> Iterator[FileInfo]:
    for folder, _, names in os.walk(directory, onerror=_raise_unless_absent):
        for name in names:
            path = posixpath.join(folder, name)
            with suppress(FileNotFoundError):  # a link to nothing, or a file that has just gone
                found = Path(path).stat()
                if stat.S_ISREG(found.st_mode):
                    yield FileInfo(path, found.st_size, found.st_mtime_ns // 1_000_000, False)


def _raise_unless_absent(error: OSError) -> None:
    """`os.walk` passes errors over by itself; one of a file system that is gone must be told."""
    if not isinstance(error, FileNotFoundError):
        raise error
