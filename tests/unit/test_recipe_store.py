"""Stores: what one says of an object, and what a power cut leaves of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mayfly_train.recipe.store import DirectoryStore


def test_a_marker_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Else a power cut leaves an empty one, and nobody can go on with the run."""
    happened = []
    sync, link = os.fsync, os.link

    def fake_sync(descriptor: int) -> None:
        happened.append(f"{os.fstat(descriptor).st_size} bytes are on the disk")
        sync(descriptor)

    def fake_link(old: Path, new: Path) -> None:
        happened.append(f"{new.name} is there")
        link(old, new)

    monkeypatch.setattr(os, "fsync", fake_sync)
    monkeypatch.setattr(os, "link", fake_link)
    store = DirectoryStore(tmp_path)
    assert store.create("done/0.json", b"{}\n")
    assert happened == ["3 bytes are on the disk", "0.json is there"]
    assert not store.create("done/0.json", b"other")
    assert store.read("done/0.json") == b"{}\n"
