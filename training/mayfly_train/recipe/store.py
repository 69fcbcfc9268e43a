"""Where a run keeps all that is to outlive its nodes: named objects, in S3 or in a directory."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, Protocol

from botocore.exceptions import ClientError

from mayfly_train import s3
from mayfly_train.errors import BadInput, NodeError
from mayfly_train.recipe.quick_s3 import QuickS3

_EXISTS = ("PreconditionFailed", "412", "ConditionalRequestConflict", "409")


class Store(Protocol):
    """Objects by name. Every method raises NodeError when the store does not do it."""

    address: str

    def read(self, name: str) -> bytes | None:
        """The content, None when there is no such object."""

    def write(self, name: str, data: bytes) -> None:
        """Put an object; readers see the old content or the new, never a part."""

    def create(self, name: str, data: bytes) -> bool:
        """Put an object unless there is one; False when there is. One of several at once wins."""

    def upload(self, name: str, path: Path) -> None:
        """Put a file of any size."""

    def download(self, name: str, path: Path) -> None:
        """Get an object of any size, which there is, as a file."""

    def age(self, name: str) -> float | None:
        """How many seconds ago an object was put, by the store's own clock; None without one."""

    def delete(self, name: str) -> None:
        """Remove an object; nothing happens when there is none."""

    def names(self, prefix: str) -> list[str]:
        """The names of all objects that begin with this, sorted."""


def open_store(address: str, settings: s3.S3Settings | None, connections: int = 16) -> Store:
    """The store at `s3://bucket/prefix` or in a directory. Raises BadInput without keys for S3."""
    if not address.startswith("s3://"):
        if "://" in address:
            raise BadInput(f"not a store: {address!r} — write s3://bucket/prefix, or a directory")
        return DirectoryStore(Path(address))
    if settings is None:
        settings = s3.S3Settings.from_environ(os.environ)
    uri = s3.parse_uri(address)
    return S3Store(s3.connect(settings, connections), uri, QuickS3(settings, uri.bucket))


def read_json(store: Store, name: str) -> Any:
    """The document in an object, None when there is none. Raises NodeError when it is not JSON."""
    data = store.read(name)
    if data is None:
        return None
    try:
        return json.loads(data)
    except ValueError as error:
        raise NodeError(f"{store.address}/{name} is not JSON: {error} — remove it") from None


def to_bytes(document: Any) -> bytes:
    """A document as it is stored."""
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode() + b"\n"


