"""What every converter shares: splits, shards, metadata.json and manifest.json."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from mayfly_train import manifest
from mayfly_train.convert import tfrecord
from mayfly_train.errors import BadInput

SPLITS = ("train", "validation", "eval")
METADATA = "metadata.json"
Progress = Callable[[int, int], None]


class Examples(Protocol):
    """Images that can be taken by their number, so that no split has to fit into memory."""

    def __len__(self) -> int: ...

    def example(self, index: int) -> tuple[bytes, int]:
        """The pixels as uint8 bytes in channel, row, column order, and the label."""


@dataclass(frozen=True)
class Subset:
    """Some of the examples, in an order of their own."""

    source: Examples
    indices: Sequence[int]

    def __len__(self) -> int:
        return len(self.indices)

    def example(self, index: int) -> tuple[bytes, int]:
        """The example at this place of the subset."""
        return self.source.example(self.indices[index])


@dataclass(frozen=True)
class Dataset:
    """What a converter read: the name as users should see it, the shape (C, H, W), the splits."""

    name: str
    shape: tuple[int, int, int]
    class_names: tuple[str, ...]
    splits: dict[str, Examples]
    source: str


@dataclass(frozen=True)
class Layout:
    """How to write a dataset: shards per split, or one plain file per split for programs that
    expect `train.tfrecords`; which part of the training images becomes the validation split."""

    shards: int = 8
    single_file: bool = False
    validation_fraction: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.shards < 1:
            raise BadInput(f"shards is {self.shards} — it must be at least 1")
        if not 0 <= self.validation_fraction < 1:
            raise BadInput(
                f"validation fraction is {self.validation_fraction} — it must be from 0 to below 1"
            )


def split_validation(train: Examples, layout: Layout) -> dict[str, Examples]:
    """The training images, shuffled by the seed, and the part set aside for validation."""
    order = shuffled(len(train), layout.seed)
    held_out = round(len(train) * layout.validation_fraction)
    splits: dict[str, Examples] = {"train": Subset(train, order[held_out:])}
    if held_out:
        splits["validation"] = Subset(train, order[:held_out])
    return splits


def shuffled(count: int, seed: int) -> list[int]:
    """The numbers below `count` in an order that depends on the seed alone."""
    order = list(range(count))
    random.Random(seed).shuffle(order)
    return order


def write(
    dataset: Dataset, directory: Path, layout: Layout, progress: Progress | None = None
) -> manifest.Manifest:
    """Write the splits, metadata.json and, last, manifest.json; returns the manifest.

    The same dataset, layout and seed give the same bytes.
    """
    _require_empty(directory)
    total = sum(len(examples) for examples in dataset.splits.values())
    counter = _Counter(total, progress)
    files = {
        split: _write_split(split, examples, directory, layout, counter)
        for split, examples in dataset.splits.items()
    }
    metadata = _metadata(dataset)
    (directory / METADATA).write_text(json.dumps(metadata, indent=1) + "\n", encoding="utf-8")
    made = manifest.from_directory(
        directory, "dataset", format="tfrecord", name=dataset.name, splits=files,
        source=dataset.source,
    )  # fmt: skip
    (directory / manifest.NAME).write_text(made.to_json(), encoding="utf-8")
    return made


def file_names(split: str, count: int, layout: Layout) -> list[str]:
    """The names of a split's files; never more shards than examples."""
    if layout.single_file:
        return [f"{split}.tfrecords"]
    shards = max(1, min(layout.shards, count))
    return [f"{split}-{shard:05d}-of-{shards:05d}.tfrecords" for shard in range(shards)]


class _Counter:
    """Counts examples and tells about every thousandth."""

    def __init__(self, total: int, progress: Progress | None):
        self._done, self._total, self._progress = 0, total, progress

    def add(self) -> None:
        self._done += 1
        if self._progress and (self._done % 1000 == 0 or self._done == self._total):
            self._progress(self._done, self._total)


def _require_empty(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    if any(directory.iterdir()):
        raise BadInput(f"not empty: {directory} — name a new directory for the dataset")


def _write_split(
    split: str, examples: Examples, directory: Path, layout: Layout, counter: _Counter
) -> list[str]:
    if not len(examples):
        raise BadInput(f"split {split} has no images — check the source")
    names = file_names(split, len(examples), layout)
    for shard, name in enumerate(names):
        with tfrecord.Writer(directory / name) as writer:
            for index in range(shard, len(examples), len(names)):
                writer.write(tfrecord.encode_example(*examples.example(index)))
                counter.add()
    return names


def _metadata(dataset: Dataset) -> dict[str, Any]:
    return {
        "name": dataset.name,
        "shape": list(dataset.shape),
        "classes": len(dataset.class_names),
        "counts": {split: len(examples) for split, examples in dataset.splits.items()},
        "class_names": list(dataset.class_names),
    }
