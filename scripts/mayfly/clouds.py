"""The clouds that nodes can be made on: one data file each, radl/clouds/<cloud>.yml.

A new cloud is a new file; there is no code per cloud but for asking its provider (providers/).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from mayfly.errors import MayflyError, UserError, unknown
from mayfly.spec import CHECKOUT, ClusterSpec, NodeGroup, load_spec
from mayfly.unresolved import mark

CLOUDS = CHECKOUT / "radl/clouds"
Group = Literal["ps", "worker"]
PREFER = "prefer"
SettingName = Literal["region", "host", "vo"]


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


class InstanceType(_Model):
    """What one instance type has."""

    cpu: int = Field(ge=1)
    """Virtual cores."""
    memory_mb: int = Field(ge=512)
    """Memory in MiB."""
    gpu: int = Field(default=0, ge=0)
    """GPUs."""
    gpu_model: str | None = None
    """Which ones."""

    @model_validator(mode="after")
    def _model_goes_with_gpu(self) -> InstanceType:
        if (self.gpu_model is not None) != (self.gpu > 0):
            raise ValueError("gpu_model goes with gpu")
        return self


class ImageRule(_Model):
    """Which image the nodes get: by owner and name, never by an identifier."""

    url: str
    """IM's image URL; {region}, {host}, {vo}, {owner} and {image} are filled in."""
    owner: str | None = None
    """Who must own the image, as the provider names owners."""
    name: str
    """Name, with `*` where the provider's listing is searched."""
    publisher: str
    """The owner, for people."""
    lookup: Literal["ec2", "openstack"] | None = None
    """Whose listing is searched, with the user's keys, for the identifier that goes into the URL;
    None: IM or the cloud finds the newest image of that name by itself."""

    @property
    def scheme(self) -> str:
        """What the URL begins with: `aws`."""
        return self.url.partition("://")[0]

    @property
    def in_region(self) -> bool:
        """Whether the URL names the region first."""
        return self.url.startswith(f"{self.scheme}://{{region}}/")


class Setting(_Model):
    """Something about the place that has to be known: a region, a site, a server."""

    environment: tuple[str, ...] = ()
    """Variables that name it, the first one that is set wins."""
    default: str | None = None
    """What is taken when nothing names it."""
    pattern: str | None = None
    """Regular expression that the whole value must match."""
    example: str
    """What one looks like."""
    needed: bool = True
    """Nothing can be rendered without it."""
    in_job: bool = True
    """The job file can name it."""


class Resource(_Model):
    """A kind of thing that a run makes at the provider."""

    kind: str
    """What it is called there."""
    per: Literal["node", "public_node", "run"]
    """What each one belongs to."""
    count: int = Field(default=1, ge=1)
    """How many of them that has."""


class CloudProfile(_Model):
    """What is particular to one cloud."""

    name: str
    """The name of its file."""
    title: str
    """What it is, for people."""
    exercised: str
    """How far it was tried, honestly."""
    backend: Literal["im", "inventory"] = "im"
    """Who makes the nodes: IM, from RADL, or nobody (an inventory names them)."""
    image: ImageRule | None
    """Image of the nodes; None when the platform makes it, or the machines are there."""
    user: str | None
    """Login user of the image; None when the connector or the inventory sets it."""
    settings: dict[SettingName, Setting] = {}
    """What the image's URL is made of."""
    sizes: dict[Group, NodeSize]
    """Least size of each group's nodes."""
    instances: Literal["listed", "flavors", "sizes", "none"]
    """How a node's size is asked for. `listed`: by a type, by default the first of `types` that is
    large enough. `flavors`: by CPU and memory, or by one of the site's own types. `sizes`: by CPU
    and memory only. `none`: not at all."""
    types: dict[str, InstanceType] = {}
    """Well-known instance types, from small to large. Others may be used, too."""
    gpu: Literal["type", "count", "own", "none"] = "none"
    """How GPUs are asked for: by a type that has them, by their number, of nobody (`own` machines
    have them or are refused), or not at all."""
    spot: bool = False
    """Interruptible nodes can be asked for."""
    spot_needs_own_im: str | None = None
    """Why only our own IM takes such nodes; None: any IM does."""
    no_spot: str | None = None
    """Why none can be had with the IM that is used, though the cloud has them."""
    disk: Literal["size", "flavor", "image", "none"] = "none"
    """How the system disk's size is asked for: as a `size`, as a property of the `flavor`, or not
    at all, being the `image`'s."""
    disk_type: str | None = None
    """Kind of the system disk, where IM's default is a bad one."""
    zones: bool = False
    """A job can choose an availability zone."""
    zone_is_region: bool = False
    """IM reads the region from the availability zone."""
    networks: bool = False
    """A job can name existing networks."""
    public_workers: bool = False
    """Workers need a public address too, where the private network has no way out."""
    prices: Literal["aws", "azure", "free"] | None = None
    """Whose price list can be fetched; `free`: nodes cost nothing; None: only from a file."""
    needs_confirmation: bool
    """Ask, or want --yes, before anything is made: it costs money."""
    collection: Literal["url", "bucket", "none"]
    """How nodes get a checkout's roles: by `url` (from the local S3 server's public bucket), from
    the run's `bucket` (by an expiring URL), or not at all (`none`): Ansible runs here."""
    bucket: str | None = None
    """Bucket for data and models when none is given."""
    first_boot: Literal["cloud-config", "script"] | None = None
    """What IM gives a node to do at its first boot, which is how its dead-man timer is armed before
    anything is installed: cloud-init's configuration, or a script. None: nothing."""
    off_costs: str | None = None
    """What a node still costs that has powered itself off; None: it is gone, or costs nothing."""
    off_is_gone: bool = False
    """A node that our own IM made is gone once it is off, whatever `off_costs` says."""
    creates: tuple[Resource, ...] = ()
    """What a run makes there."""
    quirks: tuple[str, ...] = ()
    """What is good to know, one line each."""

    @model_validator(mode="after")
    def _types_go_with_listed(self) -> CloudProfile:
        if (self.instances == "listed") != bool(self.types):
            raise ValueError("types go with instances: listed")
        return self

    def has_public_address(self, group: str, spec: ClusterSpec) -> bool:
        """Whether the nodes of a group get a public address."""
        return group == "ps" or self.public_workers or not spec.count("ps")


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
    file: Path | None,
    overrides: Mapping[str, Any],
    environ: Mapping[str, str],
    *,
    dry_run: bool = False,
) -> tuple[ClusterSpec, CloudProfile]:
    """The complete spec (buckets filled in) and its cloud's profile; see `load_spec`.

    Raises UserError for what is wrong or missing in the job; a dry run may leave out the bucket.
    """
    return completed(load_spec(file, overrides, environ), environ, dry_run=dry_run)


