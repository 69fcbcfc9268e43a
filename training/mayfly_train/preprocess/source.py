"""What is preprocessed: a dataset that lies in HDFS whole, as `stage` leaves it."""

from __future__ import annotations

import posixpath
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Protocol

from mayfly_train import manifest
from mayfly_train.errors import BadInput
from mayfly_train.hdfs import HdfsFailure
from mayfly_train.manifest import Manifest
from mayfly_train.preprocess.encode import Batch, Shape
from mayfly_train.preprocess.idx import is_idx, open_idx
from mayfly_train.preprocess.options import Options
from mayfly_train.preprocess.pictures import has_images, open_images
from mayfly_train.preprocess.store import Store
from mayfly_train.retry import with_backoff

IDX, IMAGES = "idx", "images"
# Staging goes on at other nodes; a file of HDFS grows by blocks of 128 MiB.
PATIENCE_S = 900.0
_LOOK_S = 1.0


class Source(Protocol):
    """Examples by split and number. `shape` is an image's: (channels, rows, columns)."""

    @property
    def shape(self) -> Shape: ...
    @property
    def counts(self) -> Mapping[str, int]: ...
    @property
    def class_names(self) -> tuple[str, ...] | None: ...
    def batches(self, split: str, start: int, stop: int, web: bool) -> Iterator[Batch]: ...


def kind_of(names: Collection[str]) -> str:
    """What these files of a dataset (relative names) are: `idx` or `images`.

    Raises BadInput when they are neither.
    """
    if is_idx(names):
        return IDX
    if has_images(names):
        return IMAGES
    raise BadInput(
        f"nothing to preprocess: {', '.join(sorted(names)[:3])} — put MNIST's four IDX files, or "
        "<class>/<image>, with: mayfly data put --format files"
    )


def open_source(store: Store, directory: str, dataset: Manifest, options: Options) -> Source:
    """The dataset's examples. Raises BadInput when it is not what its names say."""
    names = set(dataset.by_path())
    if kind_of(names) == IDX:
        return open_idx(store, directory, names)
    return open_images(store, directory, names, options.image_size)


def wait_until_whole(
    store: Store,
    directory: str,
    patience_s: float = PATIENCE_S,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Manifest:
    """The manifest of the dataset in a directory, once all its files are there.

    Raises HdfsFailure when something is missing and nothing has come for `patience_s` seconds.
    """
    seen: object = None
    since = clock()
    while True:
        sizes = with_backoff(lambda _: sizes_below(store, directory))
        lacks = [f"no {manifest.NAME}"]
        if manifest.NAME in sizes:
            dataset = read_manifest(store, directory)
            lacks = manifest.differences(dataset, sizes)
            if not lacks:
                return dataset
        if sizes != seen:
            seen, since = sizes, clock()
        if clock() - since > patience_s:
            raise HdfsFailure(
                f"the dataset in {directory} of HDFS is not whole: {lacks[0]} — has staging ended?"
            )
        sleep(_LOOK_S)


def read_manifest(store: Store, directory: str) -> Manifest:
    """The manifest in a directory. Raises BadManifest when it cannot be trusted."""
    path = posixpath.join(directory, manifest.NAME)
    text = with_backoff(lambda _: store.read_bytes(path))
    return manifest.parse(text.decode(errors="replace"), path)


def sizes_below(store: Store, directory: str) -> dict[str, int]:
    """Relative path → size of every file below a directory."""
    return {posixpath.relpath(info.path, directory): info.size for info in store.walk(directory)}
