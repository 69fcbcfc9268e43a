"""The RADL of a run, as text: pure, with every value finished before the template sees it.

The result stands alone: the upstream client needs nothing else to make the cluster.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from mayfly import first_boot, inputs
from mayfly.clouds import CloudProfile
from mayfly.errors import MayflyError
from mayfly.node_types import Nodes, plan_nodes
from mayfly.radl_lint import lint
from mayfly.role_vars import role_vars, share
from mayfly.run import Run
from mayfly.spec import CHECKOUT, JUICEFS, ClusterSpec
from mayfly.steps import GROUPS, GroupPlay, Stage

TEMPLATES = CHECKOUT / "radl"
# SSH is the only service that is public. TensorFlow's gRPC has no authentication.
PUBLIC_PORTS = "22/tcp"


@dataclass(frozen=True)
class Contents:
    """What the nodes are made for: the order of work, what their roles are told, and what is asked
    for when they are made."""

    stages: tuple[Stage, ...]
    variables: dict[str, Any]
    inputs: tuple[str, ...]
    source: str = "a job file and playbooks/site.yml"
    names: Mapping[str, str] = field(default_factory=dict)
    """The system of a group, where it is not called like it."""

    def system(self, group: str) -> str:
        """The RADL system, and with it the inventory group, of a group of nodes."""
        return self.names.get(group, group)


def render(
    spec: ClusterSpec,
    profile: CloudProfile,
    run: Run,
    stages: tuple[Stage, ...],
    *,
    dry_run: bool = False,
) -> str:
    """The RADL text of a training job; see `render_contents`."""
    contents = Contents(stages, role_vars(spec, run), tuple(_inputs(spec)))
    return render_contents(spec, profile, run, contents, dry_run=dry_run)


def render_contents(
    spec: ClusterSpec,
    profile: CloudProfile,
    run: Run,
    contents: Contents,
    *,
    dry_run: bool = False,
) -> str:
    """The RADL text. Raises MayflyError when what came out is not RADL that IM takes.

    In a dry run, what is not known yet may be marked as such (see `unresolved`).
    """
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    template = environment.get_template("cluster.radl.j2")
    text = template.render(context(spec, profile, run, contents))
    findings = lint(text, dry_run=dry_run)
    if findings:
        raise MayflyError(f"the rendered RADL is wrong, line {findings[0]}", "this is our bug")
    return text


def write_radl(text: str, path: Path) -> None:
    """Write a rendered RADL, which holds no secret, making its directory."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def context(
    spec: ClusterSpec, profile: CloudProfile, run: Run, contents: Contents
) -> dict[str, Any]:
    """What the template lays out."""
    groups = plan_nodes(spec, profile)
    absent = {contents.system(group) for group in GROUPS if not spec.count(group)}
    return {
        "run": run.id,
        "cloud": profile.name,
        "source": contents.source,
        "inputs": [*inputs.names(run.collection), *contents.inputs],
        "public_ports": PUBLIC_PORTS,
        "networks": {"public": spec.network.public, "private": spec.network.private}
        if profile.networks
        else {"public": None, "private": None},
        "boot": first_boot.recipe(profile, run.end_s),
        "systems": [
            {**_system(nodes, spec, profile, run), "name": contents.system(nodes.group)}
            for nodes in groups
        ],
        "blocks": [
            {
                "name": f"{stage.name}_{play.group}",
                "group": play.group,
                "step": stage.number,
                "recipe": _recipe(play, contents.variables),
            }
            for stage in contents.stages
            for play in stage.plays
            if play.group not in absent
        ],
    }


def _inputs(spec: ClusterSpec) -> list[str]:
    keys = [inputs.S3_ACCESS_KEY_ID, inputs.S3_SECRET_ACCESS_KEY]
    return [*keys, inputs.STORE_PASSWORD] if spec.store == JUICEFS else keys


def _system(nodes: Nodes, spec: ClusterSpec, profile: CloudProfile, run: Run) -> dict[str, Any]:
    size = profile.sizes[nodes.group]
    return {
        "name": nodes.group,
        "count": nodes.count,
        "cpu": size.cpu,
        # IM turns Mi into millions of bytes, and compares them with a flavor's MiB: 8192Mi becomes
        # 8590, for which a flavor of 8 GiB is too small. Containers get their bytes exactly.
        "memory": f"{size.memory_mb}{'Mi' if profile.instances == 'none' else 'M'}",
        "exact": profile.instances == "sizes",
        "disk": profile.disk,
        "disk_gb": nodes.disk_gb,
        "disk_type": profile.disk_type,
        "instance": nodes.type,
        # A type has its GPUs; only where a flavor is searched does their number decide.
        "gpu": nodes.gpu if profile.gpu == "count" and not nodes.type else 0,
        "spot": nodes.spot,
        "zone": _zone(spec, profile, run),
        # The private network comes first: it is the one whose name and address nodes use.
        "networks": ["private", "public"] if nodes.public else ["private"],
        "image": run.image,
        "user": spec.image_user or profile.user,
        "collection": f"ansible.collections.{run.collection}",
    }


def _zone(spec: ClusterSpec, profile: CloudProfile, run: Run) -> str | None:
    """The availability zone; on a cloud where IM looks for the region there, the region."""
    if profile.zone_is_region:
        return run.region
    return spec.zone if profile.zones else None


def _recipe(play: GroupPlay, variables: dict[str, Any]) -> str:
    """A block's play as YAML, without what IM adds itself (hosts, become, gather_facts)."""
    content: dict[str, Any] = {"roles": list(play.roles)}
    settings = {**share(variables, play.role_names), **play.variables}
    if settings:
        content["vars"] = settings
    return yaml.safe_dump([content], sort_keys=False, width=1000)
