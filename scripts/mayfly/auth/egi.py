"""An EGI access token for one site and virtual organisation, by the variables of fedcloudclient."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mayfly.auth.credential import Identity, Missing, Untried
from mayfly.auth.entry import Entry
from mayfly.auth.token import plain_token, token_of
from mayfly.auth.web import call
from mayfly.errors import UserError
from mayfly.redact import Secret

COMMAND, TOKEN, ACCOUNT = "EGI_TOKEN_COMMAND", "OIDC_ACCESS_TOKEN", "OIDC_AGENT_ACCOUNT"
SOURCES = f"{COMMAND}, {TOKEN} or {ACCOUNT}"


@dataclass(frozen=True)
class Egi:
    """A token, which lives about an hour, and where it is to be used."""

    site: str
    vo: str
    token: Secret
    origin: str

    def entry(self) -> Entry:
        return Entry("EGI", "egi", {"host": self.site, "vo": self.vo, "token": self.token})

    def identify(self) -> Identity:
        """Ask the token's issuer who has it (OpenID Connect Discovery and UserInfo).

        It says nothing of site and organisation, which are not asked for.
        """
        claims = _claims(self.token)
        issuer = str(claims.get("iss") or "")
        if not issuer.startswith("https://"):
            raise Untried("the token does not say who issued it")
        _require_fresh(claims, time.time(), self.origin)
        known = call("EGI", "GET", f"{issuer.rstrip('/')}/.well-known/openid-configuration")
        place = str(known.document().get("userinfo_endpoint") or "")
        if not place.startswith("https://"):
            raise Untried(f"{issuer} does not say where to ask")
        bearer = {"Authorization": f"Bearer {self.token.reveal()}"}
        answer = call("EGI", "GET", place, headers=bearer)
        if not answer.ok:
            raise UserError(f"EGI refuses the token: {answer.status}", f"renew it: {SOURCES}")
        said = answer.document()
        name = said.get("preferred_username") or said.get("name") or said.get("sub") or "unknown"
        where = f"VO {self.vo} at site {self.site} not tried"
        return Identity(f"{name} of {issuer}; {where}", answer.clock_skew_s)


def find(environ: Mapping[str, str]) -> Egi:
    """The token, from a command that prints it or as it is. Raises Missing or UserError."""
    missing = [name for name in ("EGI_SITE", "EGI_VO") if not environ.get(name, "").strip()]
    if not any(environ.get(name, "").strip() for name in (COMMAND, TOKEN, ACCOUNT)):
        missing.append(SOURCES)
    if missing:
        hint = f"{COMMAND} is a command that prints a token, such as `oidc-token egi`"
        raise Missing("no EGI credentials", missing, hint)
    token, origin = _token(environ)
    return Egi(environ["EGI_SITE"].strip(), environ["EGI_VO"].strip(), token, origin)


def _token(environ: Mapping[str, str]) -> tuple[Secret, str]:
    if command := environ.get(COMMAND, "").strip():
        return token_of(command), COMMAND
    if token := environ.get(TOKEN, "").strip():
        return plain_token(token, f"{TOKEN} holds"), TOKEN
    # --time: how long the token is still to be good for, in seconds.
    return token_of(f"oidc-token --time 600 {environ[ACCOUNT].strip()}"), ACCOUNT


def _claims(token: Secret) -> dict[str, Any]:
    """What a JWT (RFC 7519) says, not verified; raises Untried when the token is no JWT."""
    try:
        _, payload, _ = token.reveal().split(".")
        padded = payload + "=" * (-len(payload) % 4)
        claims = json.loads(base64.urlsafe_b64decode(padded))
    except ValueError:
        claims = None
    if not isinstance(claims, dict):
        raise Untried("the token is not one that can be read (a JWT)") from None
    return claims


def _require_fresh(claims: Mapping[str, Any], now: float, origin: str) -> None:
    ends = claims.get("exp")
    if isinstance(ends, int | float) and ends < now:
        raise UserError(f"the EGI token expired {now - ends:.0f} s ago", f"renew it: {origin}")
