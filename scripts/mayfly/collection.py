"""Our roles as a collection tarball: built from the checkout, and put where nodes can fetch it.

IM installs collections on the master node with ansible-galaxy: a Galaxy version, a tag in Git, or
what lies behind an URL.
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
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

import yaml
from botocore.exceptions import BotoCoreError, ClientError

from mayfly import inputs
from mayfly.clouds import CloudProfile
from mayfly.errors import MayflyError, RemoteError
from mayfly.redact import Secret
from mayfly.spec import CHECKOUT, ClusterSpec, collection_name, split_s3_uri

PUBLIC_BUCKET = "mayfly-public"
DIRECTORY = "collection/"  # below model.destination
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
SIGNED = inputs.placeholder(inputs.COLLECTION_URL)


@dataclass(frozen=True)
class Published:
    """How a RADL names the collection."""

    name: str
    """What to write into it, as IM's application names it; holds no secret."""
    url: Secret | None = None
    """What its placeholder stands for, when it is one: whoever knows it may fetch the tarball."""

    @property
    def secrets(self) -> dict[str, Secret]:
        """The values of inputs, by name."""
        return {inputs.COLLECTION_URL: self.url} if self.url else {}


def elsewhere(spec: ClusterSpec, checkout: Path = CHECKOUT) -> str | None:
    """The collection's name when nodes get it without us: the job names it, or this is a release.

    None when it has to be built from the checkout and put where they can fetch it.
    """
    if spec.collection:
        return collection_name(spec.collection)
    return galaxy_version(checkout) if is_release(checkout) else None


def is_release(checkout: Path = CHECKOUT) -> bool:
    """Whether this is what was released: no clone, and nothing was noted since that version."""
    log = checkout / "changelogs/changelog.yaml"
    if (checkout / ".git").exists() or not log.exists():
        return False
    releases = yaml.safe_load(log.read_text(encoding="utf-8")).get("releases", {})
    noted = any((checkout / "changelogs/fragments").glob("*.yml"))
    return _identity(checkout)[2] in releases and not noted


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
) -> Published:
    """Put the tarball where the nodes of a cloud can fetch it, and return how a RADL names it.

    For `url` that is an address in the public bucket at `endpoint`; for `bucket` an URL below
    `destination` (an S3 URI) that expires after a week; for `none` nothing is put anywhere.
    Raises RemoteError when S3 refuses.
    """
    if profile.collection == "none":
        return Published(galaxy_version())
    if profile.collection == "url":
        key = f"{tarball.parent.name}/{tarball.name}"
        _put(client, tarball, PUBLIC_BUCKET, key)
        return Published(f"{str(endpoint).rstrip('/')}/{PUBLIC_BUCKET}/{key}")
    bucket, prefix = split_s3_uri(destination)
    key = f"{prefix}{DIRECTORY}{tarball.parent.name}/{tarball.name}"
    _put(client, tarball, bucket, key)
    url = signed_url(client, bucket, key)
    # ansible-galaxy names its download after what follows the last slash: a signature there would
    # be longer than a file name can be. A fragment is never sent to the server.
    return Published(SIGNED, Secret(f"{url}#/{tarball.name}"))


def signed_url(client: Any, bucket: str, key: str) -> str:
    """An URL by which anybody can read the object, for a week or as long as the keys hold."""
    target = {"Bucket": bucket, "Key": key}
    return str(client.generate_presigned_url("get_object", Params=target, ExpiresIn=_WEEK))


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
