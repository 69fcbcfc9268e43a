from __future__ import annotations

from mayfly.redact import MASK, Redactor, Secret


def test_a_secret_shows_itself_only_when_asked():
    secret = Secret("canary-value")
    shown = f"{secret} {secret!r} {[secret]}"
    assert "canary" not in shown
    assert secret.reveal() == "canary-value"


def test_values_are_hidden_wherever_they_stand():
    hide = Redactor().knowing([Secret("abcdefgh1"), Secret("zyxwvuts9")])
    assert hide("key=abcdefgh1&other=zyxwvuts9.") == f"key={MASK}&other={MASK}."


def test_a_value_that_contains_another_is_hidden_whole():
    hide = Redactor((Secret("abcdefgh"), Secret("abcdefghijkl")))
    assert hide("abcdefghijkl") == MASK


def test_short_values_are_left_alone():
    assert Redactor((Secret("run"),))("the run runs") == "the run runs"
