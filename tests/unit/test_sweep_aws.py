"""The sweep of an account at Amazon: moto plays EC2, and foreign things lie beside ours."""

from __future__ import annotations

from functools import cache

import boto3
import pytest
from botocore.exceptions import ClientError
from moto import mock_aws
from moto.core import DEFAULT_ACCOUNT_ID
from moto.ec2 import ec2_backends
from tests.unit.deploy_fakes import FakeClock, FakeIM

from mayfly.destroy import Destroyer
from mayfly.errors import RemoteError, UserError
from mayfly.im import NoAnswer
from mayfly.ledger import Ledger
from mayfly.sweep import aws
from mayfly.sweep.aws import KINDS, AwsAccount
from mayfly.sweep.things import TAG, Marks
from mayfly.watch import Pace

RUN, OTHER_RUN = "faces-261128-100000-abcd", "faces-261128-100000-abce"
INFRA = "0a1b2c3d-0000-11f1-8000-0242ac110002"
OTHER_INFRA = "0a1b2c3d-0000-11f1-8000-0242ac110003"
IMAGE = "ami-12c6146b"  # any: moto is told to have none
REGIONS = ("us-east-1", "eu-west-1")


@pytest.fixture(autouse=True)
def amazon(monkeypatch):
    """An empty account; the keys are moto's own."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "unit-key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "unit-secret")
    monkeypatch.setenv("MOTO_EC2_LOAD_DEFAULT_AMIS", "false")  # reading them takes a second
    with mock_aws():
        yield


@pytest.fixture
def ledger(tmp_path):
    opened = Ledger(tmp_path / "ledger.sqlite")
    opened.add(RUN, "aws", f"s3://bucket/{RUN}/", {})
    yield opened
    opened.close()


@pytest.fixture
def ec2():
    return client("ec2", "us-east-1")


@cache
def client(service: str, region: str):
    """To make one takes long; moto empties the account between the tests all the same."""
    return boto3.client(service, region)


def account() -> AwsAccount:
    return AwsAccount(client, "us-east-1")


def tags(kind: str, run: str = RUN, **more: str):
    values = {TAG: run, **more} if run else more
    listed = [{"Key": key, "Value": value} for key, value in values.items()]
    return {"TagSpecifications": [{"ResourceType": kind, "Tags": listed}]} if listed else {}


def make_node(ec2, run: str, groups: list[str], **more) -> str:
    """An instance as IM's connector launches it."""
    interface = {"DeviceIndex": 0, "Groups": groups, "DeleteOnTermination": True}
    made = ec2.run_instances(
        ImageId=IMAGE,
        MinCount=1,
        MaxCount=1,
        NetworkInterfaces=[interface],
        **tags("instance", run),
        **more,
    )
    return made["Instances"][0]["InstanceId"]


def make_groups(ec2, infrastructure: str) -> list[str]:
    names = [f"im-{infrastructure}{end}" for end in ("", "-public", "-private")]
    return [
        ec2.create_security_group(GroupName=name, Description="Security group created by the IM")[
            "GroupId"
        ]
        for name in names
    ]


def make_tagged(ec2, run: str, name: str) -> None:
    """One of each kind that has a tag."""
    vpc = ec2.create_vpc(CidrBlock="10.9.0.0/16", **tags("vpc", run))["Vpc"]["VpcId"]
    subnet = ec2.create_subnet(VpcId=vpc, CidrBlock="10.9.1.0/24", **tags("subnet", run))
    ec2.create_network_interface(
        SubnetId=subnet["Subnet"]["SubnetId"], **tags("network-interface", run)
    )
    gateway = ec2.create_internet_gateway(**tags("internet-gateway", run))["InternetGateway"]
    ec2.attach_internet_gateway(InternetGatewayId=gateway["InternetGatewayId"], VpcId=vpc)
    ec2.create_volume(Size=1, AvailabilityZone="us-east-1a", **tags("volume", run))
    ec2.allocate_address(Domain="vpc", **tags("elastic-ip", run))
    ec2.create_key_pair(KeyName=f"key-{name}", **tags("key-pair", run))
    ec2.create_security_group(
        GroupName=f"group-{name}", Description="d", VpcId=vpc, **tags("security-group", run)
    )


