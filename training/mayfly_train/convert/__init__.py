"""Published archives and images → TFRecords, as `convert` and `mayfly data put` do it.

Needs the extra `convert` (google-crc32c, numpy, Pillow), as `preprocess` does.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

from mayfly_train.convert import cifar10, idx, images
from mayfly_train.convert.dataset import SPLITS, Dataset, Layout, Progress, write
from mayfly_train.errors import BadInput
from mayfly_train.manifest import Manifest

__all__ = [
    "SPLITS", "Dataset", "Layout", "Options", "Progress", "cifar10", "convert", "detect", "idx",
    "images", "load", "write",
]  # fmt: skip
FORMATS = ("auto", "cifar10", "idx", "images")


@dataclass(frozen=True)
class Options:
    """What to make of a source; None means the format's own default."""

    format: str = "auto"
    name: str | None = None
    class_names: tuple[str, ...] | None = None
    padded: bool = False
    image_size: int | None = None
    layout: Layout = Layout()


def detect(source: Path) -> str:
    """The format of this source. Raises BadInput when it is none that we know."""
    if not source.exists():
        raise BadInput(f"no such file or directory: {source} — check the path")
    if cifar10.is_source(source):
        return "cifar10"
    if idx.is_directory_of_idx(source):
        return "idx"
    if images.is_directory_of_images(source):
        return "images"
    raise BadInput(
        f"unknown kind of data: {source} — it must be cifar-10-binary.tar.gz, a directory of IDX "
        "files, or a directory of images per class; unpack other archives first"
    )


def load(source: Path, options: Options) -> Dataset:
    """The source as a dataset. Raises BadInput when it is not what its format says."""
    kind = detect(source) if options.format == "auto" else options.format
    layout = options.layout
    if kind == "cifar10":
        return cifar10.load(source, layout)
    if kind == "idx":
        classes = options.class_names or idx.DIGITS
        return idx.load(source, layout, options.name, options.padded, classes)
    if kind == "images":
        side = images.DEFAULT_SIDE if options.image_size is None else options.image_size
        return images.load(source, layout, side, options.class_names, options.name)
    raise BadInput(f"unknown format {kind!r} (known: {', '.join(FORMATS)})")


def convert(
    source: Path, directory: Path, options: Options, progress: Progress | None = None
) -> Manifest:
    """Write the source as a TFRecord dataset into a new or empty directory."""
    return write(load(source, options), directory, options.layout, progress)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `convert`."""
    layout = Layout()
    parser.add_argument("source", type=Path, help="archive or directory")
    parser.add_argument("directory", type=Path, help="new directory for the TFRecords")
    parser.add_argument("--format", choices=FORMATS, default="auto")
    parser.add_argument("--name", help="name of the dataset (default: that of the directory)")
    parser.add_argument("--classes", help="class names in the order of their labels: a,b,c")
    parser.add_argument("--pad", action="store_true", help="IDX: pad 28×28×1 to 32×32×3")
    parser.add_argument("--image-size", type=int, help="images: side in pixels (default 224)")
    parser.add_argument("--shards", type=int, default=layout.shards, help="files per split")
    parser.add_argument("--single-file", action="store_true", help="train.tfrecords and so on")
    parser.add_argument("--validation", type=float, default=layout.validation_fraction)
    parser.add_argument("--seed", type=int, default=layout.seed)


def run(args: argparse.Namespace) -> int:
    """Convert and print what was made as JSON. Returns 0."""
    made = convert(args.source, args.directory, options_from(args))
    print(json.dumps({"name": made.extra["name"], "files": len(made.files)}))
    return 0


def options_from(args: argparse.Namespace) -> Options:
    """The options that these arguments mean."""
    return Options(
        format=args.format,
        name=args.name,
        class_names=tuple(args.classes.split(",")) if args.classes else None,
        padded=args.pad,
        image_size=args.image_size,
        layout=Layout(args.shards, args.single_file, args.validation, args.seed),
    )
