"""IDX files as MNIST and Fashion-MNIST are published, plain or gzipped.

Layout: big-endian magic 0x0000 08 dd (unsigned bytes, dd dimensions), the dimensions, the data;
https://web.archive.org/web/20211125025603/http://yann.lecun.com/exdb/mnist/
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mayfly_train.convert.dataset import Dataset, Layout, split_validation
from mayfly_train.errors import BadInput

PARTS = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "eval": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
UNSIGNED_BYTE = 0x08
_PADDED_SIDE = 32
DIGITS = tuple("0123456789")


@dataclass(frozen=True)
class Images:
    """Grey images (n, rows, columns) and their labels; `padded` makes 3×32×32 of each."""

    pixels: NDArray[np.uint8]
    labels: NDArray[np.uint8]
    padded: bool

    def __len__(self) -> int:
        return len(self.labels)

    def example(self, index: int) -> tuple[bytes, int]:
        """The pixels of an image, (1, rows, columns) or (3, 32, 32), and its label."""
        image = self.pixels[index]
        if self.padded:
            image = np.broadcast_to(_pad(image), (3, _PADDED_SIDE, _PADDED_SIDE))
        return image.tobytes(), int(self.labels[index])


def spellings(name: str) -> tuple[str, ...]:
    """The names under which one of the four files is found.

    Some mirrors write a dot for the second dash: train-images.idx3-ubyte.
    """
    stems = (name, name.replace("-idx", ".idx"))
    return tuple(f"{stem}{suffix}" for stem in stems for suffix in ("", ".gz"))


def is_directory_of_idx(path: Path) -> bool:
    """Whether this directory holds the four files, plain or gzipped."""
    names = [name for pair in PARTS.values() for name in pair]
    return path.is_dir() and all(_find(path, name) is not None for name in names)


def load(
    path: Path,
    layout: Layout,
    name: str | None = None,
    padded: bool = False,
    class_names: tuple[str, ...] = DIGITS,
) -> Dataset:
    """The directory as a dataset: train and validation from the training files, eval from t10k.

    `padded` puts zeros around each image up to 32×32 and repeats it in three channels, so that
    what was written for CIFAR-10's shape can use it. The name defaults to the directory's: the
    files do not say whether they are MNIST or something else in its format. Raises BadInput when
    a file is missing or does not have the layout.
    """
    train = _read_images(path, "train", padded, len(class_names))
    evaluation = _read_images(path, "eval", padded, len(class_names))
    rows, columns = train.pixels.shape[1:]
    return Dataset(
        name=name or path.resolve().name,
        shape=(3, _PADDED_SIDE, _PADDED_SIDE) if padded else (1, rows, columns),
        class_names=class_names,
        splits={**split_validation(train, layout), "eval": evaluation},
        source=f"{name or path.resolve().name} (IDX files)",
    )


def read_array(path: Path) -> NDArray[np.uint8]:
    """The array in one IDX file of unsigned bytes. Raises BadInput when it is something else."""
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        zero, kind, dimensions = struct.unpack_from(">HBB", data)
        shape = struct.unpack_from(f">{dimensions}I", data, 4)
    except (OSError, EOFError, zlib.error, struct.error) as error:
        raise BadInput(f"cannot read {path}: {error} — download it again") from None
    if zero != 0 or kind != UNSIGNED_BYTE:
        raise BadInput(f"not an IDX file of unsigned bytes: {path} — download it again")
    start = 4 + 4 * dimensions
    if len(data) - start != math.prod(shape):
        raise BadInput(
            f"{path} holds {len(data) - start} values, its header says {math.prod(shape)} — "
            "download it again"
        )
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape)


def _read_images(path: Path, split: str, padded: bool, classes: int) -> Images:
    pixels, labels = (read_array(_require(path, name)) for name in PARTS[split])
    if pixels.ndim != 3 or labels.shape != pixels.shape[:1]:  # noqa: PLR2004
        raise BadInput(
            f"images {pixels.shape} and labels {labels.shape} of {split} in {path} do not fit — "
            "download them again"
        )
    if len(labels) and int(labels.max()) >= classes:
        raise BadInput(
            f"label {int(labels.max())} in {path}, but {classes} classes — name them all"
        )
    if padded and max(pixels.shape[1:]) > _PADDED_SIDE:
        raise BadInput(f"images of {pixels.shape[1:]} in {path} do not fit 32×32 — do not pad them")
    return Images(pixels, labels, padded)


def _pad(image: NDArray[np.uint8]) -> NDArray[np.uint8]:
    missing = [_PADDED_SIDE - side for side in image.shape]
    return np.pad(image, [(side // 2, side - side // 2) for side in missing])


def _find(path: Path, name: str) -> Path | None:
    candidates = (path / spelling for spelling in spellings(name))
    return next((candidate for candidate in candidates if candidate.is_file()), None)


def _require(path: Path, name: str) -> Path:
    found = _find(path, name)
    if found is None:
        raise BadInput(f"no {name} (or .gz) in {path} — name the directory with all four files")
    return found
