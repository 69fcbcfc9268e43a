from __future__ import annotations

import pytest

from mayfly_train import retry
from mayfly_train.errors import BadInput, NodeError
from mayfly_train.retry import LONGEST_PAUSE_S, PATIENCE_S, with_backoff


def failing(times, error=NodeError):
    """An action that fails so many times, and the attempts that it saw."""
    seen = []

    def action(attempt):
        seen.append(attempt)
        if len(seen) <= times:
            raise error(f"failure {len(seen)}")
        return "done"

    return action, seen


def test_it_is_tried_again_with_growing_pauses(no_pause):
    action, seen = failing(7)
    assert with_backoff(action) == "done"
    assert seen == list(range(8))
    assert len(no_pause) == 7
    assert no_pause[3] > no_pause[0]
    assert max(no_pause) <= LONGEST_PAUSE_S


def test_the_last_error_is_raised(no_pause):
    action, _ = failing(9)
    with pytest.raises(NodeError, match="failure 3"):
        with_backoff(action, attempts=3)


@pytest.mark.parametrize("error", [BadInput, KeyError])
def test_what_cannot_pass_is_raised_at_once(no_pause, error):
    action, seen = failing(1, error)
    with pytest.raises(error):
        with_backoff(action)
    assert seen == [0] and no_pause == []


def test_an_outage_is_told_in_time_however_long_an_attempt_takes(no_pause, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(retry, "monotonic", lambda: now[0])
    seen = []

    def slow(attempt):
        seen.append(attempt)
        now[0] += 40
        raise NodeError("no answer")

    with pytest.raises(NodeError, match="no answer"):
        with_backoff(slow)
    assert seen == [0, 1, 2] and now[0] <= 2 * 40 + PATIENCE_S


def test_an_attempt_that_got_ahead_starts_the_patience_anew(no_pause, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(retry, "monotonic", lambda: now[0])

    def long_copy(attempt):
        if attempt == 5:
            return "done"
        now[0] += 1000
        raise NodeError("a DataNode died")

    assert with_backoff(long_copy) == "done"
