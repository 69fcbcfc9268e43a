"""Errors read on one line and exit as users and scripts expect."""

from __future__ import annotations

import pytest

from mayfly.errors import MayflyError, RemoteError, RunFailed, UserError, nearest, unknown


def test_one_line_with_what_to_do():
    assert str(UserError("steps is -1", "give\n  a  positive number")) == (
        "steps is -1 — give a positive number"
    )
    assert str(UserError("steps is -1")) == "steps is -1"


@pytest.mark.parametrize(
    ("kind", "code"), [(UserError, 2), (RemoteError, 1), (RunFailed, 1), (MayflyError, 1)]
)
def test_exit_codes(kind, code):
    assert kind("x").exit_code == code


def test_the_nearest_word():
    assert nearest("wroker", ["worker", "ps"]) == "worker"
    assert nearest("zzz", ["worker", "ps"]) is None


def test_an_unknown_value_lists_the_known_and_the_nearest():
    text = str(unknown("cloud", "loacl", ["local", "aws"]))
    assert text == "unknown cloud: 'loacl' (known: aws, local) — did you mean 'local'?"
    assert str(unknown("cloud", "zz", ["aws"], "add a file")).endswith("— add a file")
