"""The `@input.name@` placeholders of a RADL: the only way in which secrets enter it.

The upstream client asks for each on standard input; ours fills them in memory just before it sends
the text to IM, and never writes the result.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from mayfly.errors import UserError

S3_ACCESS_KEY_ID = "s3_access_key_id"
S3_SECRET_ACCESS_KEY = "s3_secret_access_key"
S3_SESSION_TOKEN = "s3_session_token"
COLLECTION_URL = "collection_url"  # signed, where the roles lie in a bucket of the user's
STORE_PASSWORD = "store_password"  # drawn for each run; no user has to know it

_PLACEHOLDER = re.compile(r"@input\.([A-Za-z0-9_]+)@")
# A value lands inside single quotes in YAML inside RADL, and Ansible expands templates in it.
_UNSAFE = ("'", '"', "@", "{{", "{%", "{#")


def placeholder(name: str) -> str:
    """The text that stands for the input `name`."""
    return f"@input.{name}@"


def names(text: str) -> list[str]:
    """The inputs that a RADL asks for, in order of first appearance, each once."""
    return list(dict.fromkeys(_PLACEHOLDER.findall(text)))


def fill(text: str, values: Mapping[str, str]) -> str:
    """`text` with all its placeholders replaced.

    Raises UserError when a value is missing or could break the document; no message holds a value.
    """
    for name in names(text):
        if not values.get(name):
            raise UserError(f"the input {name} has no value", "give all that the RADL asks for")
        _check(name, values[name])
    return _PLACEHOLDER.sub(lambda match: values[match[1]], text)


def _check(name: str, value: str) -> None:
    found = next((mark for mark in _UNSAFE if mark in value), None)
    if found:
        raise UserError(f"the input {name} contains {found}", "use a key without it")
    if not value.isprintable() or value != value.strip():
        raise UserError(
            f"the input {name} contains blanks at an end, a line break or a control character",
            "copy the key again",
        )
