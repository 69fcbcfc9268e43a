"""A foreign IM server, which IM_URL names: with which keys, and whether it can be used.

At first contact it is asked for its version, and then whether it takes the keys, so that every
later failure is one of the work.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from urllib.parse import urlsplit

from imclient import IMClient

from mayfly.auth.credential import Missing
from mayfly.auth.entry import INFRASTRUCTURE_MANAGER, Entry, client_item
from mayfly.auth.token import plain_token, token_of
from mayfly.auth.web import call
from mayfly.errors import RemoteError, UserError
from mayfly.redact import Secret

MINIMUM = (1, 17)  # collections of a RADL are installed since then
URL, USER, PASSWORD = "IM_URL", "IM_USER", "IM_PASSWORD"
TOKEN, TOKEN_COMMAND = "IM_TOKEN", "IM_TOKEN_COMMAND"
KEYS = f"{USER} and {PASSWORD}, {TOKEN} or {TOKEN_COMMAND}"


@dataclass(frozen=True)
class Server:
    """An IM server and who we are to it."""

    url: str
    entry: Entry


def server_url(environ: Mapping[str, str]) -> str | None:
    """IM_URL without a slash at its end, None when it is not set. Raises UserError for no address.

    Every call carries the keys to the cloud, so plain http is only for this machine.
    """
    given = environ.get(URL, "").strip().rstrip("/")
    if not given:
        return None
    parts = urlsplit(given)
    if parts.username or parts.password:
        raise UserError(f"{URL} holds a password", f"put it into {PASSWORD}")
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
        raise UserError(f"{URL} is no address: {given!r}", "write https://HOST[:PORT][/PATH]")
    if parts.scheme == "http" and not is_loopback(given):
        raise UserError(
            f"{URL} would send the keys to your cloud unencrypted: {given}",
            "use https://, or an SSH tunnel to a port of localhost",
        )
    return given


def find_server(environ: Mapping[str, str]) -> Server | None:
    """The server that IM_URL names, None when it is not set.

    Raises Missing when the keys to it are not there, UserError for what cannot be used.
    """
    url = server_url(environ)
    if url is None:
        return None
    return Server(url, Entry(INFRASTRUCTURE_MANAGER, "im", _fields(environ)))


def greet(server: Server) -> str:
    """Ask the server who it is, and whether it takes our keys; returns its version.

    Raises RemoteError when it does not answer, is no IM or too old, UserError for refused keys.
    """
    version = _version(server.url)
    # Nothing but the keys to IM: the cloud's have no part in the question.
    client = IMClient.init_client(server.url, [client_item(server.entry)], ssl_verify=True)
    headers = {"Authorization": client.rest_auth_data}
    answer = call("IM", "GET", f"{server.url}/infrastructures", headers=headers)
    if answer.status in (401, 403):
        raise UserError(f"IM at {server.url} refuses the keys", f"check {KEYS}")
    if not answer.ok:
        # Not its text: an error of IM's may repeat what it was sent.
        what = f"IM {version} at {server.url} cannot list infrastructures: status {answer.status}"
        raise RemoteError(what, f"check {KEYS}, and look at its log")
    return version


def is_loopback(url: str) -> bool:
    """Whether an address is this machine's own, whatever the network does."""
    host = urlsplit(url).hostname or ""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _version(url: str) -> str:
    answer = call("IM", "GET", f"{url}/version")
    found = re.search(r"\d+(\.\d+)+", answer.text) if answer.ok else None
    if found is None or len(answer.text) > 100:  # noqa: PLR2004
        what = f"what answers at {url} is no IM: it tells no version (status {answer.status})"
        raise RemoteError(what, f"set {URL} to IM's REST address, such as https://HOST/im")
    version = found[0]
    if tuple(int(part) for part in version.split(".")) < MINIMUM:
        wanted = ".".join(map(str, MINIMUM))
        what = f"IM at {url} is too old: version {version}, and {wanted} is the oldest that does"
        raise RemoteError(what, "update it, or use another")
    return version


def _fields(environ: Mapping[str, str]) -> dict[str, str | Secret]:
    """The keys to IM: a token, printed by a command or as it is, or user and password."""
    given = {name: environ.get(name, "").strip() for name in (TOKEN_COMMAND, TOKEN, USER)}
    if given[TOKEN_COMMAND]:
        return {"token": token_of(given[TOKEN_COMMAND])}
    if given[TOKEN]:
        return {"token": plain_token(given[TOKEN], f"{TOKEN} holds")}
    password = environ.get(PASSWORD, "")
    if not given[USER] and not password:
        raise Missing(f"no keys to the IM of {URL}", [KEYS], "set one of these")
    missing = [name for name, value in ((USER, given[USER]), (PASSWORD, password)) if not value]
    if missing:
        raise Missing(f"the keys to the IM of {URL} are half given", missing, "set both")
    return {"username": given[USER], "password": Secret(password)}
