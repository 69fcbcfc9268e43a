from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from mayfly.credentials import find_s3_settings
from mayfly.errors import UserError
from mayfly.redact import Secret

KEYS = {"MAYFLY_S3_ACCESS_KEY_ID": "own-key-id", "MAYFLY_S3_SECRET_ACCESS_KEY": "own-canary"}


@dataclass(frozen=True)
class FakePlatform:
    s3_endpoint: str = "http://10.1.0.1:8333"
    s3_access_key_id: str = "platform-id"
    s3_secret_access_key: Secret = field(default_factory=lambda: Secret("platform-canary"))


@pytest.fixture
def bare(monkeypatch, tmp_path):
    """No credentials for boto3 to find, however this machine is set up."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    return monkeypatch


def test_the_environment_wins_over_the_platform():
    found = find_s3_settings(KEYS, FakePlatform())
    assert found.secret_access_key.reveal() == "own-canary"
    assert found.endpoint == "http://10.1.0.1:8333"
    assert found.origin == "MAYFLY_S3_*"


def test_an_endpoint_of_ones_own_replaces_the_platforms():
    found = find_s3_settings({**KEYS, "MAYFLY_S3_ENDPOINT": "https://s3.example"}, FakePlatform())
    assert found.endpoint == "https://s3.example"


def test_the_platform_wins_over_boto3(bare):
    bare.setenv("AWS_ACCESS_KEY_ID", "aws-id")
    bare.setenv("AWS_SECRET_ACCESS_KEY", "aws-canary")
    found = find_s3_settings({}, FakePlatform())
    assert found.secret_access_key.reveal() == "platform-canary"


def test_boto3_comes_last(bare):
    bare.setenv("AWS_ACCESS_KEY_ID", "aws-id")
    bare.setenv("AWS_SECRET_ACCESS_KEY", "aws-canary")
    bare.setenv("AWS_SESSION_TOKEN", "aws-session")
    found = find_s3_settings({"AWS_REGION": "eu-west-1"}, None)
    assert found.inputs()["s3_session_token"].reveal() == "aws-session"
    assert (found.endpoint, found.region) == (None, "eu-west-1")


def test_no_keys_at_all_says_which_to_set(bare):
    with pytest.raises(UserError, match="MAYFLY_S3_ACCESS_KEY_ID"):
        find_s3_settings({}, None)


def test_half_a_pair_is_refused():
    with pytest.raises(UserError, match="MAYFLY_S3_SECRET_ACCESS_KEY is empty"):
        find_s3_settings({"MAYFLY_S3_ACCESS_KEY_ID": "own-key-id"}, FakePlatform())


def test_no_secret_shows_in_a_repr():
    found = find_s3_settings({**KEYS, "MAYFLY_S3_SESSION_TOKEN": "session-canary"}, None)
    assert "canary" not in f"{found!r} {found} {found.inputs()} {found.secrets}"
    assert "own-key-id" not in repr(found)
