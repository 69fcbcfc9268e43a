"""What every cloud's credentials have in common."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from mayfly.auth.entry import Entry
from mayfly.errors import MayflyError, UserError

CLOCK_LIMIT_S = 120.0  # AWS refuses signatures that are 5 minutes off, Google claims of 10


@dataclass(frozen=True)
class Identity:
    """Who a cloud says we are."""

    who: str
    """Account or project and user; never a key."""
    clock_skew_s: float | None = None
    """Seconds that this machine's clock is ahead of the cloud's; None when it did not say."""


class Credential(Protocol):
    """Keys to one cloud; its repr shows none of them."""

    @property
    def origin(self) -> str:
        """Where they were found, in words."""
        ...

    def entry(self) -> Entry:
        """The line of IM's auth file that they make. Raises UserError when IM cannot take them."""
        ...

    def identify(self) -> Identity:
        """Make one harmless call with them.

        Raises Untried when that is not possible here, UserError when they are refused, and
        RemoteError when nobody answers.
        """
        ...


class Missing(UserError):
    """Credentials of which something is not there; `names` says what, by variable or file."""

    def __init__(self, what: str, names: Iterable[str], hint: str) -> None:
        self.names = tuple(names)
        super().__init__(f"{what}: missing {', '.join(self.names)}", hint)


class Untried(MayflyError):
    """The credentials are there, but there is no way to try them here."""


def require(environ: Mapping[str, str], names: Iterable[str], what: str, hint: str) -> list[str]:
    """The values of the variables `names`, blanks around them gone.

    Raises Missing that names all that are empty.
    """
    values = {name: environ.get(name, "").strip() for name in names}
    missing = [name for name, value in values.items() if not value]
    if missing:
        raise Missing(what, missing, hint)
    return list(values.values())