class S3Store:
    """Below a prefix of a bucket."""

    def __init__(self, client: s3.S3Client, uri: s3.S3Uri, quick: QuickS3 | None = None) -> None:
        """`quick` is asked first for small objects."""
        self.client, self.uri, self._quick = client, uri, quick
        self.address = str(uri).rstrip("/")

    def read(self, name: str) -> bytes | None:
        answer = self._quick.read(self.uri.join(name)) if self._quick else None
        if answer is not None:
            return answer[1] if answer[0] else None
        try:
            return s3.read_bytes(self.client, self.uri.join(name))
        except s3.NotFound:
            return None

    def write(self, name: str, data: bytes) -> None:
        s3.write_bytes(self.client, self.uri.join(name), data, _content_type(name))

    def create(self, name: str, data: bytes) -> bool:
        """As the protocol says, by a conditional write, where the server knows these."""
        uri = self.uri.join(name)
        created = self._quick.create(uri, data) if self._quick else None
        if created is not None:
            return created
        try:
            with s3.clear_errors(uri):
                self.client.put_object(
                    Bucket=uri.bucket,
                    Key=uri.key,
                    Body=data,
                    ContentType=_content_type(name),
                    IfNoneMatch="*",
                )
        except s3.S3Error as error:
            if _code(error) in _EXISTS:
                return False
            raise
        return True

    def upload(self, name: str, path: Path) -> None:
        with path.open("rb") as stream:
            s3.upload(self.client, self.uri.join(name), stream)

    def download(self, name: str, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as stream:
            for chunk in s3.read_chunks(self.client, self.uri.join(name)):
                stream.write(chunk)

    def age(self, name: str) -> float | None:
        uri = self.uri.join(name)
        try:
            with s3.clear_errors(uri):
                answer = self.client.head_object(Bucket=uri.bucket, Key=uri.key)
        except s3.NotFound:
            return None
        date = answer["ResponseMetadata"]["HTTPHeaders"].get("date")
        now = parsedate_to_datetime(date) if date else datetime.now(timezone.utc)
        return (now - answer["LastModified"]).total_seconds()

    def delete(self, name: str) -> None:
        s3.delete(self.client, self.uri.join(name))

    def names(self, prefix: str) -> list[str]:
        found = []
        with s3.clear_errors(self.uri.join(prefix)):
            pages = self.client.get_paginator("list_objects_v2").paginate(
                Bucket=self.uri.bucket, Prefix=self.uri.prefix + prefix
            )
            for page in pages:
                found += [item["Key"][len(self.uri.prefix) :] for item in page.get("Contents", [])]
        return sorted(found)


def _code(error: s3.S3Error) -> str:
    cause = error.__cause__
    return str(cause.response["Error"].get("Code")) if isinstance(cause, ClientError) else ""


def _content_type(name: str) -> str:
    return "application/json" if name.endswith(".json") else "application/octet-stream"


class DirectoryStore:
    """Below a directory, which all nodes must have mounted."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory.absolute()
        self.address = str(self.directory)

    def read(self, name: str) -> bytes | None:
        with _clear(self.directory / name):
            try:
                return (self.directory / name).read_bytes()
            except (FileNotFoundError, NotADirectoryError):
                return None

    def write(self, name: str, data: bytes) -> None:
        with self._new(name) as new:
            new.write_bytes(data)
            new.replace(self.directory / name)

    def create(self, name: str, data: bytes) -> bool:
        with self._new(name) as new:
            with new.open("wb") as stream:
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())  # it is the last word: no power cut may leave it empty
            try:
                os.link(new, self.directory / name)  # fails when there is one, on NFS, too
            except FileExistsError:
                return False
        return True

    def upload(self, name: str, path: Path) -> None:
        with self._new(name) as new:
            shutil.copyfile(path, new)
            new.replace(self.directory / name)

    def download(self, name: str, path: Path) -> None:
        with _clear(self.directory / name):
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(self.directory / name, path)

    def age(self, name: str) -> float | None:
        with _clear(self.directory / name):
            try:
                then = (self.directory / name).stat().st_mtime
            except (FileNotFoundError, NotADirectoryError):
                return None
        return self._now(name) - then

    def _now(self, name: str) -> float:
        """The time where a file is, which may be a server's: that of a new one beside it; this
        machine's where none can be made."""
        with contextlib.suppress(NodeError), self._new(name) as new:
            new.touch()
            return new.stat().st_mtime
        return time.time()

    def delete(self, name: str) -> None:
        with _clear(self.directory / name):
            (self.directory / name).unlink(missing_ok=True)

    def names(self, prefix: str) -> list[str]:
        folder, _, start = prefix.rpartition("/")
        with _clear(self.directory / folder):
            top = (
                path for path in (self.directory / folder).glob("*") if path.name.startswith(start)
            )
            below = (each for path in top for each in (path, *path.rglob("*")))
            files = (path for path in below if path.is_file())
            names = (path.relative_to(self.directory).as_posix() for path in files)
            return sorted(n for n in names if n.startswith(prefix) and "/.new-" not in f"/{n}")

    @contextlib.contextmanager
    def _new(self, name: str) -> Iterator[Path]:
        """A file beside the one to be, removed at the end when it is still there."""
        path = self.directory / name
        new = path.with_name(f".new-{secrets.token_hex(6)}")
        with _clear(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                yield new
            finally:
                new.unlink(missing_ok=True)


@contextlib.contextmanager
def _clear(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise NodeError(f"{path}: {error.strerror} — look at the store's directory") from error
