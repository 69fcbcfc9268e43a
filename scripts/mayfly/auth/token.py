"""Access tokens that live an hour: printed by a command of the user's, as oidc-agent's does."""

from __future__ import annotations

import shlex
import subprocess

from mayfly.errors import UserError
from mayfly.redact import Secret

PATIENCE_S = 60


def token_of(command: str) -> Secret:
    """The token that a command prints on standard output. No shell is involved.

    Raises UserError when it cannot; what the command printed is never shown, for it may be a key.
    """
    words = _words(command)
    try:
        done = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
    except FileNotFoundError:
        raise UserError(f"the token's command is not installed: {words[0]}", "install it") from None
    except subprocess.TimeoutExpired:
        what = f"the token's command has not ended in {PATIENCE_S} s: {words[0]}"
        raise UserError(what, "run it yourself: it may ask something") from None
    except OSError as error:
        what = f"the token's command cannot be run: {words[0]}: {error.strerror}"
        raise UserError(what, "correct it") from None
    if done.returncode != 0:
        raise UserError(
            f"the token's command failed: {words[0]} ended with exit code {done.returncode}",
            "run it yourself to see why",
        )
    return plain_token(done.stdout, f"{words[0]} printed")


def plain_token(text: str, what: str) -> Secret:
    """A text as token. Raises UserError when it is none: empty, or with blanks in it."""
    token = text.strip()
    if not token or len(token.split()) > 1:
        raise UserError(f"{what} no token", "it has to be one word")
    return Secret(token)


def _words(command: str) -> list[str]:
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise UserError(f"the token's command cannot be read: {error}", "mind the quotes") from None
    if not words:
        raise UserError("the token's command is empty", "name a program")
    return words
