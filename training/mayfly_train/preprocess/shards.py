"""Which examples stand in which file: pure functions of their numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Shard:
    """File `index` of the `of` files of a split; it has the examples from `start` to `stop`."""

    split: str
    index: int
    of: int
    start: int
    stop: int

    @property
    def name(self) -> str:
        """The file's name without its suffix."""
        return f"{self.split}-{self.index:05d}-of-{self.of:05d}"

    @property
    def examples(self) -> int:
        """How many examples it has."""
        return self.stop - self.start


def cut(count: int, parts: int) -> list[tuple[int, int]]:
    """`count` examples in that many ranges (start, stop) whose lengths differ by one at most.

    There are never more ranges than examples, and one for no example.
    """
    parts = max(1, min(parts, count))
    bounds = [count * part // parts for part in range(parts + 1)]
    return list(zip(bounds, bounds[1:]))


def plan(counts: Mapping[str, int], shards: int) -> tuple[Shard, ...]:
    """The shards of all splits (split → examples); `train` has `shards`, others as large ones."""
    size = max(1, -(-counts["train"] // shards))
    wanted = {split: -(-count // size) for split, count in counts.items()} | {"train": shards}
    return tuple(
        Shard(split, index, len(ranges), start, stop)
        for split, count in counts.items()
        for ranges in [cut(count, wanted[split])]
        for index, (start, stop) in enumerate(ranges)
    )
