"""What to make of a dataset: the format, in how many files, with which scaling of pixels."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass

from mayfly_train.errors import BadInput

TFRECORD, TENSORS = "tfrecord", "tensors"
SUFFIXES = {TFRECORD: ".tfrecords", TENSORS: ".npy"}
IMAGE_SIDE = 224
# Changes when the same dataset and options give other files.
_VERSION = 1


@dataclass(frozen=True)
class Options:
    """The wanted result. `shards` is the number of files of the training split, `normalise` mean
    and standard deviation of pixels that go from 0 to 1, `image_size` the side in pixels that
    image files are resized to.

    Without `normalise`, TFRecords keep bytes and tensors go from 0 to 1.
    """

    to: str
    shards: int = 8
    normalise: tuple[float, float] | None = None
    image_size: int = IMAGE_SIDE

    def __post_init__(self) -> None:
        if self.to not in SUFFIXES:
            raise BadInput(f"unknown format {self.to!r} — known: {', '.join(SUFFIXES)}")
        if self.shards < 1:
            raise BadInput(f"shards is {self.shards} — it must be at least 1")
        if self.image_size < 1:
            raise BadInput(f"image size is {self.image_size} — it must be at least 1")
        mean, std = self.normalise or (0.0, 1.0)
        if not (math.isfinite(mean) and math.isfinite(std) and std > 0):
            raise BadInput(f"mean {mean} and deviation {std} — give numbers, the deviation above 0")

    @property
    def floats(self) -> bool:
        """Whether images become float32; they stay uint8 otherwise."""
        return self.to == TENSORS or self.normalise is not None

    @property
    def suffix(self) -> str:
        """How the names of the files end."""
        return SUFFIXES[self.to]

    def digest(self, source: str) -> str:
        """Sixteen hex digits that change with these options and with `source`, a digest too."""
        text = json.dumps([_VERSION, source, asdict(self)])
        return hashlib.sha256(text.encode()).hexdigest()[:16]
