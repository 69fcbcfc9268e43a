"""What our EC2 connector asks Amazon for, which is moto here; IM's own connector is a fake."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from moto import mock_aws

SOURCE = Path(__file__).parents[2] / "scripts/im_connectors/MayflyEC2.py"
REGION = "eu-west-1"
RUN = {"Key": "mayfly-run", "Value": "one"}
INFRASTRUCTURE = {"Key": "IM-INFRA-ID", "Value": "inf-1"}


class FakeConnector:
    """IM's connector, as far as ours calls it."""

    def __init__(self, cloud: Any, inf: Any) -> None:
        self.answers: list[list[tuple[bool, str]]] = []
        self.launched: list[Any] = []

    @staticmethod
    def getAMIData(url: str) -> tuple[str, str]:  # noqa: N802
        region, _, image = url.removeprefix("aws://").partition("/")
        return region, image

    @staticmethod
    def get_instance_tags(system: Any, auth: Any, inf: Any) -> dict[str, str]:
        return {RUN["Key"]: RUN["Value"]}

    @staticmethod
    def get_default_subnet(conn: Any) -> tuple[str, str]:
        first = conn.describe_subnets()["Subnets"][0]
        return first["VpcId"], first["SubnetId"]

    def launch(self, inf, radl, requested_radl, num_vm, auth_data):
        self.launched.append((num_vm, radl.systems[0].getValue("spot"), self.spot))
        return self.answers.pop(0)

    def log_exception(self, text: str) -> None:
        pass


class FakeSystem(dict):
    """A system of a RADL."""

    def getValue(self, name: str) -> Any:  # noqa: N802
        return self.get(name)

    def delValue(self, name: str) -> None:  # noqa: N802
        self.pop(name, None)


class FakeRadl:
    def __init__(self, **features: str) -> None:
        self.systems = [FakeSystem({"disk.0.image.url": f"aws://{REGION}/ami-1", **features})]

    def clone(self) -> FakeRadl:
        return FakeRadl(**self.systems[0])


class FakeAuth:
    def getAuthInfo(self, kind: str) -> list[dict[str, str]]:  # noqa: N802
        assert kind == "MayflyEC2"
        return [{"username": "key", "password": "canary"}]


@pytest.fixture(scope="module")
def module():
    names = ("IM", "IM.connectors", "IM.connectors.EC2", "IM.connectors.exceptions")
    fakes: dict[str, Any] = {name: mock.MagicMock() for name in names}
    fakes["IM.connectors.EC2"].EC2CloudConnector = FakeConnector
    fakes["IM.connectors.EC2"].InstanceTypeInfo = SimpleNamespace
    fakes["IM.connectors.exceptions"].CloudConnectorException = RuntimeError
    fakes["IM.connectors.exceptions"].NoAuthData = KeyError
    with mock.patch.dict(sys.modules, fakes):
        spec = importlib.util.spec_from_file_location("MayflyEC2", SOURCE)
        loaded = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(loaded)
    return loaded


@pytest.fixture
def connector(module):
    made = module.MayflyEC2CloudConnector(None, None)
    made._stand_for(FakeSystem(), SimpleNamespace(id="inf-1"), f"aws://{REGION}/ami-1", FakeAuth())
    with mock_aws():
        yield made


@pytest.fixture
def ec2(connector):
    return connector.get_connection(REGION, FakeAuth(), "ec2")


def image(ec2: Any) -> str:
    return ec2.describe_images()["Images"][0]["ImageId"]


def run(ec2: Any) -> Any:
    name = {"ResourceType": "instance", "Tags": [{"Key": "Name", "Value": "ps"}]}
    asked = {"ImageId": image(ec2), "MinCount": 1, "MaxCount": 1, "InstanceType": "m6i.large"}
    return ec2.run_instances(**asked, TagSpecifications=[name])["Instances"][0]


def test_im_can_load_it(module):
    """`type` is a module's name to IM, which takes 15 characters."""
    assert module.MayflyEC2CloudConnector.type == SOURCE.stem
    assert len(SOURCE.stem) <= 15


def test_a_node_and_its_disk_are_marked_by_the_call_that_makes_them(ec2):
    node = run(ec2)
    assert [tag for tag in node["Tags"] if tag in (RUN, INFRASTRUCTURE)] == [RUN, INFRASTRUCTURE]
    assert {"Key": "Name", "Value": "ps"} in node["Tags"]
    (disk,) = ec2.describe_volumes()["Volumes"]
    assert disk["Tags"] == [RUN, INFRASTRUCTURE]


def test_a_node_that_powers_itself_off_is_gone(ec2):
    node = run(ec2)["InstanceId"]
    told = ec2.describe_instance_attribute(
        InstanceId=node, Attribute="instanceInitiatedShutdownBehavior"
    )
    assert told["InstanceInitiatedShutdownBehavior"] == {"Value": "terminate"}


@pytest.mark.parametrize("spot", [True, False])
def test_only_a_spot_node_is_asked_for_on_the_spot_market(connector, ec2, spot):
    connector.spot = spot
    asked = []
    ec2.meta.events.register(
        "before-call.ec2.RunInstances", lambda params, **_: asked.append(params["body"])
    )
    assert (run(ec2).get("InstanceLifecycle") == "spot") is spot
    kinds = [value for key, value in asked[0].items() if key.endswith(".ResourceType")]
    assert ("spot-instances-request" in kinds) is spot
    assert {"instance", "volume", "network-interface"} <= set(kinds)


