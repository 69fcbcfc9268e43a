"""Failures that users meet: each ends with its cause in one place, and with nothing running."""

from __future__ import annotations

from machine import mayfly, nodes, publish_repository

import testenv

FAILING = """\
import sys
print("preparing the model", flush=True)
sys.exit("the user's own mistake: no such column 'price'")
"""


def test_wrong_keys_are_refused_before_anything_is_made(platform, clean):
    wrong = {"MAYFLY_S3_SECRET_ACCESS_KEY": "notTheKeyOfThisServer0123456789"}
    outcome = mayfly("deploy", "--cloud", "local", "--workers", "2", "--json", env=wrong)
    assert outcome.code == 2
    assert outcome.document["ok"] is False
    assert "key" in outcome.document["error"]["message"]
    assert "notTheKey" not in outcome.messages
    assert "Traceback" not in outcome.messages
    assert nodes(platform) == []


def test_a_program_that_exits_non_zero(platform, bucket, clean, tmp_path):
    url = publish_repository(platform, bucket, tmp_path, "failing", {"train.py": FAILING})
    outcome = mayfly(
        *("deploy", "--cloud", "local", "--workers", "1", "--json"),
        *("--set", f"trainer.program={url}", "--set", "trainer.entrypoint=train.py"),
    )
    assert outcome.code == 1
    error = outcome.document["error"]
    assert outcome.document["ok"] is False
    assert outcome.document["leftovers"] == 0
    # Every task runs the program, so the first to fail may be any of them.
    assert error["task"] in ("ps-0", "chief-0", "evaluator-0")
    assert any("the user's own mistake" in line for line in error["log_tail"])
    assert "the user's own mistake" in outcome.messages
    assert testenv.CANARY not in outcome.messages
