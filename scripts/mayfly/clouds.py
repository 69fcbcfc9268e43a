"""The clouds that nodes can be made on: one data file each, radl/clouds/<cloud>.yml.

A new cloud is a new file; there is no code per cloud.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mayfly.errors import MayflyError, unknown
from mayfly.spec import CHECKOUT, ClusterSpec, load_spec

CLOUDS = CHECKOUT / "radl/clouds"


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class NodeSize(_Model):
    """The least that a node of one group needs."""

    cpu: int = Field(ge=1)
    """Cores."""
    memory_mb: int = Field(ge=512)
    """Memory in MiB."""
    disk_gb: int | None = Field(default=None, ge=1)
    """System disk in GB; None leaves it to the cloud."""


class CloudProfile(_Model):
    """What is particular to one cloud."""

    name: str
    """The name of its file."""
    title: str
    """What it is, for people."""
    image: str | None
    """IM's image URL, such as `aws://us-east-1/ami-…`; None when the platform makes the image."""
    user: str | None
    """Login user of the image; None when the connector sets it."""
    sizes: dict[Literal["ps", "worker"], NodeSize]
    """Default size of each group's nodes."""
    instance_types: bool
    """The cloud sells instance types and spot capacity in regions (false: these are ignored)."""
    public_workers: bool = False
    """Workers need a public address too, where the private network has no way out."""
    needs_confirmation: bool
    """Ask, or want --yes, before anything is made: it costs money."""
    collection: Literal["url", "bucket", "galaxy"]
    """How nodes get our roles: `url` (the local S3 server's public bucket), `bucket` (the run's
    bucket, by an expiring URL) or `galaxy` (the released version)."""
    bucket: str | None = None
    """Bucket for data and models when none is given."""


def known_clouds(directory: Path = CLOUDS) -> list[str]:
    """The names of all clouds, sorted."""
    return sorted(path.stem for path in directory.glob("*.yml"))


def load_cloud(name: str, directory: Path = CLOUDS) -> CloudProfile:
    """The profile of the cloud `name`. Raises UserError naming the known ones."""
    known = known_clouds(directory)
    if name not in known:
        raise unknown("cloud", name, known, hint="pick one, or add a file to radl/clouds/")
    path = directory / f"{name}.yml"
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        return CloudProfile.model_validate({"name": name, **content})
    except (yaml.YAMLError, ValidationError, TypeError) as error:
        raise MayflyError(f"{path} is not a cloud profile: {error}") from error


def load_job(
    file: Path | None, overrides: Mapping[str, Any], environ: Mapping[str, str]
) -> tuple[ClusterSpec, CloudProfile]:
    """The complete spec (buckets filled in) and its cloud's profile; see `load_spec`.

    Raises UserError for what is wrong or missing in the job.
    """
    spec = load_spec(file, overrides, environ)
    profile = load_cloud(spec.cloud)
    return spec.in_bucket(profile.bucket), profile


def notices(spec: ClusterSpec, profile: CloudProfile) -> list[str]:
    """What the job asks for and this cloud cannot give: one line each, for the plan."""
    if profile.instance_types:
        return []
    asked = {
        "region": spec.region,
        "nodes.ps.instance": spec.nodes.ps.instance,
        "nodes.ps.spot": spec.nodes.ps.spot,
        "nodes.worker.instance": spec.nodes.worker.instance,
        "nodes.worker.spot": spec.nodes.worker.spot,
    }
    return [
        f"{key} is ignored: cloud {profile.name!r} has no regions, instance types or spot nodes"
        for key, value in asked.items()
        if value
    ]
