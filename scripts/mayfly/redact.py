"""Hide secrets in text that is about to leave the process, by value."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

MINIMUM_LENGTH = 8  # shorter values occur in ordinary text, and hiding them breaks logs
MASK = "********"
# What signs an URL of S3's: IM and Ansible print URLs, and a token is percent-encoded there.
SIGNATURE = re.compile(r"(?<=X-Amz-Signature=)[0-9a-f]+|(?<=X-Amz-Security-Token=)[^\s&#'\"]+")
CREDENTIALS_IN_URL = re.compile(r"(?<=://)[^/\s@:]*:[^/\s@]+(?=@)")


class Secret:
    """A value that shows itself only to `reveal()`: its repr, str and format are a mask."""

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        self._value = value

    def reveal(self) -> str:
        """Return the value itself; call it where the value is handed to a library, not before."""
        return self._value

    def __repr__(self) -> str:
        return f"Secret({MASK!r})"

    def __str__(self) -> str:
        return MASK

    def __bool__(self) -> bool:
        return bool(self._value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and other._value == self._value

    def __hash__(self) -> int:
        return hash(self._value)


@dataclass(frozen=True)
class Redactor:
    """Replaces every known secret in a text by a mask, and what signs an URL."""

    secrets: tuple[Secret, ...] = ()

    def knowing(self, more: Iterable[Secret]) -> Redactor:
        """Return a redactor that also hides `more`; values under MINIMUM_LENGTH are not hidden."""
        return Redactor((*self.secrets, *more))

    def __call__(self, text: str) -> str:
        """Return the text without the secrets; the longest go first, as one may contain another."""
        values = {secret.reveal() for secret in self.secrets}
        for value in sorted(values, key=len, reverse=True):
            if len(value) >= MINIMUM_LENGTH:
                text = text.replace(value, MASK)
        return SIGNATURE.sub(MASK, text)


def hide(value: Any, redact: Callable[[str], str]) -> Any:
    """Return a document with every text in it redacted, passwords in addresses too."""
    if isinstance(value, str):
        return CREDENTIALS_IN_URL.sub(MASK, redact(value))
    if isinstance(value, Mapping):
        return {key: hide(item, redact) for key, item in value.items()}
    return [hide(item, redact) for item in value] if isinstance(value, list | tuple) else value
