"""The recipe's source directory: packed once by its content, and a fresh copy for each task."""

from __future__ import annotations

import fcntl
import hashlib
import io
import os
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mayfly_train.errors import BadInput, NodeError
from mayfly_train.recipe import slots
from mayfly_train.recipe.store import Store

LIMIT_BYTES = 200 << 20
_AS_PACKED: dict[str, Any] = (
    {"filter": "fully_trusted"} if hasattr(tarfile, "fully_trusted_filter") else {}
)
SKIPPED = frozenset({".git", ".venv", "__pycache__", ".mayfly", ".ruff_cache", ".mypy_cache"})


def pack(directory: Path) -> tuple[str, bytes]:
    """A tarball of a directory, and the SHA-256 of its content: the same files, the same name.

    Times, owners and what tools leave behind do not count. Raises BadInput for what is too large.
    """
    packed, size = io.BytesIO(), 0
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path, name in _files(directory):
            entry = archive.gettarinfo(str(path), name)
            entry.mtime, entry.uid, entry.gid, entry.uname, entry.gname = 0, 0, 0, "", ""
            entry.mode = 0o755 if entry.mode & 0o100 else 0o644
            size += entry.size
            if size > LIMIT_BYTES:
                mib = LIMIT_BYTES >> 20
                raise BadInput(
                    f"{directory} has over {mib} MiB, and each task gets a copy — move data "
                    "elsewhere, or name a smaller directory as source"
                )
            if path.is_symlink() or not path.is_file():
                archive.addfile(entry)
            else:
                with path.open("rb") as stream:
                    archive.addfile(entry, stream)
    data = packed.getvalue()
    return hashlib.sha256(data).hexdigest(), data


def _files(directory: Path) -> Iterator[tuple[Path, str]]:
    for folder, folders, names in os.walk(directory):
        folders[:] = sorted(set(folders) - SKIPPED)
        links = [name for name in folders if (Path(folder) / name).is_symlink()]
        for name in sorted([*names, *links]):
            path = Path(folder) / name
            if path.is_symlink() or path.is_file():
                yield path, path.relative_to(directory).as_posix()


def put(directory: Path | None, store: Store) -> str:
    """Put a packed directory into the store, unless it is there; its digest, empty for none."""
    if directory is None:
        return ""
    digest, data = pack(directory)
    store.create(object_name(digest), data)
    return digest


def object_name(digest: str) -> str:
    """Where a packed source lies."""
    return f"source/{digest}.tar"


def copy(digest: str, target: Path, cache: Path, store: Store) -> None:
    """A fresh copy of a source as `target`, which is not there yet, from this node's cache.

    Raises NodeError when it cannot be had.
    """
    shutil.copytree(unpacked(digest, cache, store), target, symlinks=True)


def unpacked(digest: str, cache: Path, store: Store) -> Path:
    """A source in this node's cache, for reading only. Raises NodeError when it cannot be had."""
    kept = cache / digest
    if kept.exists():
        return kept
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            data = store.read(object_name(digest))
            if data is None or hashlib.sha256(data).hexdigest() != digest:
                raise NodeError(f"{store.address}/{object_name(digest)} is missing or damaged")
            for path in cache.glob(".*.*"):  # whoever has begun it had the lock, and was killed
                shutil.rmtree(path, ignore_errors=True)
            with slots.whole(kept) as new, tarfile.open(fileobj=io.BytesIO(data)) as archive:
                # Our own archive, its digest is checked: links in it lead where the user wants.
                archive.extractall(new, **_AS_PACKED)
    return kept
