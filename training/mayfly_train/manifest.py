"""The manifest: which files make up a dataset or a model, with size and SHA-256 of each.

It is written last, so that its presence says that the rest is whole.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path, PurePosixPath
from typing import Any

from mayfly_train.errors import BadInput

NAME = "manifest.json"
VERSION = 1
KINDS = ("dataset", "model")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_READ_BYTES = 1 << 20


class BadManifest(BadInput):
    """A manifest that cannot be used, or does not match what it describes."""


@dataclass(frozen=True)
class Entry:
    """One file: path relative to the manifest, size in bytes, SHA-256 in hex."""

    path: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a manifest.json says. `extra` holds the keys that only one kind has."""

    kind: str
    files: tuple[Entry, ...]
    created: str
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def total_bytes(self) -> int:
        """The sum of all sizes."""
        return sum(entry.size for entry in self.files)

    def by_path(self) -> dict[str, Entry]:
        """The entries, found by their path."""
        return {entry.path: entry for entry in self.files}

    def to_json(self) -> str:
        """The text of manifest.json, with files sorted by path and a newline at the end."""
        files = [vars(entry) for entry in sorted(self.files, key=lambda entry: entry.path)]
        document = {
            "version": VERSION,
            "kind": self.kind,
            "created": self.created,
            **self.extra,
            "files": files,
        }
        return json.dumps(document, indent=1) + "\n"

    def digest(self) -> str:
        """SHA-256 over the files alone: two manifests of the same files have the same digest."""
        files = sorted((entry.path, entry.size, entry.sha256) for entry in self.files)
        return hashlib.sha256(json.dumps(files).encode()).hexdigest()


def build(kind: str, files: Iterable[Entry], **extra: Any) -> Manifest:
    """A manifest of these files, created now. Raises BadManifest when an entry is not allowed."""
    manifest = Manifest(kind, tuple(files), utc_now(), extra)
    return parse(manifest.to_json())


def from_directory(directory: Path, kind: str, **extra: Any) -> Manifest:
    """A manifest of every file below a directory, but hidden ones and a manifest at its top."""
    if not directory.is_dir():
        raise BadManifest(f"not a directory: {directory} — name the directory that holds the files")
    paths = sorted(path for path in directory.rglob("*") if path.is_file())
    names = [(path, path.relative_to(directory).as_posix()) for path in paths]
    entries = [
        Entry(name, path.stat().st_size, file_sha256(path))
        for path, name in names
        if name != NAME and not any(part.startswith(".") for part in name.split("/"))
    ]
    return build(kind, entries, **extra)


def parse(text: str, where: str = NAME) -> Manifest:
    """The manifest in this text. Raises BadManifest, naming `where`, when it cannot be trusted."""
    try:
        document = json.loads(text)
    except ValueError as error:
        raise BadManifest(f"{where} is not JSON: {error} — write it again") from None
    try:
        return _from_document(document)
    except BadManifest as error:
        raise BadManifest(f"{where}: {error}") from None


def differences(manifest: Manifest, sizes: Mapping[str, int]) -> list[str]:
    """What a listing (path → size) lacks or has in another size; empty when all is there."""
    found = []
    for entry in manifest.files:
        size = sizes.get(entry.path)
        if size is None:
            found.append(f"{entry.path} is missing")
        elif size != entry.size:
            found.append(f"{entry.path} has {size} bytes, the manifest says {entry.size}")
    return found


def require_match(manifest: Manifest, sizes: Mapping[str, int], where: str) -> None:
    """Raise BadManifest, naming the first differences, unless the listing has every file."""
    found = differences(manifest, sizes)
    if found:
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""  # noqa: PLR2004
        raise BadManifest(
            f"{where} does not match its manifest: {'; '.join(found[:3])}{more} — upload it again"
        )


def file_sha256(path: Path) -> str:
    """The SHA-256 of a local file, in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(_READ_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def utc_now() -> str:
    """The time now, as in 2026-11-28T09:30:00Z."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def _from_document(document: Any) -> Manifest:
    if not isinstance(document, dict) or document.get("version") != VERSION:
        raise BadManifest(f"not a manifest of version {VERSION} — write it again")
    if document.get("kind") not in KINDS:
        raise BadManifest(f"unknown kind {document.get('kind')!r} (known: {', '.join(KINDS)})")
    if not isinstance(document.get("files"), list):
        raise BadManifest("it lists no files — write it again")
    entries = tuple(_entry(item) for item in document["files"])
    paths = [entry.path for entry in entries]
    twice = sorted({path for path in paths if paths.count(path) > 1}) if _repeats(paths) else []
    if twice:
        raise BadManifest(f"listed twice: {twice[0]} — write it again")
    extra = {
        key: value
        for key, value in document.items()
        if key not in ("version", "kind", "created", "files")
    }
    return Manifest(document["kind"], entries, str(document.get("created", "")), extra)


def _repeats(paths: list[str]) -> bool:
    return len(set(paths)) != len(paths)


def _entry(item: Any) -> Entry:
    if not isinstance(item, dict):
        raise BadManifest(f"not an entry: {item!r} — write it again")
    path, size, sha256 = _safe_path(item.get("path")), item.get("size"), item.get("sha256")
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise BadManifest(f"{path}: size is {size!r} — it must be a number of bytes")
    if not isinstance(sha256, str) or not _SHA256.fullmatch(sha256):
        raise BadManifest(f"{path}: sha256 is {sha256!r} — it must be 64 hex digits")
    return Entry(path, size, sha256)


def _safe_path(path: Any) -> str:
    if isinstance(path, str) and path.isprintable() and "\\" not in path and path != NAME:
        pure = PurePosixPath(path)
        if pure.parts and not pure.is_absolute() and ".." not in pure.parts and str(pure) == path:
            return path
    raise BadManifest(f"path not allowed: {path!r} — it must be relative, without '..'")
