"""S3: addresses, a client from explicit settings, and errors in one clear line.

Works with AWS and with servers that speak its protocol. Keys come from the environment or from
a 0600 file, never from a command line, and no message or repr shows them.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from time import sleep as pause
from typing import TYPE_CHECKING, Any, BinaryIO

from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    HTTPClientError,
    IncompleteReadError,
    NoCredentialsError,
    ResponseStreamingError,
)
from botocore.exceptions import (
    ConnectionError as NoConnection,
)

from mayfly_train.errors import BadInput, NodeError

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client as S3Client
else:
    S3Client = Any

# A piece stays in a core's cache while it is hashed and sent on: staging takes less CPU and memory
# than with pieces of some MiB.
CHUNK_BYTES = 256 << 10
_KEYS_PER_DELETE = 1000  # the most that one DeleteObjects takes
_STREAM_RETRIES = 5
_STREAM_PATIENCE_S = 60
_BROKEN_STREAM = (HTTPClientError, IncompleteReadError, ResponseStreamingError)


class S3Error(NodeError):
    """The S3 server did not do what was asked."""


class S3UserError(BadInput, S3Error):
    """The S3 server refused something that the user can set right: bucket, keys, address."""


class NotFound(S3UserError):
    """There is no such object."""


@dataclass(frozen=True)
class S3Uri:
    """A bucket and a key or prefix in it, without slashes at the ends of the key."""

    bucket: str
    key: str

    def join(self, *parts: str) -> S3Uri:
        """The address of something below this one."""
        return S3Uri(
            self.bucket, "/".join(filter(None, (self.key, *(p.strip("/") for p in parts))))
        )

    @property
    def prefix(self) -> str:
        """The key as a prefix for listings: empty, or ending in one slash."""
        return f"{self.key}/" if self.key else ""

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.key}"


@dataclass(frozen=True)
class S3Settings:
    """What a client needs to know. The repr shows no secret."""

    access_key_id: str = field(repr=False)
    secret_access_key: str = field(repr=False)
    session_token: str | None = field(default=None, repr=False)
    endpoint_url: str | None = None
    region: str = "us-east-1"

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> S3Settings:
        """Settings from the usual AWS_* variables. Raises S3UserError when a key is missing."""
        missing = [
            name for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY") if not environ.get(name)
        ]
        if missing:
            raise S3UserError(
                f"no S3 keys: {' and '.join(missing)} not set — set them, or use --env-file"
            )
        return cls(
            access_key_id=environ["AWS_ACCESS_KEY_ID"],
            secret_access_key=environ["AWS_SECRET_ACCESS_KEY"],
            session_token=environ.get("AWS_SESSION_TOKEN") or None,
            endpoint_url=environ.get("AWS_ENDPOINT_URL") or None,
            region=environ.get("AWS_DEFAULT_REGION") or "us-east-1",
        )

    def environ(self) -> dict[str, str]:
        """The variables that `from_environ` reads them from again; empty are those it lacks."""
        found = {
            "AWS_ACCESS_KEY_ID": self.access_key_id,
            "AWS_SECRET_ACCESS_KEY": self.secret_access_key,
            "AWS_SESSION_TOKEN": self.session_token,
            "AWS_ENDPOINT_URL": self.endpoint_url,
            "AWS_DEFAULT_REGION": self.region,
        }
        return {name: value or "" for name, value in found.items()}

    @classmethod
    def from_file(cls, path: Path) -> S3Settings:
        """Settings from a file of NAME="value" lines, as systemd's EnvironmentFile takes them."""
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise S3UserError(f"cannot read {path}: {error.strerror} — run as root?") from None
        return cls.from_environ(parse_env_file(text))


