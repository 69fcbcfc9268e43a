"""The RADL of a run, as text: pure, with every value finished before the template sees it.

The result stands alone: the upstream client needs nothing else to make the cluster.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from mayfly import inputs
from mayfly.clouds import CloudProfile
from mayfly.errors import MayflyError
from mayfly.radl_lint import lint
from mayfly.role_vars import role_vars, share
from mayfly.run import Run
from mayfly.spec import CHECKOUT, ClusterSpec
from mayfly.steps import GROUPS, GroupPlay, Stage

TEMPLATES = CHECKOUT / "radl"
# SSH is the only service that is public. TensorFlow's gRPC has no authentication.
PUBLIC_PORTS = "22/tcp"


def render(spec: ClusterSpec, profile: CloudProfile, run: Run, stages: tuple[Stage, ...]) -> str:
    """The RADL text. Raises MayflyError when what came out is not RADL that IM takes."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    template = environment.get_template("cluster.radl.j2")
    text = template.render(context(spec, profile, run, stages))
    findings = lint(text)
    if findings:
        raise MayflyError(f"the rendered RADL is wrong, line {findings[0]}", "this is our bug")
    return text


def write_radl(text: str, path: Path) -> None:
    """Write a rendered RADL, which holds no secret, making its directory."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def context(
    spec: ClusterSpec, profile: CloudProfile, run: Run, stages: tuple[Stage, ...]
) -> dict[str, Any]:
    """What the template lays out."""
    variables = role_vars(spec, run)
    return {
        "run": run.id,
        "cloud": profile.name,
        "inputs": [inputs.S3_ACCESS_KEY_ID, inputs.S3_SECRET_ACCESS_KEY],
        "public_ports": PUBLIC_PORTS,
        "systems": [_system(group, spec, profile, run) for group in GROUPS if spec.count(group)],
        "blocks": [
            {
                "name": f"{stage.name}_{play.group}",
                "group": play.group,
                "step": stage.number,
                "recipe": _recipe(play, variables),
            }
            for stage in stages
            for play in stage.plays
            if spec.count(play.group)
        ],
    }


def _system(group: str, spec: ClusterSpec, profile: CloudProfile, run: Run) -> dict[str, Any]:
    nodes = spec.nodes.ps if group == "ps" else spec.nodes.worker
    size = profile.sizes["ps" if group == "ps" else "worker"]
    return {
        "name": group,
        "count": nodes.count,
        "cpu": size.cpu,
        "memory_mb": size.memory_mb,
        "disk_gb": size.disk_gb,
        "instance": nodes.instance if profile.instance_types else None,
        "spot": nodes.spot and profile.instance_types,
        # The private network comes first: it is the one whose name and address nodes use.
        "networks": ["private", "public"]
        if group == "ps" or profile.public_workers or not spec.count("ps")
        else ["private"],
        "image": run.image,
        "user": profile.user,
        "collection": f"ansible.collections.{run.collection}",
    }


def _recipe(play: GroupPlay, variables: dict[str, Any]) -> str:
    """A block's play as YAML, without what IM adds itself (hosts, become, gather_facts)."""
    content: dict[str, Any] = {"roles": list(play.roles)}
    settings = {**share(variables, play.role_names), **play.variables}
    if settings:
        content["vars"] = settings
    return yaml.safe_dump([content], sort_keys=False, width=1000)
