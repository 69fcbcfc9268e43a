"""A job's offers: what each is, in which order they are tried, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from rich.console import Console
from tests.unit.cloud_fakes import TODAY, price_list

from mayfly.choices import choices, label, pool
from mayfly.clouds import load_job
from mayfly.errors import UserError
from mayfly.offer import Around, Options, make_offers
from mayfly.places import Place, Target
from mayfly.providers.ask import Clients
from mayfly.spec import load_spec
from mayfly.views import offers_document, plan_table

BUCKET = {"bucket": "my-models"}


def job(cloud: str = "aws", **given):
    return load_job(None, {"cloud": cloud, **BUCKET, **given}, {})


def labels(*entries: dict, **given) -> list[str]:
    spec, profile = job(ordered=list(entries), **given)
    return [label(Target(one, profile, Place())) for one in choices(spec, profile)]


def test_an_offer_takes_from_the_job_what_it_leaves_out():
    found = labels(
        {"region": "eu-west-1", "zone": "eu-west-1b"},
        {"instance": {"worker": "g5.xlarge"}, "spot": True},
        {"region": "us-west-2"},
        region="us-east-1",
        zone="us-east-1c",
    )
    assert found == [
        "eu-west-1, eu-west-1b, ps m6i.large, worker c6i.xlarge",
        "us-east-1, us-east-1c, ps m6i.large, worker g5.xlarge, spot",
        "us-west-2, ps m6i.large, worker c6i.xlarge",
    ]


def test_a_job_without_offers_is_its_only_one():
    spec, profile = job()
    assert choices(spec, profile) == [spec]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"any_of": []}, "any_of is .* must have one entry or more"),
        ({"any_of": [{"regoin": "x"}]}, "unknown key 'regoin' in any_of.0 .* mean 'region'"),
        ({"ordered": [{"instance": {"wroker": "x"}}]}, "'wroker' in ordered.0.instance"),
        ({"any_of": [{}], "ordered": [{}]}, "^the job — any_of and ordered are both set"),
        ({"any_of": {"region": "a"}}, "any_of .* must be a list"),
        ({"ordered": ["eu-west-1"]}, "ordered.0 is 'eu-west-1' .* must be a mapping"),
    ],
)
def test_what_is_no_list_of_offers_is_refused(given: dict, message: str):
    with pytest.raises(UserError, match=message):
        load_spec(None, {"cloud": "aws", **given}, {})


@pytest.mark.parametrize(
    ("cloud", "entry", "message"),
    [
        ("local", {"region": "x"}, "any_of has 1 offers, and cloud 'local' has neither regions"),
        ("openstack", {"region": "x"}, "any_of.0: region: cloud 'openstack' has no such choice"),
        ("azure", {"zone": "1"}, "any_of.0: zone: cloud 'azure' has no such choice"),
    ],
)
def test_what_a_cloud_has_not_cannot_be_offered(cloud: str, entry: dict, message: str):
    spec, profile = job(cloud, any_of=[entry])
    with pytest.raises(UserError, match=message):
        choices(spec, profile)


def offers(tmp_path: Path, key: str, entries: list[dict], **given):
    """Offers with the prices of a file: the first region costs twice as much, the last unknown."""
    lists = [price_list(), price_list(region="eu-west-1", types=DEARER)]
    file = tmp_path / "prices.yml"
    file.write_text(yaml.safe_dump_all([made.model_dump(mode="json") for made in lists]))
    spec, profile = job(**{key: entries}, **given)
    options = Options(dry_run=True, prices=file)
    return make_offers(spec, profile, options, Around({}, Clients(azure=None), tmp_path, TODAY))


DEARER = {"m6i.large": {"hour": 0.2}, "c6i.xlarge": {"hour": 0.4}}
ENTRIES = [
    {"instance": {"worker": "g5.xlarge"}},
    {"region": "eu-west-1"},
    {"region": "us-east-1"},
]


def test_any_of_puts_the_cheapest_first_and_the_unknown_last(tmp_path: Path):
    made = offers(tmp_path, "any_of", ENTRIES)
    found = [offer.plan.place.region for offer in made.offers]
    assert found == ["us-east-1", "eu-west-1", "us-east-1"]
    assert made.offers[-1].plan.why_unknown
    assert [other.spec.region for other in made.job.others] == ["eu-west-1", None]


def test_ordered_keeps_its_order(tmp_path: Path):
    made = offers(tmp_path, "ordered", ENTRIES)
    assert [offer.job.spec.region for offer in made.offers] == [None, "eu-west-1", "us-east-1"]


def test_what_the_budget_does_not_allow_is_left_out_and_said(tmp_path: Path):
    made = offers(tmp_path, "any_of", ENTRIES, budget="0.7 USD")
    assert [offer.plan.place.region for offer in made.offers] == ["us-east-1"]
    document = offers_document(made, {}, dry_run=True)
    said = [notice for notice in document["notices"] if "left out" in notice]
    assert len(said) == 2 and "price is unknown" in said[0] and "eu-west-1" in said[1]
    with pytest.raises(UserError, match="limits.budget is 0.1 USD"):
        offers(tmp_path, "any_of", ENTRIES[1:], budget="0.1 USD")


def test_a_quota_is_counted_where_the_nodes_are(tmp_path: Path):
    made = offers(tmp_path, "ordered", [{"region": "us-east-1"}, {}, {"region": "eu-west-1"}])
    pools = [pool(offer.job.target) for offer in made.offers]
    assert pools[0] == pools[1] != pools[2]


def test_a_plan_shows_all_offers_with_their_prices(tmp_path: Path):
    document = offers_document(offers(tmp_path, "any_of", ENTRIES), {}, dry_run=True)
    assert document["order"] == "any_of"
    assert [offer["price"]["known"] for offer in document["offers"]] == [True, True, False]
    console = Console(record=True, width=160)
    console.print(plan_table(document))
    text = console.export_text()
    assert "offer 1" in text and "eu-west-1, ps m6i.large" in text and "price unknown" in text
