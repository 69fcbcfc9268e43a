"""What is asked of providers: regions, types and prices."""

from __future__ import annotations

import boto3
import pytest
from botocore.exceptions import NoCredentialsError
from moto import mock_aws
from tests.unit.cloud_fakes import TODAY, FakeEC2, FakePricing, size

from mayfly.clouds import load_cloud, load_job
from mayfly.errors import MayflyError, RemoteError, UserError
from mayfly.node_types import plan_nodes
from mayfly.places import find_place
from mayfly.providers import ask, azure
from mayfly.providers.aws import Aws
from mayfly.providers.azure import Azure

KEYS = {"aws_access_key_id": "unit-key", "aws_secret_access_key": "unit-secret"}


def amazon(ec2: FakeEC2 | None = None, pricing: FakePricing | None = None) -> Aws:
    clients = {"ec2": ec2 or FakeEC2(), "pricing": pricing or FakePricing({})}
    return Aws(lambda service, region: clients[service], "us-east-1")


def moto_amazon(region: str) -> Aws:
    return Aws(lambda service, where: boto3.client(service, region_name=where, **KEYS), region)


def test_prices_of_types_disks_addresses_and_transfer():
    ec2 = FakeEC2(
        spot=[
            {"InstanceType": "m6i.large", "SpotPrice": "0.031"},
            {"InstanceType": "m6i.large", "SpotPrice": "0.029"},
        ]
    )
    pricing = FakePricing({"m6i.large": [0.096], "odd.large": [0.1, 0.2]})
    found = amazon(ec2, pricing).prices(iter(["m6i.large", "odd.large", "none.large"]), TODAY)
    assert (found.cloud, found.region, found.currency) == ("aws", "us-east-1", "USD")
    assert {name: price.hour for name, price in found.types.items()} == {"m6i.large": 0.096}
    assert found.types["m6i.large"].spot == (0.029, 0.031)
    assert (found.disk_gb_month, found.address_hour, found.transfer_gb) == (0.08, 0.005, 0.09)
    assert pricing.asked[0] == {
        "service": "AmazonEC2",
        "regionCode": "us-east-1",
        "instanceType": "m6i.large",
        "operatingSystem": "Linux",
        "tenancy": "Shared",
        "preInstalledSw": "NA",
        "capacitystatus": "Used",
    }


def test_a_region_that_is_not_there_or_not_enabled():
    with pytest.raises(UserError, match="unknown region: 'us-east-1'.*'us-east-2'"):
        amazon(FakeEC2(regions={"us-east-2": "opted-in"})).check_region()
    with pytest.raises(UserError, match="not enabled"):
        amazon(FakeEC2(regions={"us-east-1": "not-opted-in"})).check_region()
    amazon().check_region()


def test_a_type_that_is_not_there_names_the_nearest_that_is():
    ec2 = FakeEC2(types={"g5.xlarge": size(4, 16384, 1), "m6i.large": size(2, 8192)})
    with pytest.raises(UserError, match="'g5.xlrage' does not exist.*'g5.xlarge'"):
        amazon(ec2).sizes(["g5.xlrage"])
    with pytest.raises(UserError, match="take another type or region"):
        amazon(ec2).check_types(["x9.large"])
    sizes = amazon(ec2).sizes(["g5.xlarge", "m6i.large"])
    assert (sizes["g5.xlarge"].gpu, sizes["g5.xlarge"].gpu_model) == (1, "NVIDIA X")
    assert (sizes["m6i.large"].cpu, sizes["m6i.large"].gpu) == (2, 0)


def test_motos_ec2_knows_regions_types_and_spot_history():
    with mock_aws():
        here = moto_amazon("us-east-1")
        here.check_region()
        with pytest.raises(UserError, match="unknown region"):
            moto_amazon("us-east-9").check_region()
        assert here.sizes(["g5.xlarge"])["g5.xlarge"].gpu == 1
        with pytest.raises(UserError, match="does not exist"):
            here.sizes(["g5.tiny"])
        pricing = FakePricing({"m6i.large": [0.1]})  # moto has no price list
        ec2 = boto3.client("ec2", region_name="us-east-1", **KEYS)
        both = Aws(lambda service, _: ec2 if service == "ec2" else pricing, "us-east-1")
        assert both.prices(["m6i.large"], TODAY).types["m6i.large"].spot == (0.00001, 0.00001)


def test_our_types_are_as_amazon_describes_them():
    """Moto carries a copy of Amazon's own description of its types."""
    types = load_cloud("aws").types
    with mock_aws():
        assert moto_amazon("us-east-1").sizes(types) == types


