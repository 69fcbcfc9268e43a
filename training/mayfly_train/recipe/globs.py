"""Files and S3 keys that match a pattern, in order of their names."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable
from pathlib import Path

from mayfly_train.errors import BadInput
from mayfly_train.s3 import S3Client, clear_errors, parse_uri

_WILD = frozenset("*?[")


def find(pattern: str, client: S3Client | None, directory: Path | None) -> list[str]:
    """Everything that matches: paths, or S3 addresses of objects and of prefixes.

    A relative pattern is looked up in `directory` and its matches stay relative. As in a shell,
    a star stops at a slash and matches no leading dot. Raises BadInput, and S3Error.
    """
    if not pattern.startswith("s3://"):
        return _find_here(pattern, directory or Path())
    if client is None:
        raise BadInput(f"no S3 keys for {pattern!r} — set AWS_ACCESS_KEY_ID and its secret")
    if "**" in pattern:
        raise BadInput(f"{pattern!r} has **, which S3 globs do not know — write one * a level")
    return _find_s3(pattern, client)


def _find_here(pattern: str, directory: Path) -> list[str]:
    root = Path(pattern).anchor or str(directory)
    below = pattern[len(Path(pattern).anchor) :]
    paths = [path for path in Path(root).glob(below) if _shown(path.relative_to(root), below)]
    absolute = Path(pattern).is_absolute()
    return sorted(str(path if absolute else path.relative_to(root)) for path in paths)


def _shown(path: Path, pattern: str) -> bool:
    """Whether no part has a leading dot that the pattern does not ask for."""
    return "/." in f"/{pattern}" or not any(part.startswith(".") for part in path.parts)


def _find_s3(pattern: str, client: S3Client) -> list[str]:
    uri = parse_uri(pattern)
    if _WILD & set(uri.bucket):
        raise BadInput(f"{pattern!r} has a wildcard in its bucket's name — name one bucket")
    found = [""]
    *folders, last = uri.key.split("/")
    for part in folders:
        found = [f"{key.rstrip('/')}/" for key in _below(client, uri.bucket, found, part)]
    keys = _below(client, uri.bucket, found, last)
    there = [key for key in keys if _WILD & set(last) or _is_there(client, uri.bucket, key)]
    return sorted({f"s3://{uri.bucket}/{key.rstrip('/')}" for key in there})


def _below(client: S3Client, bucket: str, prefixes: Iterable[str], part: str) -> list[str]:
    """What one part of a pattern matches below each prefix."""
    if not _WILD & set(part):
        return [prefix + part for prefix in prefixes]
    matches = _matcher(part)
    return [
        prefix + name
        for prefix in prefixes
        for name in _level(client, bucket, prefix)
        if matches(name.rstrip("/"))
    ]


def _matcher(part: str) -> Callable[[str], bool]:
    hidden = part.startswith(".")
    return lambda name: fnmatch.fnmatchcase(name, part) and (hidden or not name.startswith("."))


def _level(client: S3Client, bucket: str, prefix: str) -> Iterable[str]:
    """Names right below a prefix; those of prefixes end in a slash."""
    with clear_errors(parse_uri(f"s3://{bucket}/{prefix}")):
        pages = client.get_paginator("list_objects_v2").paginate(
            Bucket=bucket, Prefix=prefix, Delimiter="/"
        )
        for page in pages:
            for folder in page.get("CommonPrefixes", []):
                yield folder["Prefix"][len(prefix) :]
            for item in page.get("Contents", []):
                if item["Key"] != prefix:
                    yield item["Key"][len(prefix) :]


def _is_there(client: S3Client, bucket: str, key: str) -> bool:
    """Whether there is an object of this name, or anything below it."""
    bare = key.rstrip("/")
    with clear_errors(parse_uri(f"s3://{bucket}/{bare}")):
        page = client.list_objects_v2(Bucket=bucket, Prefix=bare, MaxKeys=2)
    names = [item["Key"] for item in page.get("Contents", [])]
    return any(name == bare or name.startswith(f"{bare}/") for name in names)
