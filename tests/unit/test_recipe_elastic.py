"""How many nodes a run should have now."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mayfly.recipe.elastic import (
    IDLE_S,
    LONGEST_BACKOFF_S,
    MAKING_S,
    MISSING_S,
    Actions,
    Clocks,
    Node,
    Situation,
    backoff_s,
    decide,
)


def nodes(*states: str) -> tuple[Node, ...]:
    return tuple(Node(str(n), f"worker-{n}", state) for n, state in enumerate(states, start=1))


def idle(number: int, seconds: float = IDLE_S) -> Node:
    return Node(str(number), f"worker-{number}", "configured", idle_s=seconds)


UP = "configured"


def test_all_is_as_it_should_be():
    assert decide(Situation(2, 100, 2, nodes(UP, UP))) == Actions()


def test_what_is_missing_is_added():
    assert decide(Situation(4, 100, 2, nodes(UP, UP))) == Actions(add=2)


def test_a_task_on_several_nodes_keeps_them_and_asks_for_those_that_are_missing():
    there = (idle(1), idle(2), idle(3), idle(4))
    assert decide(Situation(4, 4, 4, there, together=4)) == Actions()
    assert decide(Situation(4, 4, 4, nodes(UP), together=4)) == Actions(add=3)


@pytest.mark.parametrize("state", ["off", "failed", "stopped", "unconfigured"])
def test_a_lost_node_is_removed_and_replaced(state: str):
    assert decide(Situation(2, 100, 2, nodes(UP, state))) == Actions(("2",), 1)


def test_a_node_that_the_head_has_not_seen_for_long_is_lost():
    silent = Node("2", "worker-2", UP, missing_s=MISSING_S)
    assert decide(Situation(2, 100, 2, (*nodes(UP), silent))) == Actions(("2",), 1)
    slow = Node("2", "worker-2", UP, missing_s=MISSING_S - 1)
    assert decide(Situation(2, 100, 2, (*nodes(UP), slow))) == Actions()


def test_a_node_that_is_never_configured_is_lost():
    slow = Node("2", "worker-2", "running", making_s=MAKING_S)
    assert decide(Situation(2, 100, 2, (*nodes(UP), slow), busy=True)) == Actions(("2",))
    assert (
        decide(Situation(2, 100, 2, (*nodes(UP), replace(slow, making_s=MAKING_S - 1))))
        == Actions()
    )


def test_a_state_that_passes_is_waited_for():
    assert decide(Situation(3, 100, 2, nodes("pending", "running", "unknown"))) == Actions()


def test_while_im_is_busy_nothing_is_added_and_lost_nodes_go():
    assert decide(Situation(3, 100, 2, nodes(UP, "off"), busy=True)) == Actions(("2",))


def test_no_more_nodes_than_tasks_are_wanted():
    assert decide(Situation(10, 5, 2, nodes(UP))) == Actions(add=2)
    assert decide(Situation(10, 1, 2, ())) == Actions(add=1)


def test_idle_nodes_are_removed_when_less_is_left_than_they_could_do():
    there = (*nodes(UP), idle(2), idle(3), idle(11))
    assert decide(Situation(4, 3, 2, there)) == Actions(("11", "3"))


def test_a_node_that_has_been_idle_for_a_moment_stays():
    assert decide(Situation(2, 1, 2, (*nodes(UP), idle(2, IDLE_S - 1)))) == Actions()


def test_idle_nodes_stay_while_there_is_work_for_them():
    assert decide(Situation(2, 4, 2, (idle(1), idle(2)))) == Actions()


def test_nothing_left_needs_no_node():
    assert decide(Situation(2, 0, 2, (idle(1), idle(2)))) == Actions(("2", "1"))


def test_failures_put_off_the_next_try():
    now = Situation(2, 100, 2, nodes(UP), failures=3, since_failure_s=backoff_s(3) - 1)
    assert decide(now) == Actions()
    later = Situation(2, 100, 2, nodes(UP), failures=3, since_failure_s=backoff_s(3))
    assert decide(later) == Actions(add=1)


def test_the_pause_doubles_up_to_a_limit():
    assert [backoff_s(n) for n in range(4)] == [0, 30, 60, 120]
    assert backoff_s(50) == LONGEST_BACKOFF_S


def test_a_clock_starts_anew_when_it_no_longer_holds():
    clocks = Clocks()
    assert clocks.update({"a": True, "b": False}, 10) == {"a": 0}
    assert clocks.update({"a": True, "b": True}, 15) == {"a": 5, "b": 0}
    assert clocks.update({"a": False}, 20) == {}
    assert clocks.update({"a": True}, 25) == {"a": 0}
