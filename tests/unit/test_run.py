"""The identity of a run."""

from __future__ import annotations

import re
from datetime import UTC, datetime

from mayfly.run import Run, new_run_id
from mayfly.spec import load_spec


def test_an_id_has_name_time_and_chance():
    moment = datetime(2026, 11, 28, 1, 2, 3, tzinfo=UTC)
    first, second = new_run_id("faces", moment), new_run_id("faces", moment)
    assert re.fullmatch(r"faces-261128-010203-[0-9a-f]{4}", first)
    assert second.startswith("faces-261128-010203-")


def test_the_longest_name_fits():
    assert len(new_run_id("x" * 29)) == 48


def test_the_uri_is_below_the_destination():
    spec = load_spec(None, {"cloud": "local", "bucket": "models/x"}, {})
    run = Run("r-1", "docker://i", "mayfly.training,1.0.0", None, "us-east-1")
    assert run.uri(spec) == "s3://models/x/r-1/"
