"""Where nodes are made: job before environment before the cloud's default, and what cannot be."""

from __future__ import annotations

import pytest

from mayfly.clouds import load_job
from mayfly.errors import UserError
from mayfly.places import Place, filled, find_place, missing_notices, require


def place(cloud: str, environ: dict[str, str] | None = None, **given: object) -> Place:
    spec, profile = load_job(None, {"cloud": cloud, **given}, {}, dry_run=True)
    return find_place(spec, profile, environ or {})


def test_the_job_wins_over_the_environment_and_that_over_the_default():
    assert place("aws").region == "us-east-1"
    assert place("aws", {"AWS_DEFAULT_REGION": "eu-west-3"}).region == "eu-west-3"
    both = {"AWS_REGION": "eu-west-2", "AWS_DEFAULT_REGION": "eu-west-3"}
    assert place("aws", both).region == "eu-west-2"
    assert place("aws", both, region="us-west-2").region == "us-west-2"


def test_of_a_servers_url_the_host_is_taken():
    found = place("openstack", {"OS_AUTH_URL": "https://keystone.example.org:5000/v3"})
    assert found.values["host"] == "keystone.example.org"
    assert found.missing == ()


@pytest.mark.parametrize(
    ("cloud", "region", "example"),
    [
        ("aws", "europe", "eu-west-1"),
        ("aws", "us-east-1a", "eu-west-1"),
        ("gcp", "us-central1", "europe-west4-a"),
        ("azure", "West-Europe", "northeurope"),
    ],
)
def test_what_can_be_no_region_is_refused_with_one_that_can(cloud, region, example):
    with pytest.raises(UserError) as caught:
        place(cloud, region=region)
    assert f"region is {region!r}" in str(caught.value)
    assert example in str(caught.value)


def test_what_is_missing_is_marked_and_said_in_a_dry_run():
    spec, profile = load_job(None, {"cloud": "egi"}, {}, dry_run=True)
    found = find_place(spec, profile, {"EGI_VO": "vo.example.org"})
    assert found.missing == ("region",)
    assert filled(found)["region"] == "@at-deploy.region@"
    assert missing_notices(found, profile) == [
        "region is not set: deploy needs --region or EGI_SITE"
    ]


def test_what_is_missing_is_an_error_else():
    spec, profile = load_job(None, {"cloud": "opennebula"}, {}, dry_run=True)
    with pytest.raises(UserError, match="host is not set for cloud 'opennebula'.*ONE_XMLRPC"):
        require(find_place(spec, profile, {}), profile)
