"""Directories for attempts on a node, used again and again: making and removing them is slow.

A slot holds the copy of the source, inputs, the output and both streams of one attempt at a time.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

from mayfly_train.recipe import identity

RECORD_BYTES = 128


class Slot:
    """One such directory. What an attempt leaves is gone before the next."""

    def __init__(self, number: int, path: Path) -> None:
        self.number, self.path = number, path
        self.source, self.output, self.inputs = path / "source", path / "output", path / "inputs"
        self.stdout, self.stderr = path / "stdout", path / "stderr"
        remove(path)
        path.mkdir(parents=True)

    def clear(self, keep_source: bool) -> None:
        """Empty output and, unless nothing will be copied there, no source directory."""
        remove(self.inputs)
        _empty(self.output)
        if keep_source:
            _empty(self.source)
        else:
            remove(self.source)

    def drop(self) -> None:
        """Remove all that an attempt has left."""
        for path in (self.inputs, self.output, self.source, self.stdout, self.stderr):
            with contextlib.suppress(OSError):
                remove(path)


class Slots:
    """The slots of one worker."""

    def __init__(self, directory: Path, worker: str) -> None:
        self._directory, self._worker = directory, worker
        self._free: list[Slot] = []
        self._made = 0
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def one(self) -> Iterator[Slot]:
        """A slot that nobody else has meanwhile."""
        with self._lock:
            if not self._free:
                path = self._directory / f"{self._worker}.{self._made}"
                self._free.append(Slot(self._made, path))
                self._made += 1
            slot = self._free.pop()
        try:
            yield slot
        finally:
            with self._lock:
                self._free.append(slot)

    def drop(self) -> None:
        """Remove all that is left in slots which nobody has now."""
        with self._lock:
            for slot in self._free:
                slot.drop()


class Records:
    """A file that names the process group in each slot, for whoever cleans up after this worker."""

    def __init__(self, path: Path, header: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_CREAT | os.O_RDWR | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        os.write(self._file, _padded(header))

    def note(self, slot: int, group: int, attempt: str) -> None:
        """Record that this group runs in a slot; it stays until the next one there."""
        os.pwrite(self._file, _padded(f"{group} {attempt}"), RECORD_BYTES * (slot + 1))


def read_records(path: Path) -> tuple[str, list[tuple[int, str]]]:
    """The header, and group and attempt of each slot. Raises ValueError for a torn file."""
    header, *rest = path.read_text().replace("\0", "").splitlines()
    found = (line.split() for line in rest if line.strip())
    return header.strip(), [(int(group), attempt) for group, attempt in found]


def _padded(text: str) -> bytes:
    return f"{text:<{RECORD_BYTES - 1}}\n".encode()


@contextlib.contextmanager
def whole(kept: Path) -> Iterator[Path]:
    """A new directory that becomes `kept` at the end, unless another was quicker; an error leaves
    nothing of it, for it may be a full disk's. Its name says whose it is."""
    pid = os.getpid()
    own = f"{pid}-{identity.start_time(pid)}-{threading.get_ident()}"
    new = kept.with_name(f".{kept.name}.{own}")
    try:
        new.mkdir(parents=True)
        yield new
        try:
            new.rename(kept)
        except OSError:
            if not kept.exists():
                raise
    finally:
        with contextlib.suppress(OSError):
            remove(new)


def is_left(path: Path) -> bool:
    """Whether a directory of `whole` is of a process that has ended."""
    try:
        pid, started, _ = map(int, path.name.rpartition(".")[2].split("-"))
    except ValueError:
        return False
    return identity.start_time(pid) != started


def remove(path: Path) -> None:
    """Remove whatever a task has left there: a link and not what it leads to, and directories that
    nobody may write into."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    try:
        shutil.rmtree(path)
    except PermissionError:
        path.chmod(0o700)
        for folder, folders, _ in os.walk(path):
            for name in folders:
                below = Path(folder, name)
                if not below.is_symlink():
                    below.chmod(0o700)
        shutil.rmtree(path)


def _empty(directory: Path) -> None:
    """Make sure that a directory is there, a true one, and empty."""
    with contextlib.suppress(OSError):
        if not directory.is_symlink():
            with os.scandir(directory) as entries:
                if next(entries, None) is None:
                    return
    remove(directory)
    directory.mkdir()
