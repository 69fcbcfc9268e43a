"""The default data: what is left of conversions that were killed."""

from __future__ import annotations

import os
import time
from pathlib import Path

from mayfly import fashion_mnist


def test_a_killed_conversion_is_removed_by_a_later_one(tmp_path: Path, monkeypatch):
    source = tmp_path / "source"
    source.mkdir()
    monkeypatch.setattr(fashion_mnist, "_source", lambda _report: source)
    monkeypatch.setattr(
        fashion_mnist.convert, "convert", lambda _s, to, *_: (to / "manifest.json").write_text("{}")
    )
    datasets = tmp_path / "cache/datasets"
    abandoned, at_work = datasets / "making-old", datasets / "making-new"
    for directory in (abandoned, at_work):
        directory.mkdir(parents=True)
        (directory / "part").write_text("x")
    os.utime(abandoned, (time.time() - 4000,) * 2)
    made = fashion_mnist.prepare(tmp_path / "cache", lambda *_: None)
    assert (made / "manifest.json").exists()
    assert {path.name for path in datasets.iterdir()} == {"making-new", made.name}
