"""Errors that people read: `what is wrong: value — what to do`, on one line."""

from __future__ import annotations


class NodeError(Exception):
    """Something went wrong that is ours or the remote side's; exit code 1."""

    exit_code = 1


class BadInput(NodeError):
    """Something that the user can set right; exit code 2."""

    exit_code = 2
