"""Machines of the user's own: an Ansible inventory in place of RADL, and the job as variables.

The playbooks are the same as everywhere; who runs them, and what becomes of a run: package `own`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mayfly import inputs
from mayfly.errors import UserError
from mayfly.role_vars import role_vars
from mayfly.run import Run
from mayfly.spec import CHECKOUT, ClusterSpec

KEYS = {
    inputs.S3_ACCESS_KEY_ID: "AWS_ACCESS_KEY_ID",
    inputs.S3_SECRET_ACCESS_KEY: "AWS_SECRET_ACCESS_KEY",
    inputs.S3_SESSION_TOKEN: "AWS_SESSION_TOKEN",
}


@dataclass(frozen=True)
class Hosts:
    """The machines of an inventory by group, sorted as the roles sort them."""

    ps: tuple[str, ...]
    worker: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """All of them, by group and name."""
        return (*self.ps, *self.worker)

    @property
    def namenode(self) -> str:
        """The one on which the roles start HDFS' NameNode."""
        return self.names[0]


def read(path: Path) -> Hosts:
    """Return the hosts of the groups `ps` and `worker`, as Ansible reads the inventory.

    Raises UserError when it is no inventory, has no workers, or has a machine in both groups.
    """
    return hosts_of(listed(path), path)


def hosts_of(content: Mapping[str, Any], path: Path) -> Hosts:
    """Return the hosts in what `listed` returned for the inventory at `path`; see `read`."""
    hosts = Hosts(_members(content, "ps"), _members(content, "worker"))
    if not hosts.worker:
        raise UserError(f"group 'worker' of {path} is empty", "list the machines that train there")
    both = sorted({*hosts.ps} & {*hosts.worker})
    if both:
        raise UserError(
            f"{both[0]!r} is in both groups of {path}", "a machine is either ps or worker"
        )
    return hosts


def with_hosts(spec: ClusterSpec, hosts: Hosts) -> tuple[ClusterSpec, list[str]]:
    """Return the spec with the inventory's numbers of nodes, and what that changed, as notices.

    Raises UserError when the engine wants parameter servers and there are none, or the reverse.
    """
    counts = {"ps": len(hosts.ps), "worker": len(hosts.worker)}
    if (counts["ps"] > 0) != (spec.count("ps") > 0):
        raise UserError(
            f"the inventory has {counts['ps']} machines in group 'ps'",
            f"engine {spec.trainer.engine} wants {'one or more' if spec.count('ps') else 'none'}",
        )
    changed = [
        f"nodes.{group}.count is {spec.count(group)}, the inventory has {count}: it decides"
        for group, count in counts.items()
        if spec.count(group) != count
    ]
    nodes = spec.nodes.model_copy(
        update={
            "ps": spec.nodes.ps.model_copy(update={"count": counts["ps"]}),
            "worker": spec.nodes.worker.model_copy(update={"count": counts["worker"]}),
        }
    )
    return spec.model_copy(update={"nodes": nodes}), changed


def variables(spec: ClusterSpec, run: Run) -> dict[str, Any]:
    """Return the roles' variables; keys are looked up in the environment of ansible-playbook."""
    timed = role_vars(spec, run).items()
    values = {name: value for name, value in timed if not name.startswith("deadman_")}
    values["deadman_enabled"] = False  # the machines are there for others, too
    lookups = {
        inputs.placeholder(name): f"{{{{ lookup('ansible.builtin.env', '{variable}') }}}}"
        for name, variable in KEYS.items()
    }
    return {
        name: lookups.get(value, value) if isinstance(value, str) else value
        for name, value in values.items()
    }


def write_variables(spec: ClusterSpec, run: Run, path: Path) -> None:
    """Write the variables, which hold no secret, making the directory."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text(spec, run))


def text(spec: ClusterSpec, run: Run) -> str:
    """Return the variables as YAML."""
    made = yaml.safe_dump(variables(spec, run), sort_keys=False, width=1000, allow_unicode=True)
    return f"---\n# The job {run.id} for: ansible-playbook -e @THIS_FILE\n{made}"


def command(inventory: Path | None, variables_file: Path) -> str:
    """Return the command that runs the job."""
    return (
        f"ansible-playbook -i {inventory or 'INVENTORY'} -e @{variables_file} mayfly.training.site"
    )


def listed(path: Path) -> dict[str, Any]:
    """Return the inventory as `ansible-inventory --list` tells it: secrets may be among it.

    Raises UserError when it is none.
    """
    if not path.exists():
        raise UserError(
            f"there is no inventory {path}", "see inventory/example/hosts.yml for the form"
        )
    words = [sys.executable, "-m", "ansible", "inventory", "-i", str(path), "--list"]
    environment = {**os.environ, "ANSIBLE_CONFIG": str(CHECKOUT / "ansible.cfg")}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    try:
        content = json.loads(done.stdout) if done.returncode == 0 else None
    except ValueError:
        content = None
    if not isinstance(content, dict):
        last = " ".join(done.stderr.split()[-30:])
        raise UserError(f"{path} is not an inventory: {last}", "see inventory/example/hosts.yml")
    return content


def _members(content: Mapping[str, Any], group: str) -> tuple[str, ...]:
    """The hosts of a group and of those below it."""
    entry = content.get(group, {})
    below = [host for child in entry.get("children", []) for host in _members(content, child)]
    return tuple(sorted({*entry.get("hosts", []), *below}))
