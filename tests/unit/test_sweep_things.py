"""Whose a thing is: pure decisions."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from mayfly.destroy import FRESH_S, is_fresh
from mayfly.ledger import Entry
from mayfly.sweep.things import IM_TAG, NETWORKS, TAG, Marks, infrastructure_of

ROOT = Path(__file__).resolve().parents[2]
INFRA = "0a1b2c3d-0000-11f1-8000-0242ac110002"
OURS = Marks(frozenset(["one"]), {INFRA: "one"})
ANY = Marks(None, {INFRA: "one"})


@pytest.mark.parametrize(
    ("tags", "name", "marks", "owner"),
    [
        ({TAG: "one"}, None, OURS, "one"),
        ({TAG: "one-2"}, None, OURS, None),
        ({TAG: "two"}, None, ANY, "two"),
        ({TAG: ""}, None, ANY, None),
        ({IM_TAG: INFRA}, None, OURS, "one"),
        ({IM_TAG: f"{INFRA}0"}, None, OURS, None),
        ({}, f"im-{INFRA}", OURS, "one"),
        ({}, f"im-{INFRA}-public", OURS, "one"),
        ({}, f"im-{INFRA}-private", OURS, "one"),
        ({}, f"im-{INFRA}-staging", OURS, None),
        ({}, f"im-{INFRA}0", OURS, None),
        ({}, "im-", OURS, None),
        ({}, "im-frontend", ANY, None),
        ({}, INFRA, OURS, None),
        ({}, None, OURS, None),
        ({TAG: "two"}, f"im-{INFRA}", OURS, None),
        ({TAG: "two", IM_TAG: INFRA}, f"im-{INFRA}", ANY, "two"),
    ],
)
def test_tags_and_whole_names_decide(tags, name, marks, owner):
    assert marks.owner(tags, name) == owner


def test_the_networks_are_those_of_the_radl():
    text = (ROOT / "radl/partials/networks.radl.j2").read_text()
    assert tuple(re.findall(r"^network (\w+)", text, re.MULTILINE)) == NETWORKS


def test_the_tag_is_that_of_the_radl():
    assert f"'{TAG}={{{{ run }}}}'" in (ROOT / "radl/partials/system.radl.j2").read_text()


@pytest.mark.parametrize(
    ("group", "found"),
    [
        (f"im-{INFRA}", INFRA),
        (f"im-{INFRA}-public", INFRA),
        (f"im-{INFRA}-other", None),
        ("im-frontend", None),
        (f"x-im-{INFRA}", None),
    ],
)
def test_only_a_group_of_ims_tells_an_infrastructure(group, found):
    assert infrastructure_of(group) == found


def test_what_was_asked_for_a_short_while_ago_may_still_appear():
    moment = datetime(2026, 11, 28, 12, tzinfo=UTC)

    def entry(action: str, age_s: float) -> Entry:
        intended = (moment - timedelta(seconds=age_s)).isoformat().replace("+00:00", "Z")
        return Entry("one", action, "x", None, None, intended)

    assert is_fresh([entry("create", 5)], moment)
    assert is_fresh([entry("create", 2 * FRESH_S), entry("create", 5)], moment)
    assert not is_fresh([entry("create", FRESH_S + 1), entry("remove", 1)], moment)
    assert not is_fresh([], moment)
