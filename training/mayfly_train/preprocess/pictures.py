"""A directory of images per class in HDFS; each shard reads its own files.

Two layouts: `<class>/<image>`, a tenth of which becomes the split `eval`; or
`train|validation|eval/<class>/<image>`, taken as it is (`test` counts as `eval`).
"""

from __future__ import annotations

import io
import math
import posixpath
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mayfly_train.convert.dataset import shuffled
from mayfly_train.convert.images import (
    EVAL_FRACTION,
    SPLIT_DIRECTORIES,
    SUFFIXES,
    read_image,
)
from mayfly_train.errors import BadInput
from mayfly_train.preprocess.encode import Batch, Shape
from mayfly_train.preprocess.idx import BATCH_BYTES
from mayfly_train.preprocess.store import Store

# Each image waits for HDFS and is then decoded, both without holding up the other threads.
PARALLEL = 8
# Classes must be mixed within a shard; all nodes have to find the same order.
SEED = 0
_WITH_SPLIT = 3
_WITHOUT_SPLIT = 2
Items = tuple[tuple[str, int], ...]  # relative path and label of each image


@dataclass(frozen=True)
class ImageSource:
    """Images of each split in a fixed order, resized to `side` pixels when they are read."""

    store: Store
    directory: str
    items: Mapping[str, Items]
    class_names: tuple[str, ...] | None
    side: int

    @property
    def counts(self) -> dict[str, int]:
        """Split → examples."""
        return {split: len(items) for split, items in self.items.items()}

    @property
    def shape(self) -> Shape:
        """Of one image: (3, side, side)."""
        return 3, self.side, self.side

    def batches(self, split: str, start: int, stop: int, web: bool) -> Iterator[Batch]:
        """The examples of a range, some MB at a time. Raises BadInput for an unreadable image."""
        step = max(1, BATCH_BYTES // math.prod(self.shape))

        def read(item: tuple[str, int]) -> NDArray[np.uint8]:
            path = posixpath.join(self.directory, item[0])
            data = b"".join(self.store.read_chunks(path, web))
            return read_image(io.BytesIO(data), path, self.side)

        with ThreadPoolExecutor(PARALLEL) as pool:
            for first in range(start, stop, step):
                items = self.items[split][first : min(first + step, stop)]
                images = np.stack(list(pool.map(read, items)))
                yield images, np.array([label for _, label in items], np.int64)


def has_images(names: Collection[str]) -> bool:
    """Whether these files (relative names) are images in directories of their class."""
    return any(_class_of(name) for name in names)


def open_images(store: Store, directory: str, names: Collection[str], side: int) -> ImageSource:
    """The images in a directory. Raises BadInput when none is there to train on."""
    class_names, items = layout(names)
    if not items.get("train"):
        raise BadInput(f"no training images in {directory} — make <class>/… or train/<class>/…")
    return ImageSource(store, directory, items, class_names, side)


def layout(names: Collection[str]) -> tuple[tuple[str, ...], dict[str, Items]]:
    """The classes, sorted, and the items of each split, from relative paths; labels count them."""
    found = [(name, *place) for name in sorted(names) if (place := _class_of(name))]
    split_up = any(split for _, split, _ in found)
    found = [entry for entry in found if bool(entry[1]) == split_up]
    class_names = tuple(sorted({label for _, _, label in found}))
    items: dict[str, list[tuple[str, int]]] = {}
    for name, split, label in found:
        items.setdefault(split, []).append((name, class_names.index(label)))
    mixed = {split: _mixed(of_split) for split, of_split in items.items()}
    return class_names, mixed if split_up else _split(mixed.get("", ()))


def _class_of(name: str) -> tuple[str, str] | None:
    """The split (empty where there is none) and the class of an image, None for another file."""
    parts = name.split("/")
    if posixpath.splitext(name)[1].lower() not in SUFFIXES:
        return None
    if len(parts) == _WITH_SPLIT and parts[0] in SPLIT_DIRECTORIES:
        return SPLIT_DIRECTORIES[parts[0]], parts[1]
    if len(parts) == _WITHOUT_SPLIT:
        return "", parts[0]
    return None


def _mixed(items: list[tuple[str, int]]) -> Items:
    return tuple(items[index] for index in shuffled(len(items), SEED))


def _split(items: Items) -> dict[str, Items]:
    held_out = max(1, round(len(items) * EVAL_FRACTION))
    parts = {"train": items[held_out:], "eval": items[:held_out]}
    return {split: part for split, part in parts.items() if part}
