"""A directory of images per class → RGB examples of one size.

Two layouts: `<class>/<image>`, split by the seed; or `train|validation|eval/<class>/<image>`,
taken as it is (`test` counts as `eval`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from mayfly_train.convert.dataset import Dataset, Examples, Layout, Subset, shuffled
from mayfly_train.errors import BadInput

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif"})
DEFAULT_SIDE = 224
EVAL_FRACTION = 0.1
SPLIT_DIRECTORIES = {"train": "train", "validation": "validation", "eval": "eval", "test": "eval"}


@dataclass(frozen=True)
class ImageFiles:
    """Paths with labels; each image is read and resized when it is asked for."""

    items: tuple[tuple[Path, int], ...]
    side: int

    def __len__(self) -> int:
        return len(self.items)

    def example(self, index: int) -> tuple[bytes, int]:
        """The pixels (3, side, side) of an image and its label. Raises BadInput if unreadable."""
        path, label = self.items[index]
        return read_image(path, path, self.side).tobytes(), label


def read_image(file: Path | BinaryIO, name: object, side: int) -> NDArray[np.uint8]:
    """The pixels (3, side, side) of an image, resized. Raises BadInput that names a bad one."""
    try:
        with Image.open(file) as image:
            resized = image.convert("RGB").resize((side, side), Image.Resampling.BILINEAR)
    except (UnidentifiedImageError, OSError) as error:
        raise BadInput(f"cannot read the image {name}: {error} — remove or replace it") from None
    return np.asarray(resized, np.uint8).transpose(2, 0, 1)


def is_directory_of_images(path: Path) -> bool:
    """Whether this directory has class directories with images, with or without splits."""
    return path.is_dir() and any(_class_directories(root) for root in (path, *_split_roots(path)))


def load(
    path: Path,
    layout: Layout,
    side: int = DEFAULT_SIDE,
    class_names: tuple[str, ...] | None = None,
    name: str | None = None,
) -> Dataset:
    """The directory as a dataset; labels follow the order of `class_names`, by default sorted.

    Raises BadInput when there are no images, or a class that was not named.
    """
    if side < 1:
        raise BadInput(f"image size is {side} — it must be at least 1")
    roots = _split_roots(path)
    names = class_names or _class_names(list(roots) or [path])
    if roots:
        splits: dict[str, Examples] = {}
        for root, split in roots.items():
            items = _collect(root, names)
            splits[split] = ImageFiles(_mixed(items, layout.seed), side)
    else:
        splits = _split(ImageFiles(_collect(path, names), side), layout)
    if "train" not in splits:
        raise BadInput(f"no training images in {path} — make <class>/… or train/<class>/…")
    label = name or path.resolve().name
    return Dataset(label, (3, side, side), names, splits, source=f"{label} (image files)")


def _split(images: ImageFiles, layout: Layout) -> dict[str, Examples]:
    order = shuffled(len(images), layout.seed)
    held_out = max(1, round(len(order) * EVAL_FRACTION))
    validation = round(len(order) * layout.validation_fraction)
    parts = {
        "train": order[held_out + validation :],
        "validation": order[held_out : held_out + validation],
        "eval": order[:held_out],
    }
    return {split: Subset(images, part) for split, part in parts.items() if part}


def _mixed(items: tuple[tuple[Path, int], ...], seed: int) -> tuple[tuple[Path, int], ...]:
    return tuple(items[index] for index in shuffled(len(items), seed))


def _collect(root: Path, names: tuple[str, ...]) -> tuple[tuple[Path, int], ...]:
    found = _class_names([root])
    unknown = sorted(set(found) - set(names))
    if unknown:
        raise BadInput(
            f"class {unknown[0]!r} in {root} is not among {', '.join(names)} — name all classes"
        )
    items = [(path, names.index(label)) for label in found for path in _images(root / label)]
    if not items:
        raise BadInput(f"no images in {root} — it needs one directory of images per class")
    return tuple(items)


def _split_roots(path: Path) -> dict[Path, str]:
    if not path.is_dir():
        raise BadInput(f"not a directory: {path} — name the directory of images")
    candidates = ((path / name, split) for name, split in SPLIT_DIRECTORIES.items())
    return {root: split for root, split in candidates if root.is_dir() and _class_directories(root)}


def _class_names(roots: list[Path]) -> tuple[str, ...]:
    return tuple(sorted({item.name for root in roots for item in _class_directories(root)}))


def _class_directories(root: Path) -> list[Path]:
    return sorted(item for item in root.iterdir() if item.is_dir() and _images(item))


def _images(directory: Path) -> list[Path]:
    return sorted(item for item in directory.iterdir() if item.suffix.lower() in SUFFIXES)
