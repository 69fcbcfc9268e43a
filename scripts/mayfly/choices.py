"""The places and types that a job would take, as one complete spec for each: pure."""

from __future__ import annotations

from mayfly.clouds import CloudProfile, notices
from mayfly.errors import UserError
from mayfly.failover import Pool
from mayfly.node_types import plan_nodes
from mayfly.places import Target
from mayfly.spec import Choice, ClusterSpec


def choices(spec: ClusterSpec, profile: CloudProfile) -> list[ClusterSpec]:
    """Return a spec for each entry of `any_of` or `ordered`; the spec alone without them.

    Raises UserError for an entry that names what the cloud has not.
    """
    key, entries = ("any_of", spec.any_of) if spec.any_of else ("ordered", spec.ordered)
    if not entries:
        return [spec]
    if profile.instances == "none":
        raise UserError(
            f"{key} has {len(entries)} offers, and cloud {profile.name!r} has neither regions nor"
            " types to choose from",
            f"leave {key} out, or pick another cloud",
        )
    made = [applied(entry, spec) for entry in entries]
    for number, (entry, one) in enumerate(zip(entries, made, strict=True)):
        for name in _named(entry):
            unknown = [said for said in notices(one, profile) if said.startswith(f"{name} is ign")]
            if unknown:
                what = unknown[0].replace(" is ignored", "")
                raise UserError(f"{key}.{number}: {what}", f"leave it out of {key}.{number}")
    return made


def applied(entry: Choice, spec: ClusterSpec) -> ClusterSpec:
    """Return the spec with what one entry says; what it leaves out is the job's own."""
    types, nodes = entry.instance, spec.nodes
    ps = nodes.ps.model_copy(update={"instance": types.ps or nodes.ps.instance})
    worker: dict[str, object] = {"instance": types.worker or nodes.worker.instance}
    if entry.spot is not None:
        worker["spot"] = entry.spot
    changes = {
        "region": entry.region or spec.region,
        # A zone goes with its region.
        "zone": entry.zone or (spec.zone if entry.region in (None, spec.region) else None),
        "nodes": nodes.model_copy(
            update={"ps": ps, "worker": nodes.worker.model_copy(update=worker)}
        ),
    }
    return spec.model_copy(update={**changes, "any_of": None, "ordered": None})


def label(target: Target) -> str:
    """Return what tells one offer of a job from another: `eu-west-1, g5.xlarge, spot`."""
    spec = target.spec
    nodes = plan_nodes(spec, target.profile)
    types = dict.fromkeys(f"{group.group} {group.type}" for group in nodes if group.type)
    spot = "spot" if any(group.spot for group in nodes) else None
    parts = [target.place.region or spec.region, spec.zone, *types, spot]
    return ", ".join(part for part in parts if part) or "the job's own"


def pool(target: Target) -> Pool:
    """Return what a quota is counted in."""
    nodes = plan_nodes(target.spec, target.profile)
    region = target.place.region or target.spec.region
    types = tuple((n.group, n.type, n.spot) for n in nodes)
    return Pool(region, types, sum(n.count for n in nodes))


def _named(entry: Choice) -> list[str]:
    """The job's keys that an entry sets."""
    given = {
        "region": entry.region,
        "zone": entry.zone,
        "nodes.ps.instance": entry.instance.ps,
        "nodes.worker.instance": entry.instance.worker,
    }
    return [name for name, value in given.items() if value]
