"""Every role keeps the same promises: the files it has, and specs that tell the truth."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
ROLES = sorted(path for path in (ROOT / "roles").iterdir() if path.is_dir())
FILES = (
    "README.md",
    "defaults/main.yml",
    "meta/argument_specs.yml",
    "meta/main.yml",
    "tasks/main.yml",
    "molecule/default/molecule.yml",
    "molecule/default/converge.yml",
    "molecule/default/verify.yml",
)


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def test_the_roles_are_there():
    names = {role.name for role in ROLES}
    assert names >= {
        "agent",
        "dataset",
        "deadman",
        "engine",
        "gpu",
        "hadoop",
        "horovod",
        "juicefs",
        "model_export",
        "runtime",
        "trainer",
    }


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name)
def test_file_set(role: Path):
    assert [name for name in FILES if not (role / name).is_file()] == []


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name)
def test_specs_equal_defaults(role: Path):
    options = read(role / "meta/argument_specs.yml")["argument_specs"]["main"]["options"]
    declared = {name: option["default"] for name, option in options.items() if "default" in option}
    assert declared == (read(role / "defaults/main.yml") or {})


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name)
def test_variables_are_prefixed_and_described(role: Path):
    options = read(role / "meta/argument_specs.yml")["argument_specs"]["main"]["options"]
    assert [name for name in options if not name.startswith(f"{role.name}_")] == []
    assert [name for name, option in options.items() if not option.get("description")] == []


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name)
def test_readme_is_generated_from_the_specs(role: Path, tmp_path: Path):
    copy = tmp_path / "roles" / role.name
    (tmp_path / "galaxy.yml").write_text((ROOT / "galaxy.yml").read_text())
    for name in ("README.md", "meta/argument_specs.yml", "meta/main.yml"):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_text((role / name).read_text())
    if (ROOT / ".aar_doc.yml").exists():
        (tmp_path / ".aar_doc.yml").write_text((ROOT / ".aar_doc.yml").read_text())
    command = [str(Path(sys.executable).parent / "aar-doc"), str(copy), "markdown"]
    subprocess.run(command, check=True, capture_output=True, cwd=tmp_path)
    assert (copy / "README.md").read_text() == (role / "README.md").read_text(), "run make docs"
