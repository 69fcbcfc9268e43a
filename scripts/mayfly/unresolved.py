"""What a dry run does not know and `deploy` finds out: `@at-deploy.name@` stands for it.

The linter accepts these marks in what a dry run writes, and nowhere else.
"""

from __future__ import annotations

import re

_MARK = re.compile(r"@at-deploy\.([a-z0-9_]+)@")


def mark(name: str) -> str:
    """The text that stands for `name`: image, host, bucket, …"""
    return f"@at-deploy.{name}@"


def marks(text: str) -> list[str]:
    """The names of what a text leaves open, in order of first appearance, each once."""
    return list(dict.fromkeys(_MARK.findall(text)))