def test_missing_keys_are_the_users_and_a_refusal_is_not():
    class NoKeys:
        def describe_regions(self, **_):
            raise NoCredentialsError

    with pytest.raises(UserError, match="no AWS keys"):
        Aws(lambda *_: NoKeys(), "us-east-1").check_region()
    with pytest.raises(MayflyError, match="Amazon refused") as caught:
        amazon(FakeEC2(refusal="AuthFailure")).check_region()
    assert caught.value.exit_code == 1


# --- Azure ------------------------------------------------------------------------------------


def item(price: float, **changes: str) -> dict[str, object]:
    values = {
        "unitOfMeasure": "1 Hour",
        "type": "Consumption",
        "productName": "Virtual Machines Dsv5 Series",
        "skuName": "D4s v5",
    }
    return {"retailPrice": price, **values, **changes}


def test_azures_price_is_of_linux_on_demand_and_pages_are_followed():
    asked = []

    def get(url, query):
        asked.append((url, dict(query)))
        if url == azure.URL:
            wanted = [
                item(0.9, productName="Virtual Machines Dsv5 Series Windows"),
                item(0.02, skuName="D4s v5 Spot"),
                item(0.03, skuName="D4s v5 Low Priority"),
            ]
            return {"Items": wanted, "NextPageLink": f"{azure.URL}?page=2"}
        return {"Items": [item(0.2), item(9.0, unitOfMeasure="1 Month")], "NextPageLink": None}

    found = Azure("westeurope", get).prices(["Standard_D4s_v5"], TODAY)
    assert found.types["Standard_D4s_v5"].hour == 0.2
    assert found.types["Standard_D4s_v5"].spot is None
    assert (
        "armRegionName eq 'westeurope' and armSkuName eq 'Standard_D4s_v5'"
        in (asked[0][1]["$filter"])
    )
    assert asked[1] == (f"{azure.URL}?page=2", {})


def test_azures_prices_that_disagree_are_none():
    found = Azure("westeurope", lambda *_: {"Items": [item(0.2), item(0.3)]}).prices(["X"], TODAY)
    assert found.types == {}


def test_azure_that_does_not_answer_is_said_in_a_line(monkeypatch):
    def fail(*_, **__):
        raise azure.requests.ConnectionError("a screen of text")

    monkeypatch.setattr(azure.requests, "get", fail)
    with pytest.raises(RemoteError, match="ConnectionError at https://prices.azure.com") as caught:
        azure.get(azure.URL, {})
    assert "screen" not in str(caught.value)


def test_azures_pages_stay_at_azures():
    with pytest.raises(RemoteError, match="not theirs"):
        azure.get("https://example.org/api/retail/prices", {})


# --- who is asked ------------------------------------------------------------------------------


def around(cloud: str, **given):
    spec, profile = load_job(None, {"cloud": cloud, **given}, {}, dry_run=True)
    return plan_nodes(spec, profile), profile, find_place(spec, profile, {})


def test_prices_are_asked_of_those_who_have_them():
    nodes, profile, place = around("aws")
    clients = {"ec2": FakeEC2(), "pricing": FakePricing({"m6i.large": [0.1]})}
    ways = ask.Clients(aws=lambda service, region: clients[service])
    found, _ = ask.find_prices(nodes, profile, place, ways, TODAY)
    assert found is not None
    assert [*found.prices.types] == ["m6i.large"]
    assert ask.find_prices(nodes, profile, place, ask.Clients(), TODAY)[0] is None


def test_a_price_list_that_does_not_answer_is_a_reason_not_an_error():
    nodes, profile, place = around("azure")

    def get(*_):
        raise RemoteError("Azure's prices were not fetched: timeout")

    found, why = ask.find_prices(nodes, profile, place, ask.Clients(azure=get), TODAY)
    assert found is None
    assert "timeout" in why


def test_prices_of_a_cloud_without_a_list_come_from_a_file():
    _, profile, place = around("gcp")
    with pytest.raises(UserError, match="cannot be fetched.*--prices"):
        ask.fetch(["n2-standard-2"], profile, place, ask.Clients(), TODAY)


def test_types_are_only_checked_where_somebody_can_be_asked():
    nodes, profile, place = around("gcp")
    assert ask.check_types(nodes, profile, place, ask.Clients()) == {}
    nodes, profile, place = around("aws", **{"nodes.worker.instance": "x9.large"})
    ec2 = FakeEC2(types={"m6i.large": size(2, 8192), "x9.large": size(3, 4096)})
    ways = ask.Clients(aws=lambda service, region: ec2)
    assert ask.check_types(nodes, profile, place, ways)["x9.large"].cpu == 3
