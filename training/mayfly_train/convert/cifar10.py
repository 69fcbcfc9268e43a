"""The official CIFAR-10 archive, cifar-10-binary.tar.gz.

Layout: https://www.cs.toronto.edu/~kriz/cifar.html: 3073 bytes per image, one label, then 1024
red, 1024 green and 1024 blue values in row order, which is the order that we store.
"""

from __future__ import annotations

import tarfile
import zlib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from mayfly_train.convert.dataset import Dataset, Layout, split_validation
from mayfly_train.errors import BadInput

SHAPE = (3, 32, 32)
TRAIN_FILES = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
TEST_FILE = "test_batch.bin"
NAMES_FILE = "batches.meta.txt"
_IMAGE_BYTES = 3 * 32 * 32
_RECORD_BYTES = 1 + _IMAGE_BYTES


@dataclass(frozen=True)
class Batch:
    """Images as they stand in the archive's files."""

    data: bytes

    def __len__(self) -> int:
        return len(self.data) // _RECORD_BYTES

    def example(self, index: int) -> tuple[bytes, int]:
        """The pixels of an image and its label."""
        start = index * _RECORD_BYTES
        return self.data[start + 1 : start + _RECORD_BYTES], self.data[start]


def is_source(path: Path) -> bool:
    """Whether this is the archive, or the directory that was unpacked from it."""
    if path.is_dir():
        return (path / TEST_FILE).is_file()
    if not path.is_file() or not tarfile.is_tarfile(path):
        return False
    try:
        with tarfile.open(path) as archive:
            return any(PurePosixPath(member.name).name == TEST_FILE for member in archive)
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        raise BadInput(f"cannot read {path}: {error} — download it again") from None


def load(path: Path, layout: Layout) -> Dataset:
    """The archive, packed or not, as a dataset; eval is its test batch.

    Raises BadInput when a file is missing or does not have the official layout.
    """
    wanted = {*TRAIN_FILES, TEST_FILE, NAMES_FILE}
    members = _read_members(path, wanted)
    missing = sorted(wanted - members.keys())
    if missing:
        raise BadInput(
            f"not the official CIFAR-10 binary archive: {path} lacks {', '.join(missing)} — "
            "download cifar-10-binary.tar.gz again"
        )
    class_names = tuple(members[NAMES_FILE].decode("ascii", "replace").split())
    for name in (*TRAIN_FILES, TEST_FILE):
        _check_batch(path, name, members[name], len(class_names))
    train = Batch(b"".join(members[name] for name in TRAIN_FILES))
    return Dataset(
        name="cifar-10",
        shape=SHAPE,
        class_names=class_names,
        splits={**split_validation(train, layout), "eval": Batch(members[TEST_FILE])},
        source=path.name,
    )


def _read_members(path: Path, wanted: set[str]) -> dict[str, bytes]:
    if path.is_dir():
        return {name: (path / name).read_bytes() for name in wanted if (path / name).is_file()}
    members = {}
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                name = PurePosixPath(member.name).name
                stream = archive.extractfile(member) if name in wanted else None
                if stream is not None:
                    members[name] = stream.read()
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        raise BadInput(f"cannot read {path}: {error} — download it again") from None
    return members


def _check_batch(path: Path, name: str, data: bytes, classes: int) -> None:
    if not data or len(data) % _RECORD_BYTES:
        raise BadInput(
            f"{name} in {path} has {len(data)} bytes, not a multiple of {_RECORD_BYTES} — "
            "download the archive again"
        )
    highest = max(data[::_RECORD_BYTES])
    if highest >= classes:
        raise BadInput(
            f"{name} in {path} has label {highest} of {classes} classes — download again"
        )
