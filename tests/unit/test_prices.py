"""Price lists: read, chosen, refused, kept."""

from __future__ import annotations

import datetime as dt
from pathlib import Path

import pytest
from tests.unit.cloud_fakes import TODAY, price_list

from mayfly import prices
from mayfly.errors import UserError

ONE = """\
format: 1
cloud: aws
region: us-east-1
currency: EUR
date: 2026-11-01
source: our contract
types:
  m6i.large: {hour: 0.1, spot: [0.02, 0.04]}
"""


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "prices.yml"
    path.write_text(text)
    return path


def test_a_list_is_read(tmp_path: Path):
    (found,) = prices.read(written(tmp_path, ONE))
    assert found.of("m6i.large") == prices.TypePrice(hour=0.1, spot=(0.02, 0.04))
    assert found.of("m6i.xlarge") is None
    assert found.date == dt.date(2026, 11, 1)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("currency: EUR", "currency: euro", "currency is 'euro'"),
        ("hour: 0.1", "hour: -0.1", "types.m6i.large.hour is -0.1"),
        ("hour: 0.1", "hour: .nan", "types.m6i.large.hour"),
        ("hour: 0.1", "hour: cheap", "types.m6i.large.hour is 'cheap'"),
        ("[0.02, 0.04]", "[0.04, 0.02]", "lowest price before the highest"),
        ("date: 2026-11-01", "date: yesterday", "date is 'yesterday'"),
        ("source: our contract\n", "", "source"),
        ("format: 1", "format: 2", "format is 2"),
        ("types:", "typse:", "typse"),
        ("format: 1", "format: [1", "is not YAML"),
    ],
)
def test_what_is_wrong_in_it_is_one_line(tmp_path: Path, old, new, says):
    path = written(tmp_path, ONE.replace(old, new))
    with pytest.raises(UserError) as caught:
        prices.read(path)
    assert str(path) in str(caught.value)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "- a\n", "hello\n"])
def test_what_is_no_list_is_refused(tmp_path: Path, text):
    with pytest.raises(UserError):
        prices.read(written(tmp_path, text))


def test_a_missing_file_is_the_users(tmp_path: Path):
    with pytest.raises(UserError, match="cannot read the prices"):
        prices.read(tmp_path / "absent.yml")


def test_one_file_may_hold_several_lists(tmp_path: Path):
    every = ONE.replace("region: us-east-1\n", "").replace("our contract", "all regions")
    path = written(tmp_path, f"---\n{every}---\n{ONE}---\n{ONE.replace('aws', 'gcp')}")
    assert prices.find_given("aws", "us-east-1", {}, path).prices.source == "our contract"
    assert prices.find_given("aws", "eu-west-1", {}, path).prices.source == "all regions"
    assert prices.find_given("aws", "us-east-1", {"MAYFLY_PRICES": str(path)}, None) is not None
    with pytest.raises(UserError, match="no prices of azure in westeurope"):
        prices.find_given("azure", "westeurope", {}, path)


def test_the_flag_wins_over_the_environment(tmp_path: Path):
    path = written(tmp_path, ONE)
    absent = {"MAYFLY_PRICES": str(tmp_path / "absent.yml")}
    assert prices.find_given("aws", "us-east-1", absent, path) is not None
    assert prices.find_given("aws", "us-east-1", {}, None) is None


def test_what_was_fetched_is_kept_and_replaced(tmp_path: Path):
    assert prices.find_stored("aws", "us-east-1", tmp_path) is None
    prices.store(price_list(), tmp_path / "prices")
    path = prices.store(price_list(source="later"), tmp_path / "prices")
    found = prices.find_stored("aws", "us-east-1", tmp_path / "prices")
    assert found is not None
    assert (found.prices.source, found.origin) == ("later", str(path))
    assert prices.find_stored("aws", "us-west-1", tmp_path / "prices") is None
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_age():
    old = TODAY - dt.timedelta(days=prices.STALE_DAYS + 1)
    assert price_list(date=old).is_stale(TODAY)
    assert not price_list(date=old + dt.timedelta(days=1)).is_stale(TODAY)
