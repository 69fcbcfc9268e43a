"""What can be known to be wrong before anything is created: keys, buckets, data.

Each check raises an error of one line; none leaves anything behind.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mayfly.engines import COMMAND, PREPROCESSED, TFRECORD
from mayfly.errors import UserError
from mayfly.spec import JUICEFS, ClusterSpec
from mayfly_train import manifest, s3
from mayfly_train.errors import BadInput
from mayfly_train.preprocess import source


@dataclass(frozen=True)
class Dataset:
    """A dataset in S3 whose listing matches its manifest."""

    uri: str
    files: int
    bytes: int
    name: str
    paths: tuple[str, ...] = ()

    def describe(self) -> str:
        """Return what it is on one line."""
        size = f"{self.files} files, {self.bytes / 2**20:,.0f} MiB"
        return f"{self.name}: {size}" if self.name else size


def check_bucket(client: Any, uri: str) -> None:
    """Raise an error unless the keys are good for the bucket in `uri`, and it exists."""
    s3.require_bucket(client, s3.parse_uri(uri))


def check_store(
    store: str, endpoint: str | None, *, local: bool, device: Path = Path("/dev/fuse")
) -> None:
    """Raise UserError when nodes could not mount the shared file system that the job wants.

    `local` says that nodes are containers of this machine, which get its device.
    """
    if store != JUICEFS:
        return
    if endpoint and urlsplit(endpoint).path.strip("/"):
        raise UserError(
            f"store is {store!r}, and the S3 endpoint {endpoint} has a path, which JuiceFS takes"
            " for the bucket",
            "give an endpoint without a path, or set store: hdfs",
        )
    if local and not device.exists():
        raise UserError(
            f"store is {store!r}, and this machine has no {device} for its nodes",
            "run `modprobe fuse` as root, or set store: hdfs",
        )


def check_dataset(client: Any, uri: str, cloud: str = "local") -> Dataset:
    """Return what the data prefix holds; raises an error unless it is whole.

    `cloud` is what `mayfly data put` would have to be told.
    """
    where = s3.parse_uri(uri)
    sizes = s3.list_sizes(client, where)
    if not sizes:
        raise UserError(f"there is no data at {uri}", _advice(uri, cloud))
    if manifest.NAME not in sizes:
        raise UserError(f"there is no {manifest.NAME} at {uri}", _advice(uri, cloud))
    text = s3.read_bytes(client, where.join(manifest.NAME)).decode(errors="replace")
    listed = manifest.parse(text, str(where.join(manifest.NAME)))
    if listed.kind != "dataset":
        raise UserError(f"{uri} holds a {listed.kind}, not a dataset", "check data.source")
    manifest.require_match(listed, sizes, uri)
    name = str(listed.extra.get("name") or "")
    return Dataset(uri, len(listed.files), listed.total_bytes, name, tuple(listed.by_path()))


def check_preprocess(spec: ClusterSpec, dataset: Dataset) -> None:
    """Raise an error when the job wants data preprocessed that nodes cannot, or its program cannot
    read in that form; nothing happens when it wants none."""
    wanted, trainer = spec.data.preprocess, spec.trainer
    if wanted is None:
        return
    try:
        kind = source.kind_of(dataset.paths)
    except BadInput as error:
        raise UserError(f"data.preprocess at {dataset.uri}: {error}") from None
    if trainer.engine == COMMAND or PREPROCESSED.get(trainer.program) != TFRECORD:
        return
    args = trainer.args if trainer.program == "builtin:cifar10" else {}
    side, channels = args.get("image_size", 32), args.get("channels", 3)
    if kind == source.IMAGES and (wanted.image_size, 3) != (side, channels):
        raise UserError(
            f"data.preprocess.image_size is {wanted.image_size}",
            f"{trainer.program} reads images of {channels}×{side}×{side} with these trainer.args",
        )
    if kind == source.IDX and channels != 1:
        raise UserError(
            f"{dataset.uri} holds grey images, and {trainer.program} reads {channels} channels",
            "builtin:cifar10 reads them with trainer.args {image_size: 28, channels: 1}",
        )


def is_unfinished(client: Any, uri: str, names: re.Pattern[str]) -> bool:
    """Return whether a dataset's files (their `names`) have yet to be put below `uri`.

    Its manifest is written last, so without one nothing whole is there; with other files but no
    manifest, somebody else's data is.
    """
    found = s3.list_sizes(client, s3.parse_uri(uri))
    return manifest.NAME not in found and all(names.fullmatch(name) for name in found)


def _advice(uri: str, cloud: str) -> str:
    where = uri if cloud == "local" else f"{uri} --cloud {cloud}"
    return f"put it there with `mayfly data put DIRECTORY {where}`, or set data.source"
