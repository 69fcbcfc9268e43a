"""Images: found by owner and name, the user's own, and none that does not exist."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import boto3
import pytest
from moto import mock_aws
from moto.core import DEFAULT_ACCOUNT_ID
from moto.ec2.models import ec2_backends
from tests.unit.cloud_fakes import FakeEC2

from mayfly import images
from mayfly.clouds import ImageRule, load_cloud, load_job
from mayfly.errors import RemoteError, UserError
from mayfly.places import find_place
from mayfly.providers.aws import Aws
from mayfly.providers.openstack import OpenStack

KEYS = {"aws_access_key_id": "unit-key", "aws_secret_access_key": "unit-secret"}


def resolve(finder=None, environ=None, **given):
    spec, profile = load_job(None, {"cloud": "aws", **given}, {}, dry_run=True)
    return images.resolve(spec, profile, find_place(spec, profile, environ or {}), finder)


def amazon(ec2: FakeEC2) -> Aws:
    return Aws(lambda service, region: ec2, "us-east-1")


def image(name: str, created: str) -> dict[str, str]:
    return {"ImageId": name, "CreationDate": created}


def test_the_newest_image_is_taken():
    ec2 = FakeEC2([image("ami-1", "2026-01-02"), image("ami-3", "2026-10-01"), image("ami-2", "")])
    assert resolve(amazon(ec2)) == "aws://us-east-1/ami-3"


def test_no_image_by_the_rule_is_said_with_owner_and_name():
    with pytest.raises(UserError, match=r"no image 'debian-12-amd64-\*' of owner 136693071363"):
        resolve(amazon(FakeEC2()))


def test_an_image_of_the_users_must_exist():
    ec2 = FakeEC2([image("ami-1", "2026")])
    assert resolve(amazon(ec2), image="ami-1") == "aws://us-east-1/ami-1"
    url = "aws://eu-west-1/ami-1"
    assert resolve(amazon(ec2), image=url, region="eu-west-1") == url
    with pytest.raises(UserError, match="is in eu-west-1, and the job in us-east-1"):
        resolve(amazon(ec2), image=url)
    with pytest.raises(UserError, match="image 'ami-2' does not exist in region us-east-1"):
        resolve(amazon(ec2), image="ami-2")


def test_an_image_of_another_cloud_is_refused():
    with pytest.raises(UserError, match="'ost://host/x' is of another cloud"):
        resolve(image="ost://host/x")


def test_without_keys_the_full_address_is_wanted():
    with pytest.raises(UserError, match="--image aws://us-east-1/IDENTIFIER"):
        resolve()


def test_a_refusal_of_amazons_is_the_remote_sides():
    with pytest.raises(Exception, match="Amazon refused describe_images: the text of") as caught:
        resolve(amazon(FakeEC2(refusal="UnauthorizedOperation")))
    assert caught.value.exit_code == 1


def test_some_clouds_find_the_newest_themselves():
    assert resolve(cloud="azure") == "azr://westeurope/Debian/debian-12/12-gen2/latest"
    assert resolve(cloud="gcp", image="debian-13").endswith(
        "/debian-cloud/global/images/family/debian-13"
    )


def test_a_dry_run_marks_what_it_cannot_know():
    spec, profile = load_job(None, {"cloud": "aws"}, {}, dry_run=True)
    place = find_place(spec, profile, {})
    assert images.unasked(spec, profile, place) == "aws://us-east-1/@at-deploy.image@"
    assert images.describe(spec, profile).startswith("resolved at deploy: owner 136693071363")


def test_against_motos_ec2():
    """Amazon's API as moto answers it; owner and name are of one of moto's own images."""
    with mock_aws():
        # moto keeps the region of an earlier test, which may have been told to have no images.
        ec2_backends[DEFAULT_ACCOUNT_ID]["us-east-1"].reset()
        finder = Aws(
            lambda service, region: boto3.client(service, region_name=region, **KEYS), "us-east-1"
        )
        listed = boto3.client("ec2", region_name="us-east-1", **KEYS).describe_images()["Images"]
        ubuntu = next(each for each in listed if each["OwnerId"] == "099720109477")
        rule = ImageRule(
            url="aws://{region}/{image}",
            owner=ubuntu["OwnerId"],
            name=ubuntu["Name"][:-4] + "*",
            publisher="Canonical",
            lookup="ec2",
        )
        assert finder.find_image(rule) == ubuntu["ImageId"]
        assert finder.check_image(ubuntu["ImageId"]) == ubuntu["ImageId"]
        with pytest.raises(UserError, match="does not exist"):
            finder.check_image("ami-0123456789abcdef0")
        with pytest.raises(UserError, match="no image"):
            finder.find_image(rule.model_copy(update={"name": "debian-99-*"}))


# --- OpenStack --------------------------------------------------------------------------------


@dataclass
class FakeImageService:
    """Glance, as openstacksdk shows it."""

    listed: list[SimpleNamespace] = field(default_factory=list)
    broken: bool = False

    def images(self):
        if self.broken:
            raise OSError("no route to host")
        return iter(self.listed)

    def find_image(self, name, ignore_missing):
        return next((each for each in self.listed if name in (each.name, each.id)), None)


def glance(*names: str, broken: bool = False) -> OpenStack:
    listed = [
        SimpleNamespace(id=f"id-{n}", name=name, status="active", created_at=f"2026-0{n + 1}-01")
        for n, name in enumerate(names)
    ]
    return OpenStack(SimpleNamespace(image=FakeImageService(listed, broken)))


OPENSTACK = {"OS_AUTH_URL": "https://keystone.example.org:5000/v3"}


def test_openstack_takes_the_newest_active_one_of_that_name():
    cloud = glance("debian-12-old", "debian-12-new", "ubuntu")
    found = resolve(cloud, OPENSTACK, cloud="openstack")
    assert found == "ost://keystone.example.org/id-1"
    assert resolve(cloud, OPENSTACK, cloud="openstack", image="ubuntu").endswith("/id-2")


def test_openstack_names_what_is_there_instead():
    with pytest.raises(UserError, match="no image .* such as CC-Ubuntu22.04"):
        resolve(glance("CC-Ubuntu22.04"), OPENSTACK, cloud="openstack")
    with pytest.raises(UserError, match="image 'nope' does not exist"):
        resolve(glance("CC-Ubuntu22.04"), OPENSTACK, cloud="openstack", image="nope")


def test_openstack_that_does_not_answer_is_the_remote_sides():
    with pytest.raises(RemoteError, match="no route to host"):
        glance(broken=True).find_image(load_cloud("openstack").image)
