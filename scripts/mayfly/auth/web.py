"""One call over HTTP: a limit to its time, and errors that name the address and no key."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from typing import Any

import requests

from mayfly.errors import RemoteError

TIMEOUTS_S = (10, 30)  # to connect, to answer


@dataclass(frozen=True)
class Answer:
    """What came back: status, text, headers with lower-case names, and the clocks' difference."""

    status: int
    text: str
    headers: dict[str, str]
    clock_skew_s: float | None  # ours minus theirs

    @property
    def ok(self) -> bool:
        """Whether the call was granted."""
        return HTTPStatus.OK <= self.status < HTTPStatus.MULTIPLE_CHOICES

    def document(self) -> dict[str, Any]:
        """The JSON object in the text; empty when there is none."""
        try:
            found = json.loads(self.text)
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}


def call(what: str, method: str, url: str, **options: Any) -> Answer:
    """Send one request; `options` are those of requests. Follows no redirect: keys stay where sent.

    Raises RemoteError when `what` cannot be reached or its certificate is not trusted.
    """
    try:
        response = requests.request(
            method, url, timeout=TIMEOUTS_S, allow_redirects=False, **options
        )
    except requests.exceptions.SSLError as error:
        raise RemoteError(
            f"the certificate of {what} at {url} is not accepted: {ssl_cause(error)}",
            "check the address; for an own authority set REQUESTS_CA_BUNDLE to its certificate",
        ) from None
    except requests.RequestException as error:
        raise RemoteError(
            f"{what} does not answer at {url}: {cause(error)}", "check the address and the network"
        ) from None
    headers = {name.lower(): value for name, value in response.headers.items()}
    return Answer(
        response.status_code, response.text, headers, clock_skew_s(headers.get("date"), time.time())
    )


def clock_skew_s(date: str | None, now: float) -> float | None:
    """Seconds that `now` (Unix time) is ahead of an HTTP Date header, which has whole seconds."""
    if not date:
        return None
    try:
        return round(now - parsedate_to_datetime(date).timestamp(), 1)
    except ValueError:
        return None


def cause(error: requests.RequestException) -> str:
    """Why there was no answer, in few words; the library's own text repeats address and objects."""
    text = str(error)
    if isinstance(error, requests.exceptions.Timeout):
        return "no answer in time"
    for sign, words in (
        ("refused", "connection refused"),
        ("resolve", "the name is not known"),
        ("unreachable", "network unreachable"),
    ):
        if sign in text:
            return words
    return type(error).__name__


def ssl_cause(error: requests.exceptions.SSLError) -> str:
    """What is wrong with a certificate, as OpenSSL says it."""
    _, found, rest = str(error).partition("verify failed: ")
    if found:
        return rest.partition(" (")[0]
    return "the other side does not speak TLS" if "WRONG_VERSION" in str(error) else "TLS failed"
