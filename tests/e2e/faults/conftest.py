"""The cluster that the cases of this directory share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from machine import nodes

from faults.lab import Lab, attach, deploy
from mayfly.local.platform import LocalPlatform


@pytest.fixture(scope="package")
def lab(platform: LocalPlatform, bucket: Any) -> Iterator[Lab]:
    """One ps and two workers, made at the first use and destroyed after the last case.

    While cases are written, MAYFLY_TEST_LAB may name a run whose kept nodes are used and left.
    """
    if kept := os.environ.get("MAYFLY_TEST_LAB"):
        yield attach(platform, bucket, kept, nodes(platform))
        return
    made = deploy(platform, bucket)
    yield made
    made.destroy()
