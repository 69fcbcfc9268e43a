"""The place where a run lives: the IM service, the S3 service and the cloud's own listing.

CLOUD=local has these on this machine, started when they are needed; for every other cloud the user
names an IM service and its auth file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mayfly.clouds import CloudProfile
from mayfly.credentials import S3Settings, find_s3_settings
from mayfly.destroy import Traces
from mayfly.errors import UserError
from mayfly.im import IM, Manager
from mayfly.local import platform as local
from mayfly.local.platform import LocalPlatform

LOCAL = "local"


@dataclass(frozen=True)
class Services:
    """What a run needs of its surroundings."""

    im: Manager
    s3: S3Settings
    client: Any  # boto3's S3 client
    traces: Traces | None
    platform: LocalPlatform | None = None
    phases: Mapping[str, float] = field(default_factory=dict)

    def image(self, profile: CloudProfile) -> str:
        """Return the address of the nodes' image; raises UserError when the cloud names none."""
        if self.platform is not None:
            return f"docker://{self.platform.image}"
        if profile.image is None:
            raise UserError(f"cloud {profile.name!r} names no image", "set it in radl/clouds/")
        return profile.image


def open_services(
    cloud: str,
    environ: MutableMapping[str, str],
    report: Callable[[str], None],
    *,
    need_image: bool = False,
) -> Services:
    """Return what a cloud has; starts the local one where it does not run.

    Raises UserError when something of it is missing, the node image only if it is needed.
    """
    if cloud == LOCAL:
        return _local(environ, report, need_image)
    s3 = find_s3_settings(environ, None)
    return Services(_remote_im(environ), s3, s3.client(), None)


def open_bucket(
    cloud: str, environ: MutableMapping[str, str], report: Callable[[str], None]
) -> Any:
    """Return a client of the S3 service that goes with a cloud; no IM service is needed."""
    if cloud == LOCAL:
        return open_services(cloud, environ, report).client
    return find_s3_settings(environ, None).client()


def _local(
    environ: MutableMapping[str, str], report: Callable[[str], None], need_image: bool
) -> Services:
    platform = local.up(report, need_image=need_image)
    _reach_directly(environ, platform.im_url, platform.s3_endpoint)
    s3 = find_s3_settings(environ, platform)
    im = IM(platform.im_url, Path(platform.im_auth_file))
    return Services(im, s3, s3.client(), local, platform, platform.phases)


def _remote_im(environ: Mapping[str, str]) -> IM:
    url, auth = environ.get("MAYFLY_IM_URL"), environ.get("MAYFLY_IM_AUTH")
    if not url or not auth:
        missing = "MAYFLY_IM_AUTH" if url else "MAYFLY_IM_URL"
        raise UserError(
            f"no IM service is named: {missing} is not set",
            "set MAYFLY_IM_URL to its address and MAYFLY_IM_AUTH to an auth file",
        )
    return IM(url, Path(auth))


def _reach_directly(environ: MutableMapping[str, str], *urls: str) -> None:
    """Keep this machine's own services off any proxy that the environment names."""
    hosts = [urlsplit(url).hostname or "" for url in urls]
    for name in ("NO_PROXY", "no_proxy"):
        known = [host for host in environ.get(name, "").split(",") if host]
        value = ",".join(dict.fromkeys([*known, *hosts]))
        environ[name] = os.environ[name] = value
