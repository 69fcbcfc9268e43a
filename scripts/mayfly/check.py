"""What a cloud needs and what is missing, by name: `mayfly check`.

Nothing is made or started. Each thing is looked at even when another is missing, and with keys one
harmless call is made, which tells who we are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mayfly import preflight
from mayfly.auth.credential import CLOCK_LIMIT_S, Credential, Missing, Untried
from mayfly.auth.entry import client_item
from mayfly.auth.find import CLOUDS, FINDERS
from mayfly.credentials import find_s3_settings
from mayfly.errors import MayflyError, UserError, unknown
from mayfly.im_server import find_server, greet
from mayfly.local import cloudim, engine, imservice, s3server
from mayfly.local.paths import find_paths
from mayfly.redact import CREDENTIALS_IN_URL, MASK, Redactor
from mayfly.spec import s3_uri
from mayfly_train.errors import NodeError

LOCAL, STATIC = "local", "static"
OK, MISSING, FAILED, UNTRIED = "ok", "missing", "failed", "not tried"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at; `exit_code` is what it alone would end the command with."""

    check: str
    state: str  # ok | missing | failed | not tried
    detail: str
    missing: tuple[str, ...] = ()  # variables and files
    exit_code: int = 0


def look(cloud: str, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Look at all that a cloud needs, one thing after another.

    Raises UserError for an unknown cloud; what is wrong with a known one is a finding.
    """
    if cloud not in CLOUDS:
        raise unknown("cloud", cloud, CLOUDS, "its credentials are not known")
    if cloud == LOCAL:
        yield from _local(environ)
        return
    if cloud in FINDERS:
        yield from _credentials(cloud, environ)
    else:
        yield Finding("credentials", OK, "none are needed: the machines are reached by your SSH")
    if cloud != STATIC:
        yield _ask("im", lambda: _im(environ))
    yield _ask("s3", lambda: _s3(environ))


def document(cloud: str, findings: list[Finding]) -> dict[str, Any]:
    """The findings for --json; `who` is the account or project, null while nobody told it."""
    told = (found.detail for found in findings if (found.check, found.state) == ("identity", OK))
    return {
        "ok": exit_code(findings) == 0,
        "cloud": cloud,
        "who": next(told, None),
        "missing": [name for found in findings for name in found.missing],
        "checks": [
            {"check": found.check, "state": found.state, "detail": found.detail}
            for found in findings
        ],
    }


def lines(findings: list[Finding]) -> str:
    """The findings for people, a line for each."""
    return "\n".join(f"{found.state:9}  {found.check:11}  {found.detail}" for found in findings)


def exit_code(findings: list[Finding]) -> int:
    """2 when something has to be set or corrected here, 1 when the other side failed, else 0."""
    return max((found.exit_code for found in findings), default=0)


def _credentials(cloud: str, environ: Mapping[str, str]) -> Iterator[Finding]:
    try:
        credential = FINDERS[cloud](environ)
        client_item(credential.entry())  # IM's form cannot carry everything
    except MayflyError as error:
        yield _failure("credentials", error)
        return
    yield Finding("credentials", OK, f"found by {credential.origin}")
    yield from _identity(credential)


def _identity(credential: Credential) -> Iterator[Finding]:
    hide = Redactor(credential.entry().secrets)
    try:
        found = credential.identify()
    except MayflyError as error:
        yield _failure("identity", error, hide)
        return
    yield Finding("identity", OK, hide(found.who))
    skew = found.clock_skew_s
    if skew is None:
        yield Finding("clock", UNTRIED, "the cloud did not tell its time")
    elif abs(skew) > CLOCK_LIMIT_S:
        told = f"this machine's clock is {skew:+.0f} s from the cloud's"
        yield _failure("clock", UserError(told, "set it: signatures and tokens have a time"))
    else:
        yield Finding("clock", OK, f"{skew:+.0f} s from the cloud's")


def _im(environ: Mapping[str, str]) -> str:
    server = find_server(environ)
    if server is None:
        return cloudim.check(environ)
    return f"IM {greet(server)} at {server.url} takes the keys"


def _s3(environ: Mapping[str, str]) -> str:
    settings = find_s3_settings(environ, None)
    bucket = environ.get("MAYFLY_BUCKET", "").strip()
    if not bucket:
        return f"keys found by {settings.origin}; no bucket tried: MAYFLY_BUCKET is not set"
    try:
        uri = s3_uri(bucket)
    except ValueError as error:
        raise UserError(f"MAYFLY_BUCKET is {bucket!r}: {error}", "correct it") from None
    preflight.check_bucket(settings.client(), uri)
    return f"keys found by {settings.origin} can list {bucket}"


def _local(environ: Mapping[str, str]) -> Iterator[Finding]:
    """The engine, and the ports of the two services."""
    paths = find_paths(environ)
    yield _ask("engine", lambda: engine.check(paths, environ))
    yield _ask("im", lambda: _free(imservice.check, imservice.LOCAL, paths, environ))
    yield _ask("s3", lambda: _free(s3server.check, paths, environ))


def _free(check: Callable[..., None], *given: object) -> str:
    check(*given)
    return "its port is free, or ours already"


def _ask(check: str, question: Callable[[], str]) -> Finding:
    try:
        return Finding(check, OK, question())
    except (MayflyError, NodeError) as error:
        return _failure(check, error)


def _failure(
    check: str, error: MayflyError | NodeError, hide: Callable[[str], str] = str
) -> Finding:
    """What an error says, without secrets; one that could not be tried fails nothing."""
    text = CREDENTIALS_IN_URL.sub(MASK, hide(" ".join(str(error).split())))
    if isinstance(error, Untried):
        return Finding(check, UNTRIED, text)
    if isinstance(error, Missing):
        return Finding(check, MISSING, text, error.names, error.exit_code)
    return Finding(check, FAILED, text, (), error.exit_code)
