"""Where Debian packages come from."""

from __future__ import annotations

from pathlib import Path

import pytest

from mayfly.errors import UserError
from mayfly.local.mirrors import find_mirrors

MIRROR = "http://mirror.example/debian"
LISTS = {
    "sources.list": f"# deb http://old.example/debian x main\ndeb [trusted=yes] {MIRROR} x main\n",
    "sources.list.d/debian.sources": f"Types: deb\nURIs: {MIRROR}/\nSuites: x\n",
}


@pytest.mark.parametrize("name", LISTS)
def test_this_machines_mirror_is_used(tmp_path: Path, name: str):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(LISTS[name])
    assert find_mirrors({}, tmp_path) == (MIRROR, f"{MIRROR}-security")


def test_settings_come_first(tmp_path: Path):
    (tmp_path / "sources.list").write_text(LISTS["sources.list"])
    settings = {
        "MAYFLY_DEBIAN_MIRROR": "http://a.example/debian",
        "MAYFLY_DEBIAN_SECURITY_MIRROR": "http://b.example/security",
    }
    assert find_mirrors(settings, tmp_path) == tuple(settings.values())


def test_a_machine_without_debians_archive_says_what_to_set(tmp_path: Path):
    (tmp_path / "sources.list").write_text("deb http://archive.example/ubuntu jammy main\n")
    with pytest.raises(UserError, match="MAYFLY_DEBIAN_MIRROR"):
        find_mirrors({}, tmp_path)
