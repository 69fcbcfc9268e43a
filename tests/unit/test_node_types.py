"""Types of nodes: the first that is large enough, the job's own, and GPUs that must be there."""

from __future__ import annotations

import pytest

from mayfly.clouds import InstanceType, load_job
from mayfly.errors import UserError
from mayfly.node_types import plan_nodes, type_notices, undescribed


def nodes(known=None, **given):
    spec, profile = load_job(None, {"cloud": "aws", **given}, {}, dry_run=True)
    return plan_nodes(spec, profile, known)


def test_the_default_is_the_first_that_is_large_enough():
    ps, worker = nodes()
    assert (ps.type, worker.type) == ("m6i.large", "c6i.xlarge")
    assert worker.size is not None
    assert (worker.size.cpu, worker.size.memory_mb, worker.size.gpu) == (4, 8192, 0)


def test_gpus_choose_a_type_that_has_them():
    _, worker = nodes(**{"nodes.worker.gpu": 1})
    assert worker.type == "g4dn.xlarge"
    _, worker = nodes(**{"nodes.worker.gpu": 8})
    assert worker.type == "p4d.24xlarge"


def test_more_gpus_than_any_type_has_are_refused():
    with pytest.raises(UserError, match="nodes.worker.gpu is 16: no type .* 8 or fewer"):
        nodes(**{"nodes.worker.gpu": 16})


def test_gpus_on_a_type_without_are_refused():
    with pytest.raises(UserError) as caught:
        nodes(**{"nodes.worker.gpu": 1, "nodes.worker.instance": "m6i.large"})
    assert "nodes.worker.gpu is 1, and type 'm6i.large' has none" in str(caught.value)
    assert "g4dn.xlarge" in str(caught.value)


def test_gpus_on_a_type_that_the_provider_described():
    asked = {"nodes.worker.gpu": 1, "nodes.worker.instance": "x9.large"}
    plain = {"x9.large": InstanceType(cpu=2, memory_mb=4096)}
    with pytest.raises(UserError, match="type 'x9.large' has none"):
        nodes(plain, **asked)
    with_gpu = InstanceType(cpu=2, memory_mb=4096, gpu=1, gpu_model="Y")
    assert nodes({"x9.large": with_gpu}, **asked)[1].size == with_gpu


def test_a_type_that_nobody_described_is_said_with_the_nearest_one():
    found = nodes(**{"nodes.worker.instance": "g5.xlrage"})
    assert found[1].size is None
    assert undescribed(found) == ["g5.xlrage"]
    _, profile = load_job(None, {"cloud": "aws"}, {}, dry_run=True)
    (notice,) = type_notices(found, profile)
    assert "did you mean 'g5.xlarge'?" in notice


def test_a_site_with_its_own_flavors_is_asked_by_size():
    ps, worker = nodes(cloud="openstack", **{"nodes.ps.instance": "m1.large"})
    assert (ps.type, ps.size) == ("m1.large", None)
    assert worker.type is None
    assert worker.size == InstanceType(cpu=4, memory_mb=8192)


@pytest.mark.parametrize(
    ("cloud", "key", "value"),
    [
        ("gcp", "nodes.worker.spot", True),
        ("azure", "nodes.ps.spot", True),
        ("opennebula", "nodes.worker.gpu", 1),
    ],
)
def test_what_a_paid_cloud_cannot_give_is_refused_not_dropped(cloud, key, value):
    with pytest.raises(UserError) as caught:
        nodes(cloud=cloud, **{key: value})
    assert f"{key} is {value!r}: cloud {cloud!r} gives none" in str(caught.value)
    assert "aws" in str(caught.value)


def test_public_addresses_follow_the_networks():
    assert [group.public for group in nodes()] == [True, False]
    assert [group.public for group in nodes(cloud="gcp")] == [True, True]
    assert [group.public for group in nodes(engine="torch")] == [True]