def request_spot(ec2, run: str, groups: list[str]) -> str:
    answer = ec2.request_spot_instances(
        InstanceCount=1,
        LaunchSpecification={
            "ImageId": IMAGE,
            "InstanceType": "m5.large",
            "SecurityGroups": groups,  # moto reads ids here, EC2 in SecurityGroupIds
        },
        **tags("spot-instances-request", run),
    )
    return answer["SpotInstanceRequests"][0]["SpotInstanceRequestId"]


def everything(ec2) -> dict[str, set[str]]:
    """What a region has, whoever owns it, but for what has ended.

    Moto leaves the interfaces of spot instances behind, which EC2 removes.
    """
    raws = {kind.name: list(aws._Look(ec2, "x", Marks(None))._ask(kind, [[]])) for kind in KINDS}
    gone = {"Code": 48, "Name": "terminated"}
    live = [raw for raw in raws["instance"] if raw["State"] != gone]
    nodes = {raw["InstanceId"] for raw in live}
    interfaces = [
        raw
        for raw in raws["network interface"]
        if raw["TagSet"] or raw.get("Attachment", {}).get("InstanceId") in nodes
    ]
    raws |= {"instance": live, "network interface": interfaces}
    return {kind.name: {str(raw[kind.id]) for raw in raws[kind.name]} for kind in KINDS}


def destroyer(ledger: Ledger, im: FakeIM | None = None, **more) -> Destroyer:
    clock = FakeClock()
    pace = Pace(1.0, 60.0, clock=clock, sleep=clock.sleep)
    return Destroyer(im or FakeIM(), ledger, None, None, more.get("account") or account(), pace)


def destroy(ledger: Ledger, im: FakeIM | None = None, **more):
    said: list[str] = []
    proof = destroyer(ledger, im, **more).destroy(ledger.get(RUN), said.append)
    return proof, said


def refusing(call: str, code: str, times: int = 10**6):
    """An account one of whose calls is refused, as by a policy."""

    def client_of(service, region):
        own = boto3.client(service, region)
        left = [times]

        def refuse(**_):
            if left[0]:
                left[0] -= 1
                raise ClientError({"Error": {"Code": code, "Message": "not you"}}, call)

        operation = own.meta.method_to_api_mapping.get(call)
        if operation:
            own.meta.events.register(f"before-call.ec2.{operation}", refuse)
        return own

    return AwsAccount(client_of, "us-east-1")


def test_ours_goes_and_all_that_is_foreign_stays(ledger, ec2):
    ledger.set_infrastructure(RUN, INFRA)
    foreign_groups = [
        *make_groups(ec2, OTHER_INFRA),
        *(
            ec2.create_security_group(GroupName=name, Description="theirs")["GroupId"]
            for name in ("im-", f"im-{INFRA}x", f"im-{INFRA}-staging", f"my-im-{INFRA}", INFRA)
        ),
    ]
    make_node(ec2, OTHER_RUN, foreign_groups[:1])
    make_node(ec2, "", foreign_groups[4:5])
    request_spot(ec2, "", foreign_groups[:1])
    request_spot(ec2, OTHER_RUN, foreign_groups[:1])
    for number, run in enumerate(("", OTHER_RUN)):
        make_tagged(ec2, run, f"foreign-{number}")
    before = everything(ec2)

    groups = make_groups(ec2, INFRA)
    ours = [make_node(ec2, RUN, groups) for _ in range(3)]
    request_spot(ec2, RUN, groups)
    request_spot(ec2, "", groups[:2])  # as stock IM does it: known by its groups only
    # One of another run's is not ours, though it is in our groups.
    make_tagged(ec2, RUN, "ours")
    ec2.create_key_pair(KeyName=f"im-{INFRA}")
    ec2.authorize_security_group_ingress(
        GroupId=groups[1],
        IpPermissions=[{"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": groups[2]}]}],
    )

    proof, _ = destroy(ledger)
    after = everything(ec2)
    assert {kind: after[kind] ^ before[kind] for kind in before} == dict.fromkeys(before, set())
    assert proof.clean
    assert (proof.count, proof.who) == (0, DEFAULT_ACCOUNT_ID)
    (listing,) = proof.listings
    assert {kind: listing.count(kind) for kind in listing.kinds} == {k.name: 0 for k in KINDS}
    done = {(e.action, e.outcome) for e in ledger.journal(RUN)}
    assert ("remove", "done") in done
    removed = " ".join(e.target for e in ledger.journal(RUN) if e.action == "remove")
    assert all(node in removed for node in ours)
    assert ledger.get(RUN).destroyed
    assert ledger.proof(RUN)["ok"] is True


