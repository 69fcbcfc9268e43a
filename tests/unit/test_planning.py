"""Plans and offers: price, budget, what is created, and what is said about them."""

from __future__ import annotations

import datetime as dt
import time
from email.utils import formatdate
from pathlib import Path
from types import SimpleNamespace

import pytest
from botocore.exceptions import ClientError
from tests.unit.cloud_fakes import TODAY, FakeEC2, FakePricing, price_list, size

from mayfly import planning, prices
from mayfly.clouds import load_job
from mayfly.errors import MayflyError, UserError
from mayfly.node_types import plan_nodes
from mayfly.offer import Around, Options, make_offer
from mayfly.places import Target, find_place
from mayfly.planning import Plan, created, make_plan
from mayfly.prices import Found, PriceList
from mayfly.providers.ask import Clients

NO_CLIENTS = Clients(azure=None)
TYPES = {"m6i.large": size(2, 8192), "c6i.xlarge": size(4, 8192)}


def plan(found: PriceList | None = None, **given) -> Plan:
    spec, profile = load_job(None, {"cloud": "aws", "bucket": "my-models", **given}, {})
    target = Target(spec, profile, find_place(spec, profile, {}))
    listed = Found(found, "the file") if found else None
    return make_plan(target, plan_nodes(spec, profile), listed, "nobody was asked", TODAY)


def test_a_plan_names_types_price_and_duration():
    made = planning.document(plan(price_list()))
    assert [group["type"] for group in made["groups"]] == ["m6i.large", "c6i.xlarge"]
    assert made["region"] == "us-east-1"
    price = made["price"]
    assert price["known"]
    assert price["currency"] == "USD"
    assert price["run"][0] < price["run"][1]
    # 1 ps at 0.1 and 2 workers at 0.2, disks and one address beside them.
    assert price["per_hour"][0] == pytest.approx(0.5 + 120 * 0.0001 + 0.005, abs=1e-4)
    assert price["spot_saves"]
    assert price["date"] == "2026-11-20"


def test_a_plan_says_where_nodes_get_the_roles():
    (said,) = [notice for notice in plan().notices if "roles" in notice]
    assert "s3://my-models/collection/" in said and "7 days" in said
    assert not [notice for notice in plan(collection="1.2.0").notices if "roles" in notice]


def test_without_prices_the_plan_says_so():
    price = planning.document(plan())["price"]
    assert price == {"known": False, "free": False, "why": "nobody was asked"}
    price = planning.document(plan(price_list(types={})))["price"]
    assert price["why"] == "the file has no price of m6i.large, c6i.xlarge"


def test_a_budget_without_a_price_is_refused():
    with pytest.raises(UserError, match="limits.budget is 5 USD, and the price is unknown: nobody"):
        plan(budget="5 USD")


def test_a_budget_in_another_currency_is_refused():
    with pytest.raises(UserError, match="5 EUR, and the prices are in USD"):
        plan(price_list(), budget="5 EUR")


def test_a_budget_below_the_least_price_is_refused():
    with pytest.raises(UserError, match="costs .* USD at least"):
        plan(price_list(), budget="0.01 USD")


def test_a_budget_that_may_not_suffice_is_said():
    said = plan(price_list(), budget="1 USD").notices
    assert any("may cost up to" in notice and "is stopped" in notice for notice in said)
    assert any("training is stopped 48 minutes after" in notice for notice in said)
    assert not any("may cost" in notice for notice in plan(price_list(), budget="99 USD").notices)


@pytest.mark.parametrize("budget", ["-5 USD", "0 USD", "5", "USD", "5 usd", "five USD", "1e3 USD"])
def test_what_is_no_budget_is_refused(budget):
    with pytest.raises(UserError, match="write an amount and a currency, such as 5 USD"):
        plan(price_list(), budget=budget)


def test_old_prices_are_said():
    old = price_list(date=TODAY - dt.timedelta(days=90))
    assert any("90 days old" in notice for notice in plan(old).notices)


def test_what_is_not_in_the_price_is_said():
    said = plan(price_list(transfer_gb=None)).notices
    assert any("not in the price, for want of one: transfer" in notice for notice in said)


def test_spot_without_a_spot_price_is_said():
    types = {"m6i.large": {"hour": 0.1}, "c6i.xlarge": {"hour": 0.2}}
    said = plan(price_list(types=types), **{"nodes.worker.spot": True}).notices
    assert any("counted as if on demand" in notice for notice in said)


def test_what_is_created_is_listed_by_kind():
    assert created(plan()) == {
        "instance": 3,
        "system disk": 3,
        "network interface": 3,
        "public address": 3,
        "security group": 3,
        "directory in the bucket": 1,
    }
    counts = created(plan(cloud="openstack"))
    assert (counts["server"], counts["floating address"]) == (3, 1)


def test_a_budget_on_ones_own_machine_needs_no_price():
    made = plan(cloud="local", budget="5 USD")
    assert made.free
    assert planning.document(made)["price"] == {"known": True, "free": True}


# --- offers -----------------------------------------------------------------------------------


def offer(tmp_path: Path, clients: Clients = NO_CLIENTS, *, dry_run=False, file=None, **given):
    spec, profile = load_job(None, {"cloud": "aws", "bucket": "my-models", **given}, {})
    options = Options(dry_run=dry_run, prices=file)
    return make_offer(spec, profile, options, Around({}, clients, tmp_path, TODAY))


