"""Fixtures of the end-to-end tests."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from machine import networks, nodes

import testenv
from mayfly.local import platform as local
from mayfly_train import s3


@pytest.fixture(scope="session")
def platform() -> local.LocalPlatform:
    """The local cloud of the tests (make test takes it down at its end)."""
    os.environ.update(testenv.environment())
    return local.up(lambda message: print(message, file=sys.stderr))


@pytest.fixture(scope="session")
def bucket(platform: local.LocalPlatform) -> Any:
    """An S3 client of the embedded server."""
    settings = {
        "AWS_ENDPOINT_URL": platform.s3_endpoint,
        "AWS_ACCESS_KEY_ID": testenv.VARIABLES["MAYFLY_S3_ACCESS_KEY_ID"],
        "AWS_SECRET_ACCESS_KEY": testenv.CANARY,
    }
    return s3.connect(s3.S3Settings.from_environ(settings))


@pytest.fixture
def clean(platform: local.LocalPlatform) -> Iterator[None]:
    """Nothing is there before a test, and nothing is left behind it."""
    assert nodes(platform) == []
    yield
    assert nodes(platform) == []
    assert networks(platform) == []
