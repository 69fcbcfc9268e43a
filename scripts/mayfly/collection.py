"""Our roles as a collection tarball: built from the checkout, and put where nodes can fetch it.

IM installs collections on the master node with ansible-galaxy, from a Galaxy version or an URL.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from typing import Any

import yaml
from botocore.exceptions import BotoCoreError, ClientError

from mayfly.clouds import CloudProfile
from mayfly.errors import MayflyError, RemoteError
from mayfly.spec import CHECKOUT, split_s3_uri

PUBLIC_BUCKET = "mayfly-public"
# What galaxy.yml's directives draw from. Hashing a file too many costs a rebuild of seconds.
_SOURCES = (
    "galaxy.yml",
    "LICENSE",
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "changelogs",
    "inventory",
    "meta",
    "playbooks",
    "radl",
    "roles",
    "training",
)
_SKIPPED = ("__pycache__", "molecule")
_SKIPPED_SUFFIXES = (".pyc", ".egg-info")
_HASH_LENGTH = 16
_WEEK = 7 * 24 * 3600  # the longest that a presigned URL can live


def build(checkout: Path = CHECKOUT, cache: Path | None = None) -> Path:
    """The collection's tarball, built unless one with the same content is in the cache.

    Raises MayflyError when ansible-galaxy fails.
    """
    name = f"{'-'.join(_identity(checkout))}.tar.gz"
    directory = (cache or cache_dir()) / "collection" / content_hash(checkout)
    tarball = directory / name
    if not tarball.exists():
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory) as made:
            sources = Path(made) / "sources"
            _copy_sources(checkout, sources)
            _run_galaxy(["build", str(sources), "--output-path", made], Path(made), "built")
            (Path(made) / name).replace(tarball)
    return tarball


def install(tarball: Path) -> Path:
    """Return a collections path that has the collection and nothing else, beside its tarball.

    Raises MayflyError when ansible-galaxy fails.
    """
    path = tarball.parent / "installed"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=tarball.parent) as made:
            target = Path(made) / "collections"
            words = ["install", "--offline", "--no-deps", "--collections-path", str(target)]
            _run_galaxy([*words, str(tarball)], Path(made), "installed")
            with suppress(OSError):  # another process was quicker
                target.rename(path)
    return path


def cache_dir() -> Path:
    """Where things that can be made again are kept between runs and checkouts."""
    return Path(os.environ.get("MAYFLY_CACHE_DIR") or "~/.cache/mayfly").expanduser()


def content_hash(checkout: Path = CHECKOUT) -> str:
    """16 hex digits that change with the names and the content of the collection's sources."""
    digest = hashlib.sha256()
    for path in _source_files(checkout):
        name = str(path.relative_to(checkout))
        digest.update(f"{name}\0{path.stat().st_size}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:_HASH_LENGTH]


def publish(
    tarball: Path, client: Any, profile: CloudProfile, destination: str, endpoint: str | None = None
) -> str:
    """Put the tarball where the nodes of a cloud can fetch it, and return what to write into RADL.

    For `url` that is an address in the public bucket at `endpoint`; for `bucket` an URL below
    `destination` (an S3 URI) that expires after a week; for `galaxy` the released version.
    Raises RemoteError when S3 refuses.
    """
    if profile.collection == "galaxy":
        return galaxy_version()
    if profile.collection == "url":
        key = f"{tarball.parent.name}/{tarball.name}"
        _put(client, tarball, PUBLIC_BUCKET, key)
        return f"{str(endpoint).rstrip('/')}/{PUBLIC_BUCKET}/{key}"
    bucket, prefix = split_s3_uri(destination)
    key = f"{prefix}collection/{tarball.parent.name}/{tarball.name}"
    _put(client, tarball, bucket, key)
    target = {"Bucket": bucket, "Key": key}
    url = client.generate_presigned_url("get_object", Params=target, ExpiresIn=_WEEK)
    # ansible-galaxy names its download after what follows the last slash: a signature there would
    # be longer than a file name can be. A fragment is never sent to the server.
    return f"{url}#/{tarball.name}"


def galaxy_version(checkout: Path = CHECKOUT) -> str:
    """The released collection, as IM's application names it: `mayfly.training,1.2.0`."""
    namespace, name, version = _identity(checkout)
    return f"{namespace}.{name},{version}"


def _identity(checkout: Path) -> tuple[str, str, str]:
    galaxy = yaml.safe_load((checkout / "galaxy.yml").read_text(encoding="utf-8"))
    return galaxy["namespace"], galaxy["name"], galaxy["version"]


def _source_files(checkout: Path) -> Iterator[Path]:
    for source in _SOURCES:
        root = checkout / source
        for path in sorted(root.rglob("*")) if root.is_dir() else [root]:
            parts = path.relative_to(checkout).parts
            if any(part in _SKIPPED or part.endswith(_SKIPPED_SUFFIXES) for part in parts):
                continue
            if path.is_file():
                yield path


def _copy_sources(checkout: Path, target: Path) -> None:
    """Copy what the collection is made of.

    ansible-galaxy walks all that lies beside it, and fails when a file goes away meanwhile: a
    checkout may hold the state directory, and so the disks of running nodes.
    """
    for path in _source_files(checkout):
        copy = target / path.relative_to(checkout)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, copy)


def _run_galaxy(words: list[str], output: Path, done_to_it: str) -> None:
    command = [sys.executable, "-m", "ansible", "galaxy", "collection", *words]
    settings = output / "ansible.cfg"  # instead of that of whatever directory this runs in
    settings.touch()
    home = output / "home"
    environment = {**os.environ, "ANSIBLE_HOME": str(home), "ANSIBLE_CONFIG": str(settings)}
    done = subprocess.run(
        command,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        raise MayflyError(f"the collection could not be {done_to_it}: {' '.join(last)}")


def _put(client: Any, tarball: Path, bucket: str, key: str) -> None:
    """Upload unless an object of that name (it holds the content's hash) and size is there."""
    try:
        if _size(client, bucket, key) != tarball.stat().st_size:
            client.put_object(Bucket=bucket, Key=key, Body=tarball.read_bytes())
    except (BotoCoreError, ClientError) as error:
        raise RemoteError(
            f"the roles could not be put into s3://{bucket}/{key}: {error}"
        ) from error


def _size(client: Any, bucket: str, key: str) -> int | None:
    try:
        return int(client.head_object(Bucket=bucket, Key=key)["ContentLength"])
    except ClientError as error:
        if error.response["ResponseMetadata"]["HTTPStatusCode"] == HTTPStatus.NOT_FOUND:
            return None
        raise


if __name__ == "__main__":
    print(build())
