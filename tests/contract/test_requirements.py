"""What nodes install is what the code that runs on them says it needs."""

from __future__ import annotations

from pathlib import Path

import pytest
import tomllib
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
FILES = ROOT / "roles/agent/files"
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
EXTRAS = {
    "requirements.txt": ("dependencies",),
    "requirements-convert.txt": ("convert",),
    "requirements-recipe.txt": ("recipe", "recipes"),
}


def wanted(extras: tuple[str, ...]) -> list[Requirement]:
    """What mayfly_train says that it needs for these."""
    project = tomllib.loads((ROOT / "training/pyproject.toml").read_text())["project"]
    lists = {"dependencies": project["dependencies"], **project["optional-dependencies"]}
    return [Requirement(line) for extra in extras for line in lists[extra]]


def pinned(name: str, python: str) -> dict[str, str]:
    """Versions that a node with that Python gets, by package."""
    environment = {**default_environment(), "python_version": python}
    environment["python_full_version"] = f"{python}.0"
    lines = (FILES / name).read_text().splitlines()
    rules = [Requirement(line) for line in lines if line and not line.startswith("#")]
    here = [rule for rule in rules if rule.marker is None or rule.marker.evaluate(environment)]
    return {canonicalize_name(rule.name): str(rule.specifier)[len("==") :] for rule in here}


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("name", EXTRAS)
def test_a_node_gets_each_package_that_its_code_needs(name, python):
    found = pinned(name, python)
    for rule in wanted(EXTRAS[name]):
        version = found.get(canonicalize_name(rule.name))
        assert version, f"{name} lacks {rule.name} for Python {python}"
        assert rule.specifier.contains(version), f"{name}: {rule.name} {version}, wanted {rule}"
