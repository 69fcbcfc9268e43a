"""The place where a run lives: the IM service, the S3 service and the cloud's own listing.

CLOUD=local has these on this machine, started when they are needed. For every other cloud there is
a second IM service of ours, or the one that IM_URL names. The cloud's keys go with each call to it,
from memory: no file holds them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, MutableMapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mayfly import inventory
from mayfly.auth.entry import INFRASTRUCTURE_MANAGER, Entry, client_item
from mayfly.auth.find import find_credential
from mayfly.clouds import load_cloud
from mayfly.credentials import S3Settings, find_s3_settings
from mayfly.errors import MayflyError, RemoteError, UserError
from mayfly.im import IM, Manager, SilentManager, auth_of
from mayfly.im_server import URL, Server, find_server, greet, is_loopback, server_url
from mayfly.ledger import Record
from mayfly.local import cloudim, imservice
from mayfly.local import platform as local
from mayfly.local.image import with_extras
from mayfly.local.paths import find_paths
from mayfly.local.platform import LocalPlatform
from mayfly.own.machines import Machines, OwnMachines
from mayfly.own.manager import Machinist
from mayfly.redact import Secret
from mayfly.sweep.find import find_account
from mayfly.sweep.local import Traces
from mayfly.sweep.things import Account

LOCAL = "local"


@dataclass(frozen=True)
class Services:
    """What a run needs of its surroundings."""

    im: Manager
    s3: S3Settings
    client: Any  # boto3's S3 client
    traces: Traces | None
    platform: LocalPlatform | None = None
    im_url: str | None = None  # of a foreign IM, or the path of an inventory; None: our own
    keys: tuple[Secret, ...] = ()  # to the cloud, and to the foreign IM
    account: Account | None = None  # of a cloud whose account we can sweep ourselves
    machines: Machines | None = None  # of the user's own

    @property
    def secrets(self) -> tuple[Secret, ...]:
        """All values that must never be shown."""
        return (*self.s3.secrets, *self.keys)


def local_image(extras: Collection[str], report: Callable[[str], None]) -> str:
    """Return the address of the local nodes' image, which is built unless it is there.

    `extras` are parts of it that only some jobs need (see `local.image`).
    """
    # The other parts were reported when they were started.
    environ = with_extras(os.environ, extras)
    platform = local.up(_only_news(report, "node image"), environ=environ)
    return f"docker://{platform.image}"


def open_services(
    cloud: str,
    environ: MutableMapping[str, str],
    report: Callable[[str], None],
    *,
    need_im: bool = True,
) -> Services:
    """Return what a cloud has; starts the local one, but for its node image, where it is missing.

    Without `need_im`, an IM service that does not answer is one that fails when it is asked.
    Raises UserError when something is missing that cannot be started.
    """
    if cloud == LOCAL:
        if named := server_url(environ):
            what = f"CLOUD=local does not go with {URL}: {named}"
            raise UserError(what, f"only our own IM can make containers here: unset {URL}")
        return _local(environ, report)
    return _rented(cloud, environ, report, need_im)


def open_machines(path: Path, environ: MutableMapping[str, str], cache: Path) -> Services:
    """Return what a run on machines of the user's own has; nothing is started, or asked.

    Raises UserError for an inventory that is none, and when keys to S3 are missing.
    """
    path = path.absolute()
    inventory.read(path)
    s3 = find_s3_settings(environ, None)
    keys = {inventory.KEYS[name]: secret for name, secret in s3.inputs().items()}
    im = Machinist(path, environ, keys, cache)
    account, machines = OwnMachines(path, environ), Machines(path, environ)
    return Services(im, s3, s3.client(), None, im_url=str(path), account=account, machines=machines)


def reopen_services(
    record: Record,
    environ: MutableMapping[str, str],
    report: Callable[[str], None],
    *,
    need_im: bool = True,
) -> Services:
    """Return what a run was made with; see `open_services` and `open_machines`.

    Raises UserError when IM_URL names another IM than the run's: that one knows nothing of it, and
    what it does not know would count as destroyed.
    """
    if load_cloud(record.cloud).backend == "inventory":
        return open_machines(Path(record.im or ""), environ, find_paths().cache)
    named = server_url(environ)
    if named != record.im:
        made_by = f"the IM at {record.im}" if record.im else "our own IM"
        advice = f"set {URL}={record.im}" if record.im else f"unset {URL}"
        shown = named or "not set"
        raise UserError(f"run {record.run} was made by {made_by}, and {URL} is {shown}", advice)
    return open_services(record.cloud, environ, report, need_im=need_im)


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
        auth_of(Path(platform.im_auth_file)),
        revive=lambda: local.up(_only_news(report), need_image=False),
    )
    return Services(im, s3, s3.client(), local, platform)


def _only_news(report: Callable[[str], None], told: str = "\n") -> Callable[[str], None]:
    """Report what was made, and of what was there already only what holds the text `told`."""
    return lambda text: report(text) if told in text or not text.endswith("reused") else None


def _rented(
    cloud: str,
    environ: MutableMapping[str, str],
    report: Callable[[str], None],
    need_im: bool,
) -> Services:
    """The services of a cloud that is not this machine: an IM, and S3 by the user's keys."""
    server = find_server(environ)
    entries = cloud_entries(cloud, environ, foreign=server is not None)  # missing keys come first
    s3 = find_s3_settings(environ, None)
    try:
        im: Manager = (
            _foreign_im(cloud, environ, server) if server else _own_im(cloud, environ, report)
        )
    except MayflyError as error:
        if need_im or (server and not isinstance(error, RemoteError)):
            raise
        im = SilentManager(RemoteError(error.message, error.hint))
    if server:
        entries = [server.entry, *entries]
    secrets = tuple(secret for entry in entries for secret in entry.secrets)
    account = find_account(cloud, environ)
    url = server.url if server else None
    return Services(im, s3, s3.client(), None, im_url=url, keys=secrets, account=account)


