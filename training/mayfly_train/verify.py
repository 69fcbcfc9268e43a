"""`verify-manifest`: compare a directory, or what lies under an S3 address, with its manifest."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from mayfly_train import manifest, s3


def verify_directory(directory: Path) -> manifest.Manifest:
    """The manifest of a directory whose every file has the size and SHA-256 that it says.

    Raises BadManifest naming the first file that does not.
    """
    path = directory / manifest.NAME
    if not path.is_file():
        raise manifest.BadManifest(f"no {manifest.NAME} in {directory} — name another directory")
    said = manifest.parse(path.read_text(encoding="utf-8"), str(path))
    sizes = {
        entry.path: (directory / entry.path).stat().st_size
        for entry in said.files
        if (directory / entry.path).is_file()
    }
    manifest.require_match(said, sizes, str(directory))
    for entry in said.files:
        if manifest.file_sha256(directory / entry.path) != entry.sha256:
            raise manifest.BadManifest(
                f"{directory / entry.path} does not have the SHA-256 of its manifest — replace it"
            )
    return said


def verify_s3(client: s3.S3Client, uri: s3.S3Uri) -> manifest.Manifest:
    """The manifest under an address, when every object has the size that it says.

    Raises BadManifest naming the first objects that have not, S3Error when it cannot be read.
    """
    said = read_manifest(client, uri)
    manifest.require_match(said, s3.list_sizes(client, uri), str(uri))
    return said


def read_manifest(client: s3.S3Client, uri: s3.S3Uri) -> manifest.Manifest:
    """The manifest under an address. Raises NotFound when there is none."""
    where = uri.join(manifest.NAME)
    return manifest.parse(s3.read_bytes(client, where).decode("utf-8", "replace"), str(where))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `verify-manifest`."""
    parser.add_argument("place", help="directory (sizes and SHA-256) or s3://… (sizes)")
    s3.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Verify, and print how much is there as JSON. Returns 0."""
    if args.place.startswith("s3://"):
        client = s3.connect(s3.settings_from(args))
        said = verify_s3(client, s3.parse_uri(args.place))
    else:
        said = verify_directory(Path(args.place))
    print(json.dumps({"ok": True, "files": len(said.files), "bytes": said.total_bytes}))
    return 0
