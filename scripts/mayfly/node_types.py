"""Which instance type the nodes of a group get, and whether it is enough for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mayfly.clouds import CloudProfile, Group, InstanceType, NodeSize
from mayfly.errors import UserError, nearest
from mayfly.spec import ClusterSpec, NodeGroup

GROUPS: tuple[Group, ...] = ("ps", "worker")


@dataclass(frozen=True)
class Nodes:
    """The nodes of one group, as a cloud will be asked for them."""

    group: Group
    count: int
    type: str | None
    """The instance type; None where IM picks one, or there are none."""
    size: InstanceType | None
    """What each node has: exactly, when `type` is known; at least, without a type; None for a type
    that nobody has described, and for machines of the user's own."""
    gpu: int
    """GPUs that each node must have."""
    disk_gb: int | None
    spot: bool
    public: bool
    """Each has a public address."""


def plan_nodes(
    spec: ClusterSpec, profile: CloudProfile, known: Mapping[str, InstanceType] | None = None
) -> tuple[Nodes, ...]:
    """The nodes of a run, group by group.

    `known` has the sizes of types that the provider was asked about, beside the cloud file's own.
    Raises UserError for a type without the GPUs that are asked for, or when no type has as many.
    """
    types = {**profile.types, **(known or {})}
    return tuple(_nodes(group, spec, profile, types) for group in GROUPS if spec.count(group))


def undescribed(nodes: tuple[Nodes, ...]) -> list[str]:
    """The types of which it is not known what they have."""
    return list(dict.fromkeys(group.type for group in nodes if group.type and not group.size))


def type_notices(nodes: tuple[Nodes, ...], profile: CloudProfile) -> list[str]:
    """One line for each type that the cloud's file does not have and nobody described."""
    if profile.instances != "listed":
        return []
    notices = []
    for name in undescribed(nodes):
        guess = nearest(name, profile.types)
        meant = f" (did you mean {guess!r}?)" if guess else ""
        notices.append(
            f"type {name!r} is not in radl/clouds/{profile.name}.yml{meant}:"
            " its size is not known, and deploy asks the provider where it can"
        )
    return notices


def _nodes(
    group: Group, spec: ClusterSpec, profile: CloudProfile, types: Mapping[str, InstanceType]
) -> Nodes:
    wanted = spec.nodes.ps if group == "ps" else spec.nodes.worker
    least = profile.sizes[group]
    chosen = _choose(group, wanted, least, profile, types)
    at_least = InstanceType(cpu=least.cpu, memory_mb=least.memory_mb)
    return Nodes(
        group=group,
        count=wanted.count,
        type=chosen,
        size=types.get(chosen) if chosen else at_least if profile.backend == "im" else None,
        gpu=wanted.gpu if profile.gpu != "none" else 0,
        disk_gb=least.disk_gb,
        spot=bool(wanted.spot) and profile.spot,
        public=profile.has_public_address(group, spec),
    )


def _choose(
    group: Group,
    wanted: NodeGroup,
    least: NodeSize,
    profile: CloudProfile,
    types: Mapping[str, InstanceType],
) -> str | None:
    """The type by name: the job's own, or the first listed one that is large enough."""
    if profile.instances in ("none", "sizes"):
        return None
    if wanted.instance:
        _require_gpus(group, wanted, types)
        return wanted.instance
    if profile.instances == "flavors":
        return None
    for name, size in profile.types.items():
        enough = size.cpu >= least.cpu and size.memory_mb >= least.memory_mb
        # A node that needs no GPU gets none: they are what costs most.
        if enough and (size.gpu >= wanted.gpu if wanted.gpu else not size.gpu):
            return name
    most = max(size.gpu for size in profile.types.values())
    raise UserError(
        f"nodes.{group}.gpu is {wanted.gpu}: no type in radl/clouds/{profile.name}.yml has as many",
        f"ask for {most} or fewer, or name a type with nodes.{group}.instance",
    )


def _require_gpus(group: Group, wanted: NodeGroup, types: Mapping[str, InstanceType]) -> None:
    size = types.get(str(wanted.instance))
    if size is None or size.gpu >= wanted.gpu:
        return
    able = ", ".join([name for name, size in types.items() if size.gpu >= wanted.gpu][:4])
    raise UserError(
        f"nodes.{group}.gpu is {wanted.gpu}, and type {wanted.instance!r} has {size.gpu or 'none'}",
        f"leave gpu out, or take {able or 'a type of the provider that has as many'}",
    )
