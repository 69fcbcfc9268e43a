from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from moto import mock_aws

from mayfly_train import retry, s3

SETTINGS = s3.S3Settings("unit-key", "unit-secret")


@pytest.fixture(autouse=True)
def no_settings_of_the_person_who_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests see no AWS_* variable of the shell that they run in."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def client() -> Iterator[Any]:
    """An S3 client whose server is moto, which takes any keys: for unit tests only."""
    with mock_aws():
        yield s3.connect(SETTINGS)


@pytest.fixture
def no_pause(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Retries come at once; the pauses that there would have been are recorded."""
    pauses: list[float] = []
    monkeypatch.setattr(retry, "pause", pauses.append)
    monkeypatch.setattr(s3, "pause", pauses.append)
    return pauses
