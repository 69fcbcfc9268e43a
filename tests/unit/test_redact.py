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


def test_what_signs_an_url_is_hidden_though_nobody_knows_it():
    """Another process than the one that signed it reads what Ansible has said of it."""
    query = "X-Amz-Expires=60&X-Amz-Security-Token=IQ%2Fo%3D&X-Amz-Signature=0a1b2c#/x.tar.gz"
    shown = f"X-Amz-Expires=60&X-Amz-Security-Token={MASK}&X-Amz-Signature={MASK}#/x.tar.gz"
    assert Redactor()(f"Delete the https://b/x.tar.gz?{query} collection") == (
        f"Delete the https://b/x.tar.gz?{shown} collection"
    )


def test_short_values_are_left_alone():
    assert Redactor((Secret("run"),))("the run runs") == "the run runs"