def test_groups_and_addresses_are_marked(ec2):
    group = ec2.create_security_group(GroupName="im-inf-1", Description="d")["GroupId"]
    (found,) = ec2.describe_security_groups(GroupIds=[group])["SecurityGroups"]
    assert found["Tags"] == [RUN, INFRASTRUCTURE]
    ec2.allocate_address(Domain="vpc")
    (address,) = ec2.describe_addresses()["Addresses"]
    assert address["Tags"] == [RUN, INFRASTRUCTURE]


def test_a_foreign_group_of_the_same_name_is_neither_used_nor_removed(connector, ec2, module):
    vpc = ec2.describe_vpcs()["Vpcs"][0]["VpcId"]
    connector.marks[module.INFRASTRUCTURE] = "somebody-else"
    ec2.create_security_group(GroupName="im-inf-1", Description="d", VpcId=vpc)
    connector.marks[module.INFRASTRUCTURE] = "inf-1"
    assert connector._get_security_group(ec2, "im-inf-1") is None
    assert connector._get_security_groups(ec2, None) == []
    own = ec2.create_security_group(GroupName="im-inf-1-public", Description="d", VpcId=vpc)
    assert connector._get_security_group(ec2, "im-inf-1-public")["GroupId"] == own["GroupId"]
    assert [one["GroupId"] for one in connector._get_security_groups(ec2, None)] == [own["GroupId"]]


def test_a_refusal_holds_for_all_nodes_of_a_launch(connector, ec2):
    refused = {"Error": {"Code": "InsufficientInstanceCapacity", "Message": "none left"}}
    connector._note_refusal(refused)
    with pytest.raises(RuntimeError, match="not asked for after: InsufficientInstanceCapacity"):
        run(ec2)
    connector.refusal = None
    connector._note_refusal({"Error": {"Code": "RequestLimitExceeded", "Message": "slowly"}})
    assert run(ec2)["InstanceId"]


def test_while_nodes_are_launched_boto_asks_once(connector):
    for launching, attempts in ((True, 1), (False, 3)):
        connector.launching, connector.session = launching, None
        client = connector.get_connection(REGION, FakeAuth(), "ec2")
        assert client.meta.config.retries["total_max_attempts"] == attempts


PASSES = "An error occurred (RequestLimitExceeded) when calling the RunInstances operation: x"
FINAL = "An error occurred (InsufficientInstanceCapacity) when calling the RunInstances operation"


@pytest.mark.parametrize(
    ("answers", "calls", "ends"),
    [
        ([[(True, "vm")]], 1, [True]),
        ([[(False, FINAL)]], 1, [False]),
        ([[(True, "vm"), (False, FINAL)]], 1, [True, False]),
        ([[(True, "vm"), (False, PASSES)], [(True, "vm")]], 2, [True, True]),
        ([[(False, PASSES)]] * 3, 3, [False]),
    ],
)
def test_only_what_passes_is_asked_for_again(connector, monkeypatch, answers, calls, ends):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    connector.answers = list(answers)
    count = len(ends)
    inf = SimpleNamespace(id="inf-1")
    found = connector.launch_with_retry(inf, FakeRadl(), None, count, FakeAuth(), 3, 5)
    assert [success for success, _ in found] == ends
    assert len(connector.launched) == calls


@pytest.mark.parametrize("zone", [f"{REGION}a", f"{REGION}c"])
def test_a_node_is_put_into_a_subnet_of_its_zone(connector, ec2, zone):
    connector.zone = zone
    vpc, subnet = connector.get_default_subnet(ec2)
    (found,) = ec2.describe_subnets(SubnetIds=[subnet])["Subnets"]
    assert (found["AvailabilityZone"], found["VpcId"]) == (zone, vpc)


def test_a_zone_without_a_subnet_is_named(connector, ec2):
    connector.zone = "eu-west-1z"
    with pytest.raises(RuntimeError, match="No subnet of vpc-[0-9a-f]+ is in zone eu-west-1z"):
        connector.get_default_subnet(ec2)


def test_without_a_zone_it_is_ims_own_choice(connector, ec2):
    assert connector.get_default_subnet(ec2) == FakeConnector.get_default_subnet(ec2)


@pytest.mark.parametrize("zone", ["eu-west-1b", None])
def test_a_launch_is_for_the_zone_of_its_system(connector, zone):
    connector.answers = [[(True, "vm")]]
    given = {"availability_zone": zone} if zone else {}
    connector.launch(SimpleNamespace(id="inf-1"), FakeRadl(**given), None, 1, FakeAuth())
    assert connector.zone == zone


def test_ims_own_way_to_spot_nodes_is_not_taken(connector):
    connector.answers = [[(True, "vm")]]
    radl = FakeRadl(spot="yes")
    connector.launch(SimpleNamespace(id="inf-1"), radl, None, 1, FakeAuth())
    assert connector.launched == [(1, None, True)]
    assert radl.systems[0]["spot"] == "yes"


def test_a_type_is_looked_up_where_the_nodes_are_and_once(connector, module):
    module.MayflyEC2CloudConnector.known_types.clear()
    found = connector.get_instance_type(FakeSystem(instance_type="m6i.large"))
    assert (found.num_cpu, found.mem, found.gpu) == (2, 8192, 0)
    assert connector.get_instance_type_by_name("m6i.large") is found
    assert connector.get_instance_type_by_name("m6i.huge") is None


def test_an_address_without_an_instance_does_not_stop_im(module):
    answer = {"Addresses": [{"PublicIp": "192.0.2.1"}, {"InstanceId": "i-1"}]}
    module.name_no_instance(answer)
    assert [address["InstanceId"] for address in answer["Addresses"]] == ["", "i-1"]


def test_a_region_that_is_none(connector):
    with pytest.raises(RuntimeError, match="Incorrect region name: eu-west-9"):
        connector.get_connection("eu-west-9", FakeAuth(), "ec2")
