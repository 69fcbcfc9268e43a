"""The order of work, read from playbooks/site.yml: stages, and in each one play per group.

IM runs each configure block as a play of its own for every node, so a stage's plays are merged
into one per group, and what IM adds itself (hosts, become, gather_facts) is left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mayfly.errors import MayflyError
from mayfly.spec import CHECKOUT

PLAYBOOKS = CHECKOUT / "playbooks"
GROUPS = ("ps", "worker")
_IMPORTS = ("ansible.builtin.import_playbook", "import_playbook")
_PLAY_KEYS = {"name", "hosts", "become", "gather_facts", "any_errors_fatal", "vars", "roles"}


@dataclass(frozen=True)
class GroupPlay:
    """What one stage does on the nodes of one group."""

    group: str
    roles: tuple[str, ...]
    variables: dict[str, Any]

    @property
    def role_names(self) -> tuple[str, ...]:
        """The roles' names without namespace and collection: `hadoop`."""
        return tuple(role.rpartition(".")[2] for role in self.roles)


@dataclass(frozen=True)
class Stage:
    """One step of the order of work, named after its playbook."""

    number: int
    name: str
    plays: tuple[GroupPlay, ...]


def load_stages(directory: Path = PLAYBOOKS) -> tuple[Stage, ...]:
    """The stages of site.yml in `directory`, with numbers from 1."""
    return read_stages(lambda name: yaml.safe_load((directory / name).read_text(encoding="utf-8")))


def read_stages(read: Callable[[str], Any]) -> tuple[Stage, ...]:
    """The stages that `read("site.yml")` imports; `read` returns a playbook's parsed content.

    Raises MayflyError when a playbook holds what a configure block cannot.
    """
    files = [_imported_file(entry) for entry in read("site.yml")]
    return tuple(
        Stage(number, Path(file).stem, tuple(_group_plays(file, read(file))))
        for number, file in enumerate(files, start=1)
    )


def _imported_file(entry: dict[str, Any]) -> str:
    for key in _IMPORTS:
        if key in entry:
            return str(entry[key])
    raise MayflyError("site.yml holds something other than imports of the stages' playbooks")


def _group_plays(file: str, plays: list[dict[str, Any]]) -> list[GroupPlay]:
    for play in plays:
        strange = sorted(set(play) - _PLAY_KEYS)
        if strange:
            raise MayflyError(f"{file}: a play may hold hosts, roles and vars, not {strange[0]!r}")
    merged = []
    for group in GROUPS:
        own = [play for play in plays if group in _groups(file, play)]
        if own:
            merged.append(_merge(group, own))
    return merged


def _groups(file: str, play: dict[str, Any]) -> tuple[str, ...]:
    names = re.split(r"[:,]", str(play.get("hosts", "")))
    groups = GROUPS if names == ["all"] else tuple(name.strip() for name in names)
    if not set(groups) <= set(GROUPS):
        raise MayflyError(
            f"{file}: hosts may be all, ps, worker or ps:worker, not {play['hosts']!r}"
        )
    return groups


def _merge(group: str, plays: list[dict[str, Any]]) -> GroupPlay:
    roles: list[str] = []
    variables: dict[str, Any] = {}
    for play in plays:
        names = [role["role"] if isinstance(role, dict) else role for role in play["roles"]]
        roles += [name for name in names if name not in roles]
        variables |= play.get("vars", {})
    return GroupPlay(group, tuple(roles), variables)
