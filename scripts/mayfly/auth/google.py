"""A Google service account, by the JSON file that Google's own libraries read."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mayfly.auth.credential import Identity, Missing, Untried
from mayfly.auth.entry import Entry
from mayfly.auth.web import call
from mayfly.errors import UserError
from mayfly.redact import Secret

serialization: Any
try:
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import padding
except ImportError:  # an extra of its own: only trying the key needs it
    serialization = None

FILE = "GOOGLE_APPLICATION_CREDENTIALS"
PROJECT = "GOOGLE_CLOUD_PROJECT"
TOKEN_URL = "https://oauth2.googleapis.com/token"
SCOPE = "https://www.googleapis.com/auth/cloud-platform"
GRANT = "urn:ietf:params:oauth:grant-type:jwt-bearer"


@dataclass(frozen=True)
class Google:
    """A service account's key, and the project to work in."""

    email: str
    private_key: Secret  # PEM
    project: str
    origin: str

    def entry(self) -> Entry:
        """With the PEM key: the whole JSON file, which IM also takes, holds what a line cannot."""
        fields: dict[str, str | Secret] = {
            "username": self.email,
            "password": self.private_key,
            "project": self.project,
        }
        return Entry("GCE", "gce", fields)

    def identify(self) -> Identity:
        """Ask for a token (developers.google.com: Using OAuth 2.0 for server to server, HTTP/REST).

        It says nothing of the project, which is not asked for.
        """
        form = {"grant_type": GRANT, "assertion": self._assertion(int(time.time()))}
        answer = call("Google", "POST", TOKEN_URL, data=form)
        if not answer.ok:
            said = answer.document()
            raise UserError(
                f"Google refuses the service account: {said.get('error', answer.status)}",
                f"make a new key for {self.email}, and check this machine's clock",
            )
        return Identity(f"{self.email}; project {self.project} not tried", answer.clock_skew_s)

    def _assertion(self, now: int) -> str:
        """A claim of who we are, signed with the key: RFC 7515 and RFC 7523, valid five minutes."""
        if serialization is None:
            raise Untried(
                "Python's cryptography is not installed, which signs the question",
                "run: .venv/bin/pip install cryptography",
            )
        claims = {"iss": self.email, "scope": SCOPE, "aud": TOKEN_URL, "iat": now, "exp": now + 300}
        parts = [{"alg": "RS256", "typ": "JWT"}, claims]
        text = ".".join(_base64url(json.dumps(part).encode()) for part in parts)
        try:
            pem = self.private_key.reveal().encode()
            key = serialization.load_pem_private_key(pem, password=None)
            signature = key.sign(text.encode(), padding.PKCS1v15(), hashes.SHA256())
        except (ValueError, TypeError, AttributeError):
            raise UserError(
                f"the private key in {self.origin} is damaged", "make a new one"
            ) from None
        return f"{text}.{_base64url(signature)}"


def find(environ: Mapping[str, str]) -> Google:
    """The service account in the file that GOOGLE_APPLICATION_CREDENTIALS names.

    Raises Missing when the variable or the file is not there, UserError when it holds another kind.
    """
    hint = "give the path of a service account's JSON key"
    place = environ.get(FILE, "").strip()
    if not place:
        raise Missing("no Google credentials", [FILE], hint)
    path = Path(place).expanduser()
    key = _read(path)
    if key.get("type") != "service_account":
        raise UserError(f"{path} is not a service account's key: type {key.get('type')!r}", hint)
    project = environ.get(PROJECT, "").strip() or str(key.get("project_id") or "")
    email, pem = (str(key.get(name) or "") for name in ("client_email", "private_key"))
    if not (email and pem):
        raise UserError(f"{path} has no client_email or no private_key", hint)
    if not project:
        raise Missing("no Google project", [PROJECT], "set it to the project's identifier")
    return Google(email, Secret(pem.replace("\r", "")), project, str(path))


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{FILE} cannot be read: {path}: {error.strerror}", "correct it") from None
    except ValueError:
        # The parser's error would carry the whole text.
        raise UserError(f"{FILE} is not JSON: {path}", "download the key again") from None
    return content if isinstance(content, dict) else {}


def _base64url(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
