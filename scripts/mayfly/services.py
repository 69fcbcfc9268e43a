"""The place where a run lives: the IM service, the S3 service and the cloud's own listing.

CLOUD=local has these on this machine, started when they are needed; for every other cloud the user
names an IM service and its auth file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mayfly.clouds import CloudProfile
from mayfly.credentials import S3Settings, find_s3_settings
from mayfly.destroy import Traces
from mayfly.errors import UserError
from mayfly.im import IM, Manager
from mayfly.local import platform as local
from mayfly.local.image import with_extras
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

    def image(
        self, profile: CloudProfile, extras: Collection[str], report: Callable[[str], None]
    ) -> str:
        """Return the address of the nodes' image; the local one is built unless it is there.

        `extras` are parts of the local one that only some jobs need (see `local.image`). Raises
        UserError when the cloud names none.
        """
        if self.platform is not None:
            # The other parts were reported when they were started.
            environ = with_extras(os.environ, extras)
            platform = local.up(_only_news(report, "node image"), environ=environ)
            return f"docker://{platform.image}"
        if profile.image is None:
            raise UserError(f"cloud {profile.name!r} names no image", "set it in radl/clouds/")
        return profile.image


def open_services(
    cloud: str, environ: MutableMapping[str, str], report: Callable[[str], None]
) -> Services:
    """Return what a cloud has; starts the local one, but for its node image, where it is missing.

    Raises UserError when something is missing that cannot be started.
    """
    if cloud == LOCAL:
        return _local(environ, report)
    s3 = find_s3_settings(environ, None)
    return Services(_remote_im(environ), s3, s3.client(), None)


def open_bucket(
    cloud: str, environ: MutableMapping[str, str], report: Callable[[str], None]
) -> Any:
    """Return a client of the S3 service that goes with a cloud; no IM service is needed."""
    if cloud == LOCAL:
        return open_services(cloud, environ, report).client
    return find_s3_settings(environ, None).client()


def _local(environ: MutableMapping[str, str], report: Callable[[str], None]) -> Services:
    platform = local.up(report, need_image=False)
    _reach_directly(environ, platform.im_url, platform.s3_endpoint)
    s3 = find_s3_settings(environ, platform)
    im = IM(
        platform.im_url,
        Path(platform.im_auth_file),
        revive=lambda: local.up(_only_news(report), need_image=False),
    )
    return Services(im, s3, s3.client(), local, platform)


def _only_news(report: Callable[[str], None], told: str = "\n") -> Callable[[str], None]:
    """Report what was made, and of what was there already only what holds the text `told`."""
    return lambda text: report(text) if told in text or not text.endswith("reused") else None


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
