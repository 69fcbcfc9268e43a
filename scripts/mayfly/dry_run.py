"""A run's artefacts without touching anything: no service is started, asked or told.

What only `deploy` can find out is marked in them (see `unresolved`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mayfly import collection, images, inventory
from mayfly.clouds import CloudProfile
from mayfly.places import Place, Target
from mayfly.radl_render import render, write_radl
from mayfly.run import Run, new_run_id
from mayfly.spec import ClusterSpec
from mayfly.steps import load_stages
from mayfly.unresolved import mark

_DEFAULT_REGION = "us-east-1"


@dataclass(frozen=True)
class Artefacts:
    """What was written."""

    run: Run
    uri: str
    radl: Path | None = None
    variables: Path | None = None
    command: str | None = None
    """What runs the job on machines of the user's own."""

    def document(self, spec: ClusterSpec, profile: CloudProfile) -> dict[str, Any]:
        """Return what `plan` says of them."""
        return {
            "run": self.run.id,
            "run_uri": self.uri,
            "radl": str(self.radl) if self.radl else None,
            "variables": str(self.variables) if self.variables else None,
            "command": self.command,
            "image": images.describe(spec, profile),
        }


def write(
    target: Target, build: Path, environ: Mapping[str, str], hosts: Path | None = None
) -> Artefacts:
    """Write the RADL (or the variables for the inventory `hosts`) into `build`."""
    spec, profile = target.spec, target.profile
    run = _run(target, environ)
    uri = run.uri(spec)
    if profile.backend == "inventory":
        path = build / f"{run.id}.vars.yml"
        inventory.write_variables(spec, run, path)
        return Artefacts(run, uri, variables=path, command=inventory.command(hosts, path))
    path = build / f"{run.id}.radl"
    write_radl(render(spec, profile, run, load_stages(), dry_run=True), path)
    return Artefacts(run, uri, radl=path)


def _run(target: Target, environ: Mapping[str, str]) -> Run:
    """The run with marks for what the local platform would say."""
    spec, profile, place = target.spec, target.profile, target.place
    on_platform = profile.collection == "url"
    endpoint = environ.get("MAYFLY_S3_ENDPOINT") or None
    region = environ.get("MAYFLY_S3_REGION") or environ.get("AWS_REGION") or _DEFAULT_REGION
    return Run(
        id=new_run_id(spec.name),
        image=images.unasked(spec, profile, place),
        collection=_collection(spec, profile),
        s3_endpoint=endpoint or (mark("s3_endpoint") if on_platform else None),
        s3_region=region,
        session_token=bool(environ.get("AWS_SESSION_TOKEN")),
        region=place.values.get("region") or _marked(place, "region"),
    )


def _collection(spec: ClusterSpec, profile: CloudProfile) -> str:
    """The collection's name, where it is known; deploy builds what is to lie in a bucket."""
    names = {"url": mark("collection"), "bucket": collection.SIGNED}
    made = names.get(profile.collection) or collection.galaxy_version()
    return collection.elsewhere(spec) or made


def _marked(place: Place, name: str) -> str | None:
    return mark(name) if name in place.missing else None
