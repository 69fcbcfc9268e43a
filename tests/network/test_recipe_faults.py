"""Recipes whose machines fail, in network namespaces; `tests/bench/faults_recipes.py` has more."""

from __future__ import annotations

import random

from tests.bench import faults_recipes

TASKS = 160  # of a second, for four workers: the last fault comes half a minute after the first
DOWN_S = 60.0  # longer than giving a silent node up may take: the link's return tells nothing


def test_three_faults_lose_nothing_and_run_nothing_again():
    """A killed worker, a dropped link and a killed head, while there is enough to do for all."""
    kinds = ["kill", "link", "head"]
    found = faults_recipes.measure(kinds, random.Random(7), tasks=TASKS, task_s=1)
    assert found["kinds"] == {"kill": 1, "link": 1, "head": 1}, found
    assert (found["accepted"], found["lost"], found["reruns_of_finished"]) == (TASKS, 0, 0), found


def test_a_silent_node_is_given_up_within_half_a_minute():
    """No packet comes or goes, and no connection is closed: only its silence tells."""
    found = faults_recipes.measure(["link"], random.Random(7), tasks=5, task_s=40, hold_s=DOWN_S)
    assert (found["accepted"], found["lost"]) == (5, 0), found
    (after_s,) = found["silent_given_up_s"]
    assert after_s < 30, found
