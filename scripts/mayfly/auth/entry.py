"""One line of IM's auth file, as IM's client takes it: in memory, so that no file is written.

The format: imdocs.readthedocs.io, "Authorization File". IM-client 1.8 sends the entries in a header
without quoting, and both ends cut it at every `=` and `;` outside quotes; a session token ends
in `=`. So every value is quoted here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mayfly.errors import UserError
from mayfly.redact import Secret

INFRASTRUCTURE_MANAGER = "InfrastructureManager"


@dataclass(frozen=True)
class Entry:
    """The keys to one service: `type` is IM's name of it, `fields` what IM wants to know."""

    type: str
    id: str
    fields: Mapping[str, str | Secret]

    @property
    def secrets(self) -> tuple[Secret, ...]:
        """The values that must never be shown."""
        return tuple(value for value in self.fields.values() if isinstance(value, Secret))


def client_item(entry: Entry) -> dict[str, str]:
    """The entry as `IMClient.init_client` takes it, its secrets in plain: made to be handed over.

    Raises UserError, without the value, for one that the format cannot carry.
    """
    item = {"id": entry.id, "type": entry.type}
    for key, value in entry.fields.items():
        plain = value.reveal() if isinstance(value, Secret) else value
        item[key] = _quoted(plain, f"{key} of the {entry.type} credentials")
    return item


def _quoted(value: str, name: str) -> str:
    """`value` in quotes that it does not contain; its line breaks are escaped by the client."""
    advice = "choose another: IM cannot be told this one"
    if "'" in value and '"' in value:
        raise UserError(f"{name} contains both ' and \"", advice)
    if "\\n" in value:
        raise UserError(f"{name} contains a backslash and an n, a line break to IM", advice)
    if value.strip() != value.strip("\n"):
        raise UserError(f"{name} has blanks at an end, which IM drops", advice)
    # requests puts a header that it refuses into its error, and with it all keys.
    if not value.replace("\n", "").isprintable() or not value.isascii():
        raise UserError(f"{name} contains a control character, or one outside ASCII", advice)
    quote = '"' if "'" in value else "'"
    return f"{quote}{value}{quote}"