def test_nodes_go_before_the_groups_that_they_are_in(ledger, ec2, monkeypatch):
    """EC2 answers DependencyViolation until the last instance is gone; so does this one."""
    ledger.set_infrastructure(RUN, INFRA)
    groups = make_groups(ec2, INFRA)
    make_node(ec2, RUN, groups)
    backend = ec2_backends[DEFAULT_ACCOUNT_ID]["us-east-1"]
    delete, refusals = type(backend).delete_security_group, []

    def picky(*given, **more):
        if len(refusals) < 2:
            refusals.append(1)
            raise aws_error("DependencyViolation")
        return delete(*given, **more)

    monkeypatch.setattr(type(backend), "delete_security_group", picky)
    proof, said = destroy(ledger)
    assert proof.clean
    assert len(refusals) == 2
    assert any("DependencyViolation" in line for line in said)
    failed = [e for e in ledger.journal(RUN) if e.outcome == "failed"]
    assert len(failed) == 2
    targets = [e.target.split()[0] for e in ledger.journal(RUN)]
    assert targets.index("instance") < targets.index("security")


def aws_error(code: str):
    from moto.ec2.exceptions import EC2ClientError

    return EC2ClientError(code, "resource has a dependent object")


def test_a_run_is_found_without_its_infrastructure(ledger, ec2):
    """IM died before it answered: tags tell the nodes, and their groups the infrastructure."""
    groups = make_groups(ec2, INFRA)
    make_node(ec2, RUN, groups)
    theirs = make_groups(ec2, OTHER_INFRA)
    proof, _ = destroy(ledger)
    assert proof.clean
    assert ledger.get(RUN).infrastructure == INFRA
    assert everything(ec2)["security group"] >= set(theirs)
    assert not everything(ec2)["security group"] & set(groups)


def test_a_sweep_that_is_killed_can_be_taken_up(ledger, ec2):
    """At every removal in turn, right after it: what had told us the infrastructure is gone."""
    groups = make_groups(ec2, INFRA)
    make_node(ec2, RUN, groups)

    class Killed(aws.Ec2):
        def remove(self, thing):
            super().remove(thing)
            raise KeyboardInterrupt

    class KilledAccount(AwsAccount):
        def place(self, region):
            return Killed(self.client_of("ec2", self.region), self.region)

    for _ in range(1 + len(groups)):
        with pytest.raises(KeyboardInterrupt):
            destroy(ledger, account=KilledAccount(client, "us-east-1"))
        assert ledger.get(RUN).state == "destroying"
    assert {e.outcome for e in ledger.journal(RUN) if e.action == "remove"} == {"failed"}
    assert not everything(ec2)["security group"] & set(groups)
    assert destroy(ledger)[0].clean


def test_groups_alone_are_found_by_the_infrastructure(ledger, ec2):
    """IM was killed before the first node was asked for."""
    ledger.set_infrastructure(RUN, INFRA)
    groups = make_groups(ec2, INFRA)
    destroy(ledger)
    assert not everything(ec2)["security group"] & set(groups)


def test_every_region_of_the_run_is_swept_and_no_other(ledger):
    for region in REGIONS:
        ledger.add_place(RUN, region, DEFAULT_ACCOUNT_ID)
    clients = {region: client("ec2", region) for region in (*REGIONS, "ap-south-1")}
    for each in clients.values():
        make_node(each, RUN, make_groups(each, INFRA))
    proof, _ = destroy(ledger)
    assert [listing.place for listing in proof.listings] == [
        "Amazon EC2, us-east-1",
        "Amazon EC2, eu-west-1",
    ]
    left = {region: everything(each)["instance"] for region, each in clients.items()}
    assert [len(left[region]) for region in clients] == [0, 0, 1]


def test_long_listings_are_read_to_their_end(ledger, ec2, monkeypatch):
    monkeypatch.setattr(aws, "PAGE", 5)
    groups = make_groups(ec2, INFRA)
    for _ in range(13):
        make_node(ec2, RUN, groups)
    assert len(account().place(None).look(Marks(frozenset([RUN]))).things) > 13
    destroy(ledger)
    assert everything(ec2)["instance"] == set()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_what_may_not_be_listed_is_not_empty(ledger, kind):
    place = refusing(kind.call, "UnauthorizedOperation")
    with pytest.raises(RemoteError, match=f"{kind.name}s in .* not listed: Unauthorized"):
        destroy(ledger, account=place)
    assert not ledger.get(RUN).destroyed
    proof = ledger.proof(RUN)
    assert proof["ok"] is False
    (listed,) = proof["places"]
    unknown = [each["kind"] for each in listed["listed"] if each["count"] is None]
    assert unknown == [kind.name]