def amazon(types=None) -> Clients:
    parts = {
        "ec2": FakeEC2(types=TYPES if types is None else types),
        "pricing": FakePricing({"m6i.large": [0.3], "c6i.xlarge": [0.4]}),
    }
    return Clients(aws=lambda service, region: parts[service], azure=None)


def nobody(*_):
    raise AssertionError("a dry run asked somebody")


def test_prices_come_from_the_provider_when_there_are_keys(tmp_path: Path):
    made = offer(tmp_path, amazon()).plan
    assert made.found is not None
    assert made.found.prices.types["m6i.large"].hour == 0.3
    assert made.found.prices.source == "AWS Price List API and EC2 spot price history"


def test_a_file_of_the_users_wins(tmp_path: Path):
    prices.store(price_list(source="the user's"), tmp_path / "own")
    file = tmp_path / "own/aws-us-east-1.json"
    made = offer(tmp_path, amazon(), file=file).plan
    assert made.found is not None
    assert made.found.prices.source == "the user's"


def test_without_keys_what_was_fetched_before_serves(tmp_path: Path):
    prices.store(price_list(), tmp_path)
    made = offer(tmp_path).plan
    assert made.found is not None
    assert made.found.prices.source == "made up"
    assert offer(tmp_path / "empty").plan.why_unknown


def test_a_dry_run_asks_nobody(tmp_path: Path):
    clients = Clients(aws=nobody, openstack=nobody, azure=nobody)
    for cloud in ("aws", "azure", "openstack", "local"):
        made = offer(tmp_path, clients, dry_run=True, cloud=cloud)
        assert made.job.finder is None


LOCAL_PRICES = """
cloud: local
currency: USD
date: 2026-11-20
source: made up
other: {hour: 1.0}
transfer_gb: 0
"""


def test_nodes_that_cost_nothing_cost_what_a_file_says(tmp_path: Path):
    file = tmp_path / "prices.yml"
    file.write_text(LOCAL_PRICES)
    made = offer(tmp_path, cloud="local", budget="2 USD", file=file)
    assert not made.plan.free
    assert made.job.basis == made.plan.basis
    assert (made.job.basis.per_hour, made.job.basis.end_s) == (3.0, 2400)
    others = tmp_path / "others.yml"
    others.write_text(LOCAL_PRICES.replace("local", "aws"))
    with pytest.raises(UserError, match="no prices of local"):
        offer(tmp_path, cloud="local", file=others)
    spec, profile = load_job(None, {"cloud": "local"}, {})
    around = Around({"MAYFLY_PRICES": str(others)}, NO_CLIENTS, tmp_path, TODAY)
    assert make_offer(spec, profile, Options(), around).plan.free


def test_a_type_that_the_region_lacks_is_refused_before_anything(tmp_path: Path):
    with pytest.raises(UserError, match="'m6i.large' does not exist in region us-east-1"):
        offer(tmp_path, amazon(types={}))


def test_gpus_are_checked_on_types_that_the_provider_describes(tmp_path: Path):
    types = {**TYPES, "x9.large": size(2, 8192)}
    asked = {"nodes.worker.instance": "x9.large", "nodes.worker.gpu": 1}
    with pytest.raises(UserError, match="type 'x9.large' has none"):
        offer(tmp_path, amazon(types), **asked)


class FakeFlavors:
    """Nova, as openstacksdk shows it."""

    compute = property(lambda self: self)

    def flavors(self):
        return iter([SimpleNamespace(name=name) for name in ("m1.small", "m1.large")])


@pytest.mark.parametrize("name", ["m1.lage", "m1.huge"])
def test_a_flavor_that_the_project_lacks_is_refused_before_anything(tmp_path: Path, name):
    clients = Clients(openstack=FakeFlavors, azure=None)
    asked = {"cloud": "openstack", "nodes.worker.instance": name}
    with pytest.raises(UserError, match=f"unknown flavor: '{name}' .known: m1.large, m1.small"):
        at_openstack(tmp_path, clients, **asked)
    at_openstack(tmp_path, clients, **{**asked, "nodes.worker.instance": "m1.large"})


def at_openstack(tmp_path: Path, clients: Clients, **given):
    spec, profile = load_job(None, {"bucket": "my-models", **given}, {})
    around = Around({"OS_AUTH_URL": "https://ks:5000/v3"}, clients, tmp_path, TODAY)
    return make_offer(spec, profile, Options(), around)


def test_a_clock_that_is_wrong_is_told_beside_amazon_s_refusal(tmp_path: Path):
    """Amazon says that the keys are wrong."""
    date = formatdate(time.time() - 900, usegmt=True)
    answer = {
        "Error": {"Code": "AuthFailure", "Message": "not able to validate the credentials"},
        "ResponseMetadata": {"HTTPHeaders": {"date": date}},
    }

    class Refusing:
        def describe_regions(self, **_):
            raise ClientError(answer, "DescribeRegions")

    clients = Clients(aws=lambda service, region: Refusing(), azure=None)
    with pytest.raises(MayflyError, match=r"not able to validate .* clock: it is \+90\d s from"):
        offer(tmp_path, clients)
    answer["ResponseMetadata"]["HTTPHeaders"]["date"] = formatdate(time.time(), usegmt=True)
    with pytest.raises(MayflyError, match="not able to validate .* check keys and network"):
        offer(tmp_path, clients)


def test_a_place_that_is_not_named_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match="host is not set for cloud 'openstack'.*OS_AUTH_URL"):
        offer(tmp_path, cloud="openstack")
