"""Rules about the files themselves: licences, and nothing of one machine in them."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CONNECTORS = sorted((ROOT / "scripts/im_connectors").rglob("*.py"))


def tracked() -> list[Path]:
    listing = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True
    ).stdout
    return [
        ROOT / name for name in listing.decode().split("\0") if name and (ROOT / name).is_file()
    ]


@pytest.mark.parametrize("path", CONNECTORS, ids=lambda path: path.name)
def test_what_subclasses_im_is_gpl(path: Path):
    assert "SPDX-License-Identifier: GPL-3.0-or-later" in path.read_text()[:600]


def test_gpl_stays_in_its_directory():
    package = [*(ROOT / "scripts/mayfly").rglob("*.py"), *(ROOT / "training").rglob("*.py")]
    assert [
        p for p in package if re.search(r"^\s*(from|import) IM\b", p.read_text(), re.MULTILINE)
    ] == []


def test_no_secret_and_no_private_key_in_the_tree():
    pattern = re.compile(rb"AKIA[0-9A-Z]{16}|-----BEGIN [A-Z ]*PRIVATE KEY-----\n[A-Za-z0-9+/]{40}")
    assert [str(path) for path in tracked() if pattern.search(path.read_bytes())] == []


def test_every_change_since_the_last_release_has_a_fragment():
    assert list((ROOT / "changelogs/fragments").glob("*.yml"))
