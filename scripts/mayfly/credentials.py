"""Where the S3 keys of a run come from, and the client made with them.

MAYFLY_S3_* in the environment wins, then the local platform's own server, then whatever boto3 finds
(environment, ~/.aws, SSO, instance role).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from mayfly.auth import aws
from mayfly.auth.credential import Missing
from mayfly.errors import UserError
from mayfly.redact import Secret
from mayfly_train import s3


class Platform(Protocol):
    """What is needed of the local platform here: its S3 server and the keys to it."""

    @property
    def s3_endpoint(self) -> str: ...
    @property
    def s3_access_key_id(self) -> Any: ...
    @property
    def s3_secret_access_key(self) -> Any: ...


@dataclass(frozen=True)
class S3Settings:
    """Keys and address of an S3 service; nothing of it shows in a repr but its origin."""

    access_key_id: Secret
    secret_access_key: Secret
    session_token: Secret | None
    endpoint: str | None  # None: AWS
    region: str
    origin: str

    @property
    def secrets(self) -> tuple[Secret, ...]:
        """All values that must never be shown, the key id among them."""
        keys = (self.access_key_id, self.secret_access_key)
        return (*keys, self.session_token) if self.session_token else keys

    def inputs(self) -> dict[str, Secret]:
        """Return the RADL's inputs by name, as `@input.<name>@` asks for them."""
        values = {
            "s3_access_key_id": self.access_key_id,
            "s3_secret_access_key": self.secret_access_key,
        }
        if self.session_token:
            values["s3_session_token"] = self.session_token
        return values

    def plain(self) -> s3.S3Settings:
        """Return them as the node library takes them."""
        return s3.S3Settings(
            access_key_id=self.access_key_id.reveal(),
            secret_access_key=self.secret_access_key.reveal(),
            session_token=self.session_token.reveal() if self.session_token else None,
            endpoint_url=self.endpoint,
            region=self.region,
        )

    def client(self) -> Any:
        """Return a boto3 client of this service."""
        return s3.connect(self.plain())


def find_s3_settings(environ: Mapping[str, str], platform: Platform | None) -> S3Settings:
    """Return the S3 settings that apply; raises UserError when keys are missing or half given."""
    endpoint = environ.get("MAYFLY_S3_ENDPOINT") or None
    if environ.get("MAYFLY_S3_ACCESS_KEY_ID") or environ.get("MAYFLY_S3_SECRET_ACCESS_KEY"):
        return _from_environment(environ, endpoint or (platform.s3_endpoint if platform else None))
    if platform and endpoint in (None, platform.s3_endpoint):
        return _from_platform(environ, platform)
    return _from_boto3(environ, endpoint)


def _from_environment(environ: Mapping[str, str], endpoint: str | None) -> S3Settings:
    names = ("MAYFLY_S3_ACCESS_KEY_ID", "MAYFLY_S3_SECRET_ACCESS_KEY")
    missing = [name for name in names if not environ.get(name)]
    if missing:
        raise UserError(f"S3 keys are half given: {missing[0]} is empty", "set both or neither")
    token = environ.get("MAYFLY_S3_SESSION_TOKEN")
    return S3Settings(
        Secret(environ[names[0]]),
        Secret(environ[names[1]]),
        Secret(token) if token else None,
        endpoint,
        _region(environ),
        "MAYFLY_S3_*",
    )


def _from_platform(environ: Mapping[str, str], platform: Platform) -> S3Settings:
    return S3Settings(
        Secret(_plain(platform.s3_access_key_id)),
        Secret(_plain(platform.s3_secret_access_key)),
        None,
        platform.s3_endpoint,
        _region(environ),
        "the local platform",
    )


def _from_boto3(environ: Mapping[str, str], endpoint: str | None) -> S3Settings:
    found = aws.look(environ)
    if found is None:
        names = ("MAYFLY_S3_ACCESS_KEY_ID", "MAYFLY_S3_SECRET_ACCESS_KEY")
        raise Missing("no S3 keys found", names, "set both, or run `aws configure`")
    return S3Settings(
        found.access_key_id,
        found.secret_access_key,
        found.session_token,
        endpoint,
        _region(environ, found.region),
        found.origin,
    )


def _region(environ: Mapping[str, str], configured: str | None = None) -> str:
    names = ("MAYFLY_S3_REGION", "AWS_REGION", "AWS_DEFAULT_REGION")
    given = next((environ[name] for name in names if environ.get(name)), None)
    return given or configured or aws.DEFAULT_REGION


def _plain(value: Any) -> str:
    """Return the text in a str or in a secret type that hides it."""
    for reveal in ("reveal", "get_secret_value"):
        if hasattr(value, reveal):
            return str(getattr(value, reveal)())
    return str(value)
