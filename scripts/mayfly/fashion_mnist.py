"""The data of the default jobs: Fashion-MNIST, for a bucket that has none yet.

That is the local bucket, or the user's own: nothing is written there but where the default jobs
look for data. The real Fashion-MNIST comes from its Debian package. As TFRecords it is converted
once, and kept by content hash; later runs only upload it. As IDX files it is uploaded as the
package has it.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mayfly import data
from mayfly.errors import UserError
from mayfly.local.host import install_packages
from mayfly.spec import ClusterSpec, split_s3_uri
from mayfly_train import convert, manifest

PACKAGE = "dataset-fashion-mnist"
SOURCE = Path("/usr/share/datasets/fashion-mnist")
OPTIONS = convert.Options(
    format="idx",
    name="Fashion-MNIST padded to 32x32x3",
    class_names=(
        *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
        *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
    ),
    padded=True,
)
FILES = convert.Options(format=data.FILES, name="Fashion-MNIST (IDX files)")
ABANDONED_S = 3600
Prepare = Callable[[Path, Callable[[str, float | None], None]], Path]


@dataclass(frozen=True)
class Made:
    """How a directory to put into the bucket is made, and what `data.put` does with it."""

    prepare: Prepare
    options: convert.Options
    names: re.Pattern[str]
    """Of its files: where others are, somebody else's data is being put."""
    bytes: int
    """How much it is, before it is made."""
    words: str
    """What `mayfly data put` makes it with, of a directory with the four files."""

    def what_is_put(self, spec: ClusterSpec) -> str:
        """Return what is put where, and how much that is."""
        size = f"{self.bytes / 2**20:,.0f} MiB"
        return f"{self.options.name} ({size}) is put into {spec.data.source}"


def made_for(source: str) -> Made | None:
    """What belongs at a default job's data source, None at any other."""
    return next((made for end, made in _made().items() if source.endswith(end)), None)


def made_for_bucket(spec: ClusterSpec) -> Made | None:
    """What belongs where a default job looks in the user's own bucket, that of the model; None for
    a job with any other source."""
    bucket, _ = split_s3_uri(str(spec.model.destination))
    places = {f"s3://{bucket}/datasets/{end}": made for end, made in _made().items()}
    return places.get(spec.data.source) if spec.model.destination else None


def _made() -> dict[str, Made]:
    records = re.compile(r"(train|validation|eval)-\d+-of-\d+\.tfrecords|metadata\.json")
    idx = re.compile(r"(train|t10k)-(images|labels)-idx\d-ubyte(\.gz)?")
    return {
        "fashion-mnist/": Made(prepare, OPTIONS, records, 200_064_315, "--format idx --pad"),
        "fashion-mnist-idx/": Made(find, FILES, idx, 30_878_645, "--format files"),
    }


def find(_cache: Path, report: Callable[[str, float | None], None]) -> Path:
    """The directory with the IDX files, from the package. Raises UserError as `prepare` does."""
    return _source(report)


def prepare(cache: Path, report: Callable[[str, float | None], None]) -> Path:
    """Return a directory with the data as TFRecords and a manifest, made once per content.

    Raises UserError when the Debian package is absent and cannot be installed.
    """
    source = _source(report)
    directory = cache / "datasets" / f"fashion-mnist-{_digest(source)}"
    if (directory / manifest.NAME).exists():
        report("Fashion-MNIST was converted before: reused", None)
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(directory.parent)
    making = Path(tempfile.mkdtemp(dir=directory.parent, prefix="making-"))
    try:
        convert.convert(
            source,
            making,
            OPTIONS,
            lambda done, total: report("converting Fashion-MNIST", done / total),
        )
        if not directory.exists():  # another run may have been quicker
            making.rename(directory)
    finally:
        shutil.rmtree(making, ignore_errors=True)
    return directory


def _remove_abandoned(datasets: Path) -> None:
    """Remove what killed conversions have left; one that takes minutes is at work no more."""
    for old in datasets.glob("making-*"):
        with contextlib.suppress(FileNotFoundError):  # renamed by the one that made it
            if old.stat().st_mtime < time.time() - ABANDONED_S:
                shutil.rmtree(old, ignore_errors=True)


def _source(report: Callable[[str, float | None], None]) -> Path:
    if not convert.idx.is_directory_of_idx(SOURCE):
        try:
            install_packages([PACKAGE], "Fashion-MNIST", lambda text: report(text, None))
        except UserError as error:
            raise UserError(
                f"the default job's data is not on this machine: {error.message}",
                f"apt install {PACKAGE}, or set data.source",
            ) from error
    return SOURCE


def _digest(source: Path) -> str:
    """Sixteen hex digits that change with the files, and with the code that converts them."""
    digest = hashlib.sha256(repr(OPTIONS).encode())
    code = Path(convert.__file__).parent
    for path in sorted([*source.iterdir(), *code.glob("*.py")]):
        digest.update(f"{path.name} {manifest.file_sha256(path)}\n".encode())
    return digest.hexdigest()[:16]
