"""The data of the default jobs: Fashion-MNIST, for the local bucket that has none yet.

CLOUD=local has no bucket of the user's to take data from. The real Fashion-MNIST comes from its
Debian package. As TFRecords it is converted once, and kept by content hash; later runs only upload
it. As IDX files it is uploaded as the package has it.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mayfly import data
from mayfly.errors import UserError
from mayfly.local.host import install_packages
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


def made_for(source: str) -> Made | None:
    """What belongs at a default job's data source, None at any other."""
    ends = {"fashion-mnist/": Made(prepare, OPTIONS), "fashion-mnist-idx/": Made(find, FILES)}
    return next((made for end, made in ends.items() if source.endswith(end)), None)


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
