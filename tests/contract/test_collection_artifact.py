"""The built collection: what is in it, and that a stranger can install and use it."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from mayfly import collection

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
PLAYBOOKS = sorted(path.stem for path in (ROOT / "playbooks").glob("*.yml"))


@pytest.fixture(scope="module")
def tarball() -> Path:
    return collection.build(ROOT)


def test_contents(tarball: Path):
    with tarfile.open(tarball) as archive:
        names = set(archive.getnames())
    must = {
        "LICENSE",
        "README.md",
        "MANIFEST.json",
        "meta/runtime.yml",
        *(f"playbooks/{name}.yml" for name in PLAYBOOKS),
        "training/mayfly_train/__main__.py",
        "training/programs/cifar10.py",
        "training/programs/shared/sigterm.py",
        "roles/hadoop/tasks/main.yml",
        "radl/cluster.radl.j2",
    }
    assert must - names == set()
    strange = [
        name
        for name in names
        if "molecule" in Path(name).parts or name.startswith((".", "tests", "scripts", "build"))
    ]
    assert strange == []
    assert [n for n in names if "__pycache__" in n or n.endswith((".pyc", ".egg-info"))] == []


def test_installs_and_its_playbooks_run_by_fqcn(tarball: Path, tmp_path: Path):
    environment = {
        **os.environ,
        "ANSIBLE_COLLECTIONS_PATH": str(tmp_path / "collections"),
        "ANSIBLE_HOME": str(tmp_path / "home"),
        "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
    }
    install = [BIN / "ansible-galaxy", "collection", "install", "--offline", str(tarball)]
    subprocess.run(install, check=True, capture_output=True, env=environment, cwd=tmp_path)
    inventory = ROOT / "inventory/example/hosts.yml"
    names = [f"mayfly.training.{name}" for name in PLAYBOOKS]
    command = [BIN / "ansible-playbook", "-i", str(inventory), "--syntax-check", *names]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("playbook: ") == len(PLAYBOOKS)
