"""The order of work, read from playbooks/site.yml: stages, and in each one play per group.

The nodes of a recipe have an order of their own, in playbooks/recipe.yml.

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
SITE = "site.yml"
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


def load_stages(
    directory: Path = PLAYBOOKS, entry: str = SITE, groups: tuple[str, ...] = GROUPS
) -> tuple[Stage, ...]:
    """The stages of site.yml, or another `entry`, in `directory`, with numbers from 1."""
    return read_stages(
        lambda name: yaml.safe_load((directory / name).read_text(encoding="utf-8")), entry, groups
    )


def read_stages(
    read: Callable[[str], Any], entry: str = SITE, groups: tuple[str, ...] = GROUPS
) -> tuple[Stage, ...]:
    """The stages that `read(entry)` imports; `read` returns a playbook's parsed content.

    Raises MayflyError when a playbook holds what a configure block cannot.
    """
    files = [_imported_file(entry, item) for item in read(entry)]
    return tuple(
        Stage(number, Path(file).stem, tuple(_group_plays(file, read(file), groups)))
        for number, file in enumerate(files, start=1)
    )


def _imported_file(entry: str, item: dict[str, Any]) -> str:
    for key in _IMPORTS:
        if key in item:
            return str(item[key])
    raise MayflyError(f"{entry} holds something other than imports of the stages' playbooks")


def _group_plays(
    file: str, plays: list[dict[str, Any]], groups: tuple[str, ...]
) -> list[GroupPlay]:
    for play in plays:
        strange = sorted(set(play) - _PLAY_KEYS)
        if strange:
            raise MayflyError(f"{file}: a play may hold hosts, roles and vars, not {strange[0]!r}")
    merged = []
    for group in groups:
        own = [play for play in plays if group in _groups(file, play, groups)]
        if own:
            merged.append(_merge(group, own))
    return merged


def _groups(file: str, play: dict[str, Any], known: tuple[str, ...]) -> tuple[str, ...]:
    names = re.split(r"[:,]", str(play.get("hosts", "")))
    groups = known if names == ["all"] else tuple(name.strip() for name in names)
    if not set(groups) <= set(known):
        each = ", ".join(known)
        raise MayflyError(
            f"{file}: hosts may be all, {each} or {':'.join(known)}, not {play['hosts']!r}"
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