def test_an_answer_that_is_late_is_waited_for(ledger, ec2):
    make_node(ec2, RUN, make_groups(ec2, INFRA))
    proof, _ = destroy(ledger, account=refusing("describe_instances", "RequestLimitExceeded", 6))
    assert proof.clean
    assert everything(ec2)["instance"] == set()


def test_what_may_not_be_removed_is_named_at_once(ledger, ec2):
    node = make_node(ec2, RUN, make_groups(ec2, INFRA))
    with pytest.raises(RemoteError, match=f"instance {node}.*UnauthorizedOperation"):
        destroy(ledger, account=refusing("terminate_instances", "UnauthorizedOperation"))
    assert node in everything(ec2)["instance"]
    assert not ledger.get(RUN).destroyed


def test_an_im_that_is_gone_is_said_and_the_account_swept(ledger, ec2):
    class Gone(FakeIM):
        def infrastructures(self):
            self.asked.append("list")
            raise NoAnswer("IM does not answer at http://localhost:8800: ConnectionError")

    ledger.set_infrastructure(RUN, INFRA)
    make_node(ec2, RUN, make_groups(ec2, INFRA))
    im = Gone()
    proof, said = destroy(ledger, im)
    assert im.asked == ["list"], "each answer that does not come takes its time"
    assert proof.clean
    assert proof.im.silent
    assert said[0].startswith("without IM: IM does not answer")
    assert everything(ec2)["instance"] == set()


def test_an_im_that_cannot_destroy_is_made_to_forget(ledger, ec2):
    """As stock IM cannot with a spot request that was never fulfilled: DELETE answers 400."""
    ledger.set_infrastructure(RUN, INFRA)
    make_node(ec2, RUN, make_groups(ec2, INFRA))
    im = FakeIM(radls={INFRA: RUN}, refusals=["Error destroying the infrastructure"] * 1000)
    proof, _ = destroy(ledger, im)
    assert proof.clean
    assert im.forgotten == [INFRA]


def test_keys_to_another_account_prove_nothing(ledger, ec2):
    ledger.add_place(RUN, "us-east-1", "999999999999")
    with pytest.raises(UserError, match=f"account 999999999999, .* for {DEFAULT_ACCOUNT_ID}"):
        destroy(ledger)
    assert ledger.get(RUN).state == "preparing"


def test_after_a_recent_create_one_empty_listing_is_not_enough(ledger, ec2):
    """EC2 may not list for some seconds what it has made."""
    with ledger.intent(RUN, "create", "infrastructure"):
        pass

    class Late(aws.Ec2):
        looks = 0

        def look(self, marks):
            Late.looks += 1
            if Late.looks == 2:
                make_node(ec2, RUN, make_groups(ec2, INFRA))
            return super().look(marks)

    class LateAccount(AwsAccount):
        def place(self, region):
            return Late(self.client_of("ec2", self.region), self.region)

    late = LateAccount(client, "us-east-1")
    proof, said = destroy(ledger, account=late)
    assert "nothing is listed; looking once more" in said
    assert proof.clean
    assert everything(ec2)["instance"] == set()


def test_what_is_attached_without_our_tag_is_told_and_left(ledger, ec2):
    node = make_node(ec2, RUN, make_groups(ec2, INFRA))
    address = ec2.allocate_address(Domain="vpc")["AllocationId"]
    ec2.associate_address(AllocationId=address, InstanceId=node)
    zone = ec2.describe_instances(InstanceIds=[node])["Reservations"][0]["Instances"][0]
    volume = ec2.create_volume(Size=1, AvailabilityZone=zone["Placement"]["AvailabilityZone"])
    ec2.attach_volume(VolumeId=volume["VolumeId"], InstanceId=node, Device="/dev/sdf")
    proof, _ = destroy(ledger)
    there = everything(ec2)
    assert address in there["public address"]
    assert volume["VolumeId"] in there["volume"]
    text = " ".join(proof.notes)
    assert address in text
    assert volume["VolumeId"] in text
