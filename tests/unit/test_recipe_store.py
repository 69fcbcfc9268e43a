"""Stores: what one says of an object, and what a power cut leaves of it."""

from __future__ import annotations

import os
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from mayfly_train.recipe.store import DirectoryStore, S3Store
from mayfly_train.s3 import parse_uri


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


def test_an_age_is_told_by_the_clock_of_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store = DirectoryStore(tmp_path)
    assert store.age("head.json") is None
    store.write("head.json", b"{}")
    written = (tmp_path / "head.json").stat().st_mtime
    os.utime(tmp_path / "head.json", (0, written - 100))
    monkeypatch.setattr(time, "time", lambda: written + 86400)
    assert 100 <= (store.age("head.json") or 0) < 86400
    assert [path.name for path in tmp_path.iterdir()] == ["head.json"]


def test_an_age_is_told_by_the_clock_of_s3(client: Any):
    class FakeClient:
        """Answers by a clock of last century."""

        def head_object(self, **_: str) -> Any:
            date = "Fri, 31 Dec 1999 23:59:59 GMT"
            then = datetime(1999, 12, 31, 23, 59, 30, tzinfo=timezone.utc)
            metadata = {"HTTPHeaders": {"date": date}}
            return {"LastModified": then, "ResponseMetadata": metadata}

    uri = parse_uri("s3://runs/one")
    assert S3Store(FakeClient(), uri).age("head.json") == 29  # type: ignore[arg-type]
    client.create_bucket(Bucket="runs")
    store = S3Store(client, uri)
    assert store.age("head.json") is None
    store.write("head.json", b"{}")
    assert store.age("head.json") is not None
