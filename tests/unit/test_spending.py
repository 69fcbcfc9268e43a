"""What a run has cost, will cost, and when its budget ends it."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest
from tests.unit.cloud_fakes import price_list

from mayfly.cost import Interval, estimate
from mayfly.errors import UserError
from mayfly.ledger import Entry, Record
from mayfly.meter import cost_of
from mayfly.node_types import Nodes
from mayfly.spec import Budget
from mayfly.spending import Basis, after, cost_document, describe, lifetime_s, make_basis, remaining
from mayfly.watch import Status

HOURS = Interval(0.5, 4.0)


def dollars(amount: float) -> Budget:
    return Budget(amount=amount, currency="USD")


def basis(budget: Budget | None, **prices) -> Basis:
    plain = {"disk_gb_month": None, "address_hour": None, "transfer_gb": 0.1, **prices}
    nodes = (
        Nodes("ps", 1, "m6i.large", None, 0, False, 20, True),
        Nodes("worker", 2, "c6i.xlarge", None, 0, True, 50, False),
    )
    made = estimate(nodes, price_list(**plain), HOURS)
    assert made is not None
    return make_basis(made, budget, {"source": "made up"})


def test_the_cap_follows_from_the_dearest_price_and_leaves_time_to_export():
    made = basis(dollars(1.5))
    # One ps at 0.1 and two spot workers at up to 0.2; 5 GB may leave the region.
    assert (made.per_hour, made.once) == (pytest.approx(0.5), pytest.approx(0.5))
    assert made.end_s == 7200
    assert made.train_s == 6600


def test_a_budget_that_leaves_no_time_to_train_is_refused():
    with pytest.raises(UserError, match="pays for 14 minutes: no time to train") as refused:
        basis(dollars(0.62))
    assert "allow 0.63 USD or more" in str(refused.value)
    assert basis(dollars(0.64)).train_s > 300


def test_what_other_offers_have_cost_is_part_of_the_budget():
    made = after(basis(dollars(1.5)), 0.25)
    assert made.end_s == 5400
    assert cost_document(made, 3600, None)["spent"] == 0.75
    with pytest.raises(UserError, match="no time to train"):
        after(basis(dollars(1.5)), 0.9)


def test_without_a_budget_and_without_a_price_nothing_is_capped():
    assert basis(None).train_s is None
    free = {"types": {"m6i.large": {"hour": 0}, "c6i.xlarge": {"hour": 0}}}
    assert basis(dollars(1), **free).end_s is None


def test_a_basis_is_kept_as_it_was():
    made = basis(dollars(5))
    assert Basis.of(made.document()) == made
    assert Basis.of(None) is None


def entry(action: str, intended: str, ended: str | None, outcome: str | None = "done") -> Entry:
    return Entry("r", action, "x", outcome, None, f"2026-11-28T{intended}Z", ended)


NOW = datetime(2026, 11, 28, 12, 0, tzinfo=UTC)
CREATED = entry("create", "10:00:00.000", "2026-11-28T10:00:05.000Z")


def test_nodes_cost_from_when_they_were_asked_for_until_they_are_gone():
    assert lifetime_s([], False, NOW) == 0
    assert lifetime_s([CREATED], False, NOW) == 7200
    failed = entry("destroy", "11:00:00.000", "2026-11-28T11:00:10.000Z", "failed")
    assert lifetime_s([CREATED, failed], False, NOW) == 7200
    gone = entry("destroy", "11:30:00.000", "2026-11-28T11:30:00.000Z")
    assert lifetime_s([CREATED, failed, gone], True, NOW) == 5400
    swept = entry("remove", "11:30:00.000", "2026-11-28T11:45:00.000Z")
    assert lifetime_s([CREATED, failed, swept], True, NOW) == 6300, "IM was silent"
    asked = entry("create", "10:00:00.000", None, None)
    assert lifetime_s([asked], False, NOW) == 7200, "who was killed may have made them"


@pytest.mark.parametrize(
    ("state", "eta", "seconds"),
    [
        ("starting", None, 3600 - 100 + 600),
        ("training", 50.0, 650),
        ("training", None, 4100),
        ("stopping", None, 600),
        ("exporting", None, 600),
        ("succeeded", None, 60),
    ],
)
def test_what_is_left_is_what_the_run_says_or_all_that_it_may_take(state, eta, seconds):
    assert remaining(state, eta, 100.0, 3600.0) == seconds


def test_a_forecast_beyond_the_budget_says_what_will_happen():
    made = replace(basis(dollars(1.5)), once=0.0)
    early = cost_document(made, 3600, 1800)
    assert early == {"spent": 0.5, "forecast": 0.75, "budget": 1.5, "currency": "USD"}
    assert describe(early) == "0.500 of 1.5 USD spent, 0.750 at the end"
    assert describe(cost_document(made, 3600, 36_000)).endswith("it will be stopped before")
    assert describe(cost_document(made, 3600, None)) == "0.500 of 1.5 USD spent"


def test_a_run_of_the_ledgers_is_told_from_its_journal():
    spec = {"limits": {"max_duration": 3600}}
    record = Record(
        *("r", "aws", "training", "s3://b/r/", "i", spec, None, None, None, "", ""),
        cost=basis(None).document(),
    )
    status = Status(state="training", eta_s=1200.0)
    found = cost_of(record, [CREATED], status, NOW)
    assert found == {"spent": 1.0, "forecast": 1.75, "budget": None, "currency": "USD"}
    gone = replace(record, state="destroyed")
    ended = entry("destroy", "11:00:00.000", "2026-11-28T11:00:00.000Z")
    assert cost_of(gone, [CREATED, ended], None, NOW)["forecast"] == 0.5
    assert cost_of(replace(record, cost=None), [CREATED], status, NOW) is None