def parse_env_file(text: str) -> dict[str, str]:
    """The variables in a file of NAME=value or NAME="value" lines; backslash escapes in quotes."""
    variables = {}
    for line in text.splitlines():
        name, separator, value = line.strip().partition("=")
        if not separator or name.startswith(("#", ";")):
            continue
        if value.startswith('"') and value.endswith('"') and len(value) > 1:
            value = value[1:-1].replace('\\"', '"').replace("\\\\", "\\")
        variables[name.strip()] = value
    return variables


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The argument that says where the keys are; a key itself is never an argument."""
    parser.add_argument("--env-file", type=Path, help="file of AWS_* lines (default: environment)")


def settings_from(args: argparse.Namespace) -> S3Settings:
    """Settings from --env-file, or from the environment."""
    if args.env_file:
        return S3Settings.from_file(args.env_file)
    return S3Settings.from_environ(os.environ)


def parse_uri(uri: str) -> S3Uri:
    """The bucket and key in `s3://bucket/key`. Raises S3UserError when it is something else."""
    scheme, separator, rest = uri.partition("://")
    bucket, _, key = rest.partition("/")
    if scheme != "s3" or not separator or not bucket:
        raise S3UserError(f"not an S3 address: {uri!r} — write s3://bucket/prefix")
    return S3Uri(bucket, key.strip("/"))


def connect(settings: S3Settings, connections: int = 16) -> S3Client:
    """A client that retries, signs with v4 and never asks a metadata service for keys.

    Checksums only where the protocol requires them: servers other than AWS's reject the newer
    trailing ones, and every file is checked by SHA-256 anyway.
    """
    import boto3  # noqa: PLC0415 (it takes long to import)

    os.environ.setdefault("AWS_EC2_METADATA_DISABLED", "true")
    config = Config(
        signature_version="s3v4",
        # A server that says nothing is given up after 3 x 20 s, so that its user hears of it soon.
        retries={"mode": "standard", "max_attempts": 3},
        connect_timeout=10,
        read_timeout=20,
        max_pool_connections=connections,
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        # Else presigned URLs name no region, and S3 redirects those to a bucket of the last days,
        # which their signature does not allow. Amazon's only: other servers have no such names.
        s3={} if settings.endpoint_url else {"addressing_style": "virtual"},
    )
    return boto3.session.Session().client(
        "s3",
        endpoint_url=settings.endpoint_url,
        region_name=settings.region,
        aws_access_key_id=settings.access_key_id,
        aws_secret_access_key=settings.secret_access_key,
        aws_session_token=settings.session_token,
        config=config,
    )


def require_bucket(client: S3Client, uri: S3Uri) -> None:
    """Raise S3Error unless the bucket can be listed with these keys."""
    with clear_errors(uri):
        client.list_objects_v2(Bucket=uri.bucket, Prefix=uri.prefix, MaxKeys=1)


def list_sizes(client: S3Client, uri: S3Uri) -> dict[str, int]:
    """Path below the prefix → size in bytes, of every object there."""
    sizes = {}
    with clear_errors(uri):
        pages = client.get_paginator("list_objects_v2").paginate(
            Bucket=uri.bucket, Prefix=uri.prefix
        )
        for page in pages:
            for item in page.get("Contents", []):
                sizes[item["Key"][len(uri.prefix) :]] = item["Size"]
    return sizes


def size_of(client: S3Client, uri: S3Uri) -> int | None:
    """The size of an object in bytes, None when there is none."""
    try:
        with clear_errors(uri):
            return client.head_object(Bucket=uri.bucket, Key=uri.key)["ContentLength"]
    except NotFound:
        return None


def read_bytes(client: S3Client, uri: S3Uri) -> bytes:
    """The content of a small object. Raises NotFound when there is none."""
    return b"".join(read_chunks(client, uri))


def read_json(client: S3Client, uri: S3Uri) -> Any:
    """The JSON document in an object. Raises NotFound, or S3UserError when it is not JSON."""
    try:
        return json.loads(read_bytes(client, uri))
    except ValueError as error:
        raise S3UserError(f"{uri} is not JSON: {error} — write it again") from None


def write_bytes(client: S3Client, uri: S3Uri, data: bytes, content_type: str) -> None:
    """Put a small object; what was there is replaced in one step."""
    with clear_errors(uri):
        client.put_object(Bucket=uri.bucket, Key=uri.key, Body=data, ContentType=content_type)


def write_json(client: S3Client, uri: S3Uri, document: Any) -> None:
    """Put a JSON document."""
    write_bytes(client, uri, json.dumps(document).encode() + b"\n", "application/json")


def upload(client: S3Client, uri: S3Uri, stream: BinaryIO) -> None:
    """Put what a stream holds, in parts when it is long; at most two parts are in memory.

    A failed part is sent again; when the whole fails, its parts are removed from the server.
    `read(n)` of the stream must return n bytes unless it is at its end.
    """
    from boto3.s3.transfer import TransferConfig  # noqa: PLC0415 (it takes long to import)

    one_part_at_a_time = TransferConfig(
        multipart_threshold=16 << 20, multipart_chunksize=16 << 20, use_threads=False
    )
    with clear_errors(uri):
        client.upload_fileobj(stream, uri.bucket, uri.key, Config=one_part_at_a_time)


def delete(client: S3Client, uri: S3Uri) -> None:
    """Delete an object; nothing happens when there is none."""
    with clear_errors(uri):
        client.delete_object(Bucket=uri.bucket, Key=uri.key)


def delete_below(client: S3Client, uri: S3Uri) -> int:
    """Delete every object below the prefix and return how many there were.

    Raises S3UserError for a whole bucket, which is never meant, and S3Error when some are still
    listed afterwards: someone writes there, or may not delete.
    """
    if not uri.key:
        raise S3UserError(f"{uri} is a whole bucket — give a prefix in it")
    found = list_sizes(client, uri)
    keys = [uri.prefix + path for path in found]
    for start in range(0, len(keys), _KEYS_PER_DELETE):
        part = keys[start : start + _KEYS_PER_DELETE]
        with clear_errors(uri):
            client.delete_objects(
                Bucket=uri.bucket,
                Delete={"Objects": [{"Key": key} for key in part], "Quiet": True},
            )
    left = list_sizes(client, uri) if keys else {}
    if left:
        raise S3Error(f"{len(left)} objects are still at {uri} after their deletion — try again")
    return len(keys)


def read_chunks(client: S3Client, uri: S3Uri, chunk_bytes: int = CHUNK_BYTES) -> Iterator[bytes]:
    """The content of an object in pieces; a broken connection is taken up where it broke.

    Every request after the first asks for the same ETag, so that no two versions are mixed.
    """
    done, etag, failures, moved = 0, None, 0, monotonic()
    while True:
        try:
            with clear_errors(uri):
                wanted: dict[str, Any] = {"Bucket": uri.bucket, "Key": uri.key}
                if etag:
                    wanted.update(Range=f"bytes={done}-", IfMatch=etag)
                answer = client.get_object(**wanted)
                etag = answer["ETag"]
                end = done + answer["ContentLength"]
            while chunk := answer["Body"].read(chunk_bytes):
                done += len(chunk)
                failures = 0
                yield chunk
                moved = monotonic()
            if done >= end:
                return
        except _BROKEN_STREAM:
            pass
        failures += 1
        if failures > _STREAM_RETRIES or monotonic() - moved > _STREAM_PATIENCE_S:
            raise S3Error(f"reading {uri} breaks again and again at byte {done} — try again later")
        pause(min(0.2 * 2**failures, 5))


@contextmanager
def clear_errors(uri: S3Uri) -> Iterator[None]:
    """Turn what boto3 raises into an S3Error that says what is wrong and what to do."""
    try:
        yield
    except ClientError as error:
        raise _from_answer(error, uri) from error
    except NoCredentialsError as error:
        raise S3UserError("no S3 keys — set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY") from error
    except (NoConnection, HTTPClientError) as error:
        endpoint = str(error.kwargs.get("endpoint_url", "the S3 server")).partition("?")[0]
        raise S3Error(
            f"cannot reach {endpoint} for {uri} — check the endpoint and network"
        ) from error
    except (BotoCoreError, ValueError) as error:
        # ValueError: botocore's answer to an endpoint or a bucket name that cannot be one.
        first_line = str(error).partition("\n")[0]
        raise S3UserError(f"S3 request for {uri} not possible: {first_line}") from error


_ADVICE = {
    "NoSuchBucket": "no such bucket: {bucket} — create it, or name another",
    "InvalidAccessKeyId": "S3 does not know the access key for {uri} — check the keys",
    "SignatureDoesNotMatch": "the S3 secret key for {uri} is wrong — check the keys",
    "AccessDenied": "S3 access denied: {uri} — check the keys and what they may do",
    "403": "S3 access denied: {uri} — check the keys and what they may do",
    "ExpiredToken": "the S3 session token for {uri} has expired — get a new one",
    "InvalidToken": "the S3 session token for {uri} is not valid — get a new one",
    "RequestTimeTooSkewed": "the clock here is too far from the S3 server's — set the clock",
    "PermanentRedirect": "bucket {bucket} is in another region — set AWS_DEFAULT_REGION",
    "InvalidBucketName": "not a bucket name: {bucket} — name another",
}


def _from_answer(error: ClientError, uri: S3Uri) -> S3Error:
    code = str(error.response.get("Error", {}).get("Code", "unknown"))
    if code in ("NoSuchKey", "404"):
        return NotFound(f"nothing at {uri} — check the address")
    if code in _ADVICE:
        return S3UserError(_ADVICE[code].format(bucket=uri.bucket, uri=uri))
    return S3Error(f"the S3 server answered {code} for {uri} — try again later")
