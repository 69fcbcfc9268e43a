"""OpenNebula's user and password, where its own command line has them."""

from __future__ import annotations

import xml.etree.ElementTree as ET
import xmlrpc.client
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

from mayfly.auth.credential import Identity, Missing
from mayfly.auth.entry import Entry
from mayfly.auth.web import call
from mayfly.errors import RemoteError, UserError
from mayfly.redact import Secret

DEFAULT_FILE = "~/.one/one_auth"
PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True)
class OpenNebula:
    """A user of one OpenNebula."""

    url: str  # of its XML-RPC interface, with a port
    user: str
    password: Secret
    origin: str

    def entry(self) -> Entry:
        name, password = self.user, self.password
        return Entry(
            "OpenNebula", "one", {"host": self.url, "username": name, "password": password}
        )

    def identify(self) -> Identity:
        """Ask who we are: one.user.info of user -1 (docs.opennebula.io: XML-RPC API)."""
        session = f"{self.user}:{self.password.reveal()}"
        body = xmlrpc.client.dumps((session, -1), "one.user.info")
        answer = call(
            "OpenNebula", "POST", self.url, data=body.encode(), headers={"Content-Type": "text/xml"}
        )
        granted, text = _result(answer.text, self.url)
        if not granted:
            raise UserError(
                f"OpenNebula at {self.url} refuses user {self.user}", f"check {self.origin}"
            )
        return Identity(f"user {_name(text) or self.user} at {self.url}", answer.clock_skew_s)


def find(environ: Mapping[str, str]) -> OpenNebula:
    """The user in the file ONE_AUTH at the service ONE_XMLRPC. Raises Missing or UserError."""
    hint = "set ONE_XMLRPC to http(s)://HOST:2633/RPC2, and ONE_AUTH to a file with user:password"
    named = environ.get("ONE_AUTH", "").strip()
    path = _expanded(named or DEFAULT_FILE, environ)
    missing = [] if environ.get("ONE_XMLRPC", "").strip() else ["ONE_XMLRPC"]
    if not path.is_file():
        missing.append(f"ONE_AUTH ({path})")
    if missing:
        raise Missing("no OpenNebula credentials", missing, hint)
    try:
        user, colon, password = path.read_text(encoding="utf-8").strip().partition(":")
    except (OSError, UnicodeDecodeError):
        raise UserError(f"ONE_AUTH cannot be read: {path}", hint) from None
    if not (user and colon and password):
        raise UserError(f"ONE_AUTH does not hold user:password: {path}", hint)
    return OpenNebula(_with_port(environ["ONE_XMLRPC"].strip()), user, Secret(password), str(path))


def _expanded(path: str, environ: Mapping[str, str]) -> Path:
    home = environ.get("HOME")
    return Path(home) / path[2:] if home and path.startswith("~/") else Path(path).expanduser()


def _with_port(url: str) -> str:
    """The address with its port written out: without one, IM's connector calls port -1."""
    parts = urlsplit(url)
    if parts.scheme not in PORTS or not parts.hostname:
        raise UserError(f"ONE_XMLRPC is no address: {url!r}", "write http(s)://HOST:2633/RPC2")
    port = parts.port or PORTS[parts.scheme]
    return f"{parts.scheme}://{parts.hostname}:{port}{parts.path}"


def _result(text: str, url: str) -> tuple[bool, str]:
    """OpenNebula's answer: whether it was granted, and its document."""
    try:
        (result,), _ = xmlrpc.client.loads(text)
        granted, document, *_ = cast(list[Any], result)
    except Exception:  # a fault, another server's page, or broken XML: each has its own exception
        raise RemoteError(f"what answers at {url} is no OpenNebula", "check ONE_XMLRPC") from None
    return bool(granted), str(document)


def _name(document: str) -> str | None:
    try:
        found: Any = ET.fromstring(document).findtext("NAME")
    except ET.ParseError:
        return None
    return str(found) if found else None