def completed(
    spec: ClusterSpec, environ: Mapping[str, str], *, dry_run: bool = False
) -> tuple[ClusterSpec, CloudProfile]:
    """The spec with its buckets filled in, and its cloud's profile; see `load_job`."""
    profile = _with_im(load_cloud(spec.cloud), environ)
    _refuse_what_it_cannot_give(spec, profile)
    if dry_run and profile.bucket is None and spec.model.destination is None:
        return spec.with_destination(f"s3://{mark('bucket')}/"), profile
    return spec.in_bucket(profile.bucket), profile


def _with_im(profile: CloudProfile, environ: Mapping[str, str]) -> CloudProfile:
    """What the cloud gives through the IM that is used: a foreign one lacks our connectors."""
    if not environ.get("IM_URL", "").strip() or not profile.spot_needs_own_im:
        return profile
    return profile.model_copy(update={"spot": False, "no_spot": profile.spot_needs_own_im})


def notices(spec: ClusterSpec, profile: CloudProfile) -> list[str]:
    """What the job asks for and this cloud cannot give: one line each, for the plan."""
    asked: dict[str, object] = {}
    if profile.image is None or not profile.image.in_region:
        asked["region"] = spec.region  # IM's auth file may name one
    if profile.image is None:
        asked["image"] = spec.image
    if profile.collection == "none":
        asked["collection"] = spec.collection
    if profile.instances in ("none", "sizes"):
        asked["nodes.ps.instance"] = spec.nodes.ps.instance
        asked["nodes.worker.instance"] = spec.nodes.worker.instance
    if profile.instances == "none":
        asked |= {
            f"nodes.{group}.{key}": value
            for group, key, value in _scarce(spec)
            if key == "spot" or profile.gpu == "none"
        }
    if not profile.zones:
        asked["zone"] = spec.zone
    if not profile.networks:
        asked["network.public"] = spec.network.public
        asked["network.private"] = spec.network.private
    ignored = [
        f"{key} is ignored: cloud {profile.name!r} has no such choice"
        for key, value in asked.items()
        if value
    ]
    return ignored + _not_preferred(spec, profile)


def _not_preferred(spec: ClusterSpec, profile: CloudProfile) -> list[str]:
    """One line for each group that had rather been spot nodes, and is on demand."""
    if profile.spot or profile.instances == "none":
        return []
    why = profile.no_spot or f"cloud {profile.name!r} gives no spot nodes through IM"
    return [
        f"nodes.{group}.spot is 'prefer', and its nodes are on demand: {why}"
        for group, key, value in _scarce(spec)
        if key == "spot" and value == PREFER and spec.count(group)
    ]


def _scarce(spec: ClusterSpec) -> list[tuple[Group, str, object]]:
    """What a job may ask of nodes that not every cloud has: group, key and value."""
    groups: tuple[tuple[Group, NodeGroup], ...] = (
        ("ps", spec.nodes.ps),
        ("worker", spec.nodes.worker),
    )
    return [
        (group, key, value)
        for group, nodes in groups
        for key, value in (("gpu", nodes.gpu), ("spot", nodes.spot))
    ]


def _refuse_what_it_cannot_give(spec: ClusterSpec, profile: CloudProfile) -> None:
    """Raise UserError where leaving it out would cost more, or train without what was wanted."""
    if profile.instances == "none":
        return
    can = {"gpu": profile.gpu != "none", "spot": profile.spot}
    for group, key, value in _scarce(spec):
        if value and value != PREFER and not can[key] and spec.count(group):
            if key == "spot" and profile.no_spot:
                raise UserError(
                    f"nodes.{group}.spot is {value!r}, and IM_URL names a foreign IM:"
                    f" {profile.no_spot}",
                    "unset IM_URL, for our own IM takes them; or write prefer, or false",
                )
            able = [name for name in known_clouds() if _has(load_cloud(name), key)]
            raise UserError(
                f"nodes.{group}.{key} is {value!r}: cloud {profile.name!r} gives none through IM",
                f"leave it out, or pick one of {', '.join(able)}",
            )


def _has(profile: CloudProfile, key: str) -> bool:
    return profile.gpu != "none" if key == "gpu" else profile.spot
