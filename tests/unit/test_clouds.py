"""Cloud profiles: data files, checked as they are read."""

from __future__ import annotations

from pathlib import Path

import pytest

from mayfly.clouds import CLOUDS, known_clouds, load_cloud, load_job, notices
from mayfly.errors import MayflyError, UserError
from mayfly.node_types import plan_nodes
from mayfly.role_vars import gpus


@pytest.mark.parametrize("name", known_clouds())
def test_every_profile_is_valid(name):
    profile = load_cloud(name)
    assert profile.name == name
    assert set(profile.sizes) == {"ps", "worker"}


def test_local_costs_nothing_and_has_a_bucket():
    profile = load_cloud("local")
    assert not profile.needs_confirmation
    assert profile.bucket
    assert profile.collection == "url"


def test_an_unknown_cloud_lists_the_known_ones():
    with pytest.raises(UserError) as caught:
        load_cloud("loacl")
    assert "unknown cloud: 'loacl'" in str(caught.value)
    assert "known: " in str(caught.value)
    assert "did you mean 'local'?" in str(caught.value)


@pytest.mark.parametrize("name", ["../local", "", "zzz"])
def test_no_way_out_of_the_directory(name):
    with pytest.raises(UserError, match="unknown cloud"):
        load_cloud(name)


@pytest.mark.parametrize("text", ["title: x\n", "- a\n", "{"])
def test_a_broken_profile_is_our_fault(tmp_path: Path, text: str):
    (tmp_path / "odd.yml").write_text(text)
    with pytest.raises(MayflyError, match="not a cloud profile") as caught:
        load_cloud("odd", tmp_path)
    assert caught.value.exit_code == 1


def test_a_profile_with_an_unknown_key_is_refused(tmp_path: Path):
    text = (CLOUDS / "local.yml").read_text() + "imagee: x\n"
    (tmp_path / "odd.yml").write_text(text)
    with pytest.raises(MayflyError, match="imagee"):
        load_cloud("odd", tmp_path)


def test_a_job_comes_with_its_cloud_and_full_uris():
    spec, profile = load_job(None, {"cloud": "local"}, {})
    assert profile.name == "local"
    assert spec.data.source == f"s3://{profile.bucket}/datasets/fashion-mnist/"
    assert spec.model.destination == f"s3://{profile.bucket}/"


def test_what_a_cloud_cannot_give_is_said():
    overrides = {"cloud": "local", "nodes.worker.instance": "g5.xlarge", "nodes.worker.spot": True}
    spec, profile = load_job(None, overrides, {})
    said = notices(spec, profile)
    assert len(said) == 2
    assert "nodes.worker.instance is ignored" in said[0]


def test_gpus_are_ignored_on_this_machine_and_required_of_ones_own():
    wanted = {"nodes.worker.gpu": 2, "bucket": "my-models"}
    spec, profile = load_job(None, {"cloud": "local", **wanted}, {})
    assert notices(spec, profile) == [
        "nodes.worker.gpu is ignored: cloud 'local' has no such choice"
    ]
    assert gpus(spec) == {}
    spec, profile = load_job(None, {"cloud": "static", **wanted}, {})
    assert notices(spec, profile) == []
    assert gpus(spec) == {"gpu_worker_count": 2}
    assert [group.gpu for group in plan_nodes(spec, profile)] == [0, 2]


def test_nothing_is_said_when_all_is_given():
    spec, profile = load_job(None, {"cloud": "local"}, {})
    assert notices(spec, profile) == []


def test_a_paid_cloud_needs_a_bucket_but_for_a_dry_run():
    with pytest.raises(UserError, match="no bucket for the model: cloud 'aws' has no default"):
        load_job(None, {"cloud": "aws"}, {})
    spec, _ = load_job(None, {"cloud": "aws"}, {}, dry_run=True)
    assert spec.model.destination == "s3://@at-deploy.bucket@/"
    assert spec.data.source == "s3://@at-deploy.bucket@/datasets/fashion-mnist/"
    spec, _ = load_job(None, {"cloud": "aws"}, {"MAYFLY_BUCKET": "mine"}, dry_run=True)
    assert spec.model.destination == "s3://mine/"


def test_a_region_that_im_does_not_read_from_radl_is_said():
    given = {"cloud": "openstack", "region": "RegionTwo", "bucket": "my-models"}
    (said,) = notices(*load_job(None, given, {}))
    assert said.startswith("region is ignored")


def test_choices_that_a_cloud_does_not_have_are_said():
    given = {"cloud": "gcp", "zone": "b", "network.public": "net", "bucket": "my-models"}
    spec, profile = load_job(None, given, {})
    assert notices(spec, profile) == [
        "zone is ignored: cloud 'gcp' has no such choice",
        "network.public is ignored: cloud 'gcp' has no such choice",
    ]


SPOT = {"cloud": "aws", "bucket": "my-models"}
FOREIGN = {"IM_URL": "https://im.example"}


def test_spot_nodes_need_our_own_im():
    """A foreign IM would leave requests behind that nobody can find."""
    load_job(None, {**SPOT, "nodes.worker.spot": True}, {})
    with pytest.raises(UserError, match="cannot cancel a spot request") as refused:
        load_job(None, {**SPOT, "nodes.worker.spot": True}, FOREIGN)
    assert "nodes.worker.spot is True, and IM_URL names a foreign IM" in str(refused.value)
    assert "unset IM_URL" in str(refused.value)


@pytest.mark.parametrize(
    ("cloud", "environ", "spot"), [("aws", {}, True), ("aws", FOREIGN, False), ("gcp", {}, False)]
)
def test_who_only_prefers_spot_nodes_gets_others_and_is_told(cloud, environ, spot):
    given = {**SPOT, "cloud": cloud, "nodes.worker.spot": "prefer"}
    spec, profile = load_job(None, given, environ)
    assert [group.spot for group in plan_nodes(spec, profile)] == [False, spot]
    said = [notice for notice in notices(spec, profile) if "prefer" in notice]
    assert len(said) == (0 if spot else 1)
    assert all("its nodes are on demand: " in notice for notice in said)


def test_a_word_that_spot_does_not_know():
    with pytest.raises(UserError, match="spot"):
        load_job(None, {**SPOT, "nodes.worker.spot": "sometimes"}, {})
