"""Where a run on nodes lies: a bucket, by the S3 keys that its nodes have, and its cloud.

This machine keeps a note of each, so that looking at a run needs nothing but its name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Any

from mayfly.clouds import CloudProfile, load_cloud
from mayfly.credentials import S3Settings
from mayfly.errors import UserError
from mayfly.local.paths import find_paths
from mayfly.recipe import runs
from mayfly.recipe.runs import PREFIX, Place

NOTE = "nodes.json"
Say = Callable[[str], None]


def open_place(
    name: str, cloud: str, store: str | None, environ: MutableMapping[str, str], say: Say
) -> Place:
    """The place of a run on a cloud's nodes, whether or not it is there yet.

    Starts the local platform's services where they are missing. Raises UserError for a directory,
    which nodes cannot see, and without a bucket.
    """
    profile = load_cloud(cloud)
    base = bucket_of(profile, store, environ)
    settings = _s3_of(cloud, environ, say)
    return _place(f"{base}/{PREFIX}/{name}", name, settings, environ)


def _s3_of(cloud: str, environ: MutableMapping[str, str], say: Say) -> S3Settings:
    """The S3 settings of a cloud, whose services are started where they are missing."""
    from mayfly.services import open_services  # noqa: PLC0415 (a run on this machine needs none)

    return open_services(cloud, environ, say, need_im=False).s3


def bucket_of(profile: CloudProfile, store: str | None, environ: Mapping[str, str]) -> str:
    """The address below which runs on a cloud lie, without a slash at its end."""
    given = store or environ.get("MAYFLY_BUCKET") or profile.bucket
    if given is None:
        raise UserError(
            f"no bucket for the run: cloud {profile.name!r} has no default",
            "give --store s3://bucket, or MAYFLY_BUCKET",
        )
    base = runs.base_address(given, environ)
    if not base.startswith("s3://"):
        raise UserError(f"--store {given!r} is a directory, and nodes see only S3", "name a bucket")
    return base


def _place(address: str, name: str, settings: S3Settings, environ: Mapping[str, str]) -> Place:
    return runs.place_at(address, name, settings.plain(), environ)


def note(place: Place, cloud: str, options: Mapping[str, Any]) -> None:
    """Keep on this machine where a run is, and with what it was started."""
    place.state.mkdir(parents=True, exist_ok=True, mode=0o700)
    kept = {"address": place.store.address, "cloud": cloud, **options}
    (place.state / NOTE).write_text(json.dumps(kept), encoding="utf-8")


def noted(name: str, environ: Mapping[str, str], store: str | None = None) -> dict[str, Any] | None:
    """What this machine has kept of a run of this name, the latest; None for a run without nodes.

    With `store`, only of one that lies there.
    """
    found = (find_paths(environ).state.parent / PREFIX / name).glob(f"*/{NOTE}")
    for path in sorted(found, key=_age):
        kept: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if (
            store is None
            or kept["address"] == f"{runs.base_address(store, environ)}/{PREFIX}/{name}"
        ):
            return kept
    return None


def _age(path: Path) -> float:
    return -path.stat().st_mtime


def find(name: str, store: str | None, environ: MutableMapping[str, str], say: Say) -> Place:
    """The place of a run that is looked at: as this machine has noted it, else as a run without
    nodes has it."""
    kept = noted(name, environ, store)
    if kept is None:
        return runs.find_place(name, store, environ)
    settings = _s3_of(kept["cloud"], environ, say)
    return _place(kept["address"], name, settings, environ)