def _foreign_im(cloud: str, environ: MutableMapping[str, str], server: Server) -> IM:
    _reach_directly(environ, *([server.url] if is_loopback(server.url) else []))

    def auth() -> list[dict[str, str]]:
        """Found anew from time to time: tokens and session keys are renewed by the user."""
        named = find_server(environ)
        keys = cloud_entries(cloud, environ, foreign=True)
        return [client_item(entry) for entry in [*([named.entry] if named else []), *keys]]

    im = IM(server.url, auth)
    greet(server)
    return im


def _own_im(cloud: str, environ: MutableMapping[str, str], report: Callable[[str], None]) -> IM:
    """Our own service, started when it does not run; IM is a Manager that starts it again."""
    service = cloudim.up(report, environ)
    _reach_directly(environ, service.url)
    fields: dict[str, str | Secret] = {"username": imservice.USER, "password": service.password}
    own = Entry(INFRASTRUCTURE_MANAGER, "im", fields)

    def auth() -> list[dict[str, str]]:
        keys = cloud_entries(cloud, environ, foreign=False)
        return [client_item(entry) for entry in (own, *keys)]

    return IM(
        service.url,
        auth,
        revive=lambda: cloudim.up(_only_news(report), environ),
        wipe=lambda infrastructures: cloudim.wipe(infrastructures, environ),
    )


def cloud_entries(cloud: str, environ: Mapping[str, str], *, foreign: bool) -> list[Entry]:
    """The keys to a cloud as they go with each call to an IM; ours has connectors of its own.

    Raises Missing when there are none.
    """
    credential = find_credential(cloud, environ)
    if credential is None:
        return []
    entry = credential.entry()
    return [
        entry if foreign else replace(entry, type=cloudim.CONNECTORS.get(entry.type, entry.type))
    ]


def _reach_directly(environ: MutableMapping[str, str], *urls: str) -> None:
    """Keep this machine's own services off any proxy that the environment names."""
    hosts = [urlsplit(url).hostname or "" for url in urls]
    for name in ("NO_PROXY", "no_proxy"):
        known = [host for host in environ.get(name, "").split(",") if host]
        value = ",".join(dict.fromkeys([*known, *hosts]))
        environ[name] = os.environ[name] = value
