"""The errors that Mayfly raises on purpose.

Every message reads `what is wrong: value — what to do`. The command line prints it as one line on
standard error and exits with `exit_code`; anything else that escapes is a bug of ours.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class MayflyError(Exception):
    """A failure that is explained to the user. `exit_code` is the process' exit status."""

    exit_code = 1

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        """One line: the message, and what to do about it when that is known."""
        text = f"{self.message} — {self.hint}" if self.hint else self.message
        return " ".join(text.split())


class UserError(MayflyError):
    """Something the user can put right: a flag, the job file, the machine. Exit code 2."""

    exit_code = 2


class OverBudget(UserError):
    """A budget that cannot be kept: too small, in another currency, or without a price."""


class RemoteError(MayflyError):
    """Another system (IM, a node, S3, Docker) refused or failed. Exit code 1."""


class RunFailed(MayflyError):
    """The cluster worked but training, or what follows it, did not end well. Exit code 1."""


class LimitReached(MayflyError):
    """A limit of the job (`reason`: budget, max_duration or idle) has ended its run. Exit code 3.

    That is no failure: what there was of the model is in the bucket, if training had begun.
    """

    exit_code = 3

    def __init__(self, reason: str, message: str, hint: str | None = None) -> None:
        super().__init__(message, hint)
        self.reason = reason


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that `word` was probably meant to be, or None when none is close."""
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return found[0] if found else None


def unknown(what: str, value: str, known: Iterable[str], hint: str | None = None) -> UserError:
    """The error for a `value` that is not one of the `known` ones; names the nearest."""
    names = sorted(known)
    guess = nearest(value, names)
    advice = f"did you mean {guess!r}?" if guess else hint
    return UserError(f"unknown {what}: {value!r} (known: {', '.join(names)})", advice)
