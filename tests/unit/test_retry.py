from __future__ import annotations

import pytest

from mayfly_train.errors import BadInput, NodeError
from mayfly_train.retry import LONGEST_PAUSE_S, with_backoff


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
