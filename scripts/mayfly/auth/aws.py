"""AWS keys, by boto3's own chain: environment, profile, SSO, assumed role, instance role."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import botocore.config
import botocore.exceptions

from mayfly.auth.credential import CLOCK_LIMIT_S, Identity, Missing
from mayfly.auth.entry import Entry
from mayfly.auth.web import clock_skew_s
from mayfly.errors import RemoteError, UserError
from mayfly.redact import Secret

DEFAULT_REGION = "us-east-1"
HINT = "set them, or AWS_PROFILE, or run `aws configure`"
_QUICK = botocore.config.Config(connect_timeout=10, read_timeout=30, retries={"max_attempts": 2})


@dataclass(frozen=True)
class Aws:
    """An access key, with a session token when STS gave it."""

    access_key_id: Secret
    secret_access_key: Secret
    session_token: Secret | None
    region: str | None
    origin: str

    def entry(self) -> Entry:
        fields = {"username": self.access_key_id, "password": self.secret_access_key}
        if self.session_token:
            fields["token"] = self.session_token
        return Entry("EC2", "ec2", fields)

    def identify(self) -> Identity:
        """Ask STS who we are; it needs no permission."""
        import boto3  # noqa: PLC0415 (it takes long to import)

        client = boto3.client(
            "sts",
            aws_access_key_id=self.access_key_id.reveal(),
            aws_secret_access_key=self.secret_access_key.reveal(),
            aws_session_token=self.session_token.reveal() if self.session_token else None,
            region_name=self.region or DEFAULT_REGION,
            config=_QUICK,
        )
        try:
            answer = client.get_caller_identity()
        except botocore.exceptions.ClientError as error:
            raise _refusal(error) from None
        except botocore.exceptions.BotoCoreError as error:
            raise RemoteError(
                f"AWS STS does not answer: {type(error).__name__}", "check network and AWS_REGION"
            ) from None
        return Identity(f"account {answer['Account']}, {answer['Arn']}", _skew(answer))


def find(environ: Mapping[str, str]) -> Aws:
    """The keys that boto3 finds; raises Missing when there are none, and what `look` raises."""
    found = look(environ)
    if found is None:
        raise Missing("no AWS credentials", ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), HINT)
    return found


def look(environ: Mapping[str, str]) -> Aws | None:
    """The keys that boto3 finds in this process's environment and files, None for none.

    Raises Missing when they are half given, UserError when what is there cannot be read.
    """
    import boto3  # noqa: PLC0415 (it takes long to import)

    del environ  # boto3 reads the process's own, and the files that it names
    try:
        session = boto3.Session()
        found = session.get_credentials()
        keys = found.get_frozen_credentials() if found else None
    except botocore.exceptions.PartialCredentialsError as error:
        name = str(error.kwargs["cred_var"]).upper()
        raise Missing("AWS credentials are half given", [name], "set both or neither") from None
    except botocore.exceptions.BotoCoreError as error:
        raise UserError(f"AWS credentials cannot be read: {error}", HINT) from None
    if not found or not keys:
        return None
    return Aws(
        Secret(str(keys.access_key)),
        Secret(str(keys.secret_key)),
        Secret(keys.token) if keys.token else None,
        session.region_name,
        f"boto3 ({found.method})",
    )


def _refusal(error: botocore.exceptions.ClientError) -> UserError:
    """Why STS refused, with the clocks' difference when that may be it."""
    advice = clock_advice(error.response) or "renew them: keys of STS and SSO expire"
    return UserError(f"AWS refuses the credentials: {error.response['Error']['Code']}", advice)


def clock_advice(answer: Mapping[str, Any]) -> str | None:
    """Return what to do when an answer of AWS's shows that this machine's clock is wrong.

    Signatures have a time, and a wrong one reads like wrong keys; None when it is right.
    """
    skew = _skew(answer)
    if skew is None or abs(skew) <= CLOCK_LIMIT_S:
        return None
    return f"set this machine's clock: it is {skew:+.0f} s from AWS's"


def _skew(answer: Mapping[str, Any]) -> float | None:
    headers = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    return clock_skew_s(headers.get("date"), time.time())
