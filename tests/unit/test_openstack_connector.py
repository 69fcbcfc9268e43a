"""What our OpenStack connector asks Neutron for; IM's own connector and Libcloud are fakes."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

SOURCE = Path(__file__).parents[2] / "scripts/im_connectors/MayflyOpenStack.py"
RUN = "faces-261128-100000-abcd"


class FakeHttpError(Exception):
    """Libcloud's error of an answer."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class FakeNeutron:
    """The calls that make an address; `refuses` the attribute with a status."""

    driver = "the driver"

    def __init__(self, refuses: int | None = None) -> None:
        self.refuses = refuses
        self.asked: list[dict[str, str]] = []

    def request(self, url: str, method: str, data: dict[str, dict[str, str]]) -> Any:
        assert (url, method) == ("/v2.0/floatingips", "POST")
        self.asked.append(data["floatingip"])
        if self.refuses and "description" in data["floatingip"]:
            raise FakeHttpError(self.refuses)
        made = {"id": "fip-1", "floating_ip_address": "192.0.2.7"}
        return SimpleNamespace(object={"floatingip": made})


class FakeAddress:
    def __init__(self, id: str, ip_address: str, pool: Any, node_id=None, driver=None) -> None:
        self.id, self.ip_address, self.pool, self.driver = id, ip_address, pool, driver


class FakePool:
    """Libcloud's pool of floating addresses."""

    def __init__(self, id: str, name: str, connection: FakeNeutron) -> None:
        self.id, self.name, self.connection = id, name, connection

    def create_floating_ip(self) -> FakeAddress:
        self.connection.request(
            "/v2.0/floatingips", "POST", {"floatingip": {"floating_network_id": self.id}}
        )
        return FakeAddress("fip-plain", "192.0.2.8", self, driver=self.connection.driver)


class FakeConnector:
    """IM's connector, as far as ours calls it: it takes a free address, or has one made."""

    def __init__(self, cloud: Any, inf: Any) -> None:
        self.free: FakeAddress | None = None

    @staticmethod
    def get_instance_tags(system: Any) -> dict[str, str]:
        return dict(pair.split("=") for pair in system["instance_tags"].split(",") if pair)

    def get_ip_pool(self, driver, pool_name=None, exclude_pools=None):
        return driver

    def add_elastic_ip_from_pool(self, vm, node, fixed_ip=None, pool_name=None):
        pool = self.get_ip_pool(node.driver, pool_name, [])
        return True, self.free or pool.create_floating_ip()


@pytest.fixture(scope="module")
def module():
    names = ("IM", "IM.connectors", "IM.connectors.OpenStack", "libcloud", "libcloud.common")
    names += ("libcloud.common.exceptions", "libcloud.compute", "libcloud.compute.drivers")
    fakes: dict[str, Any] = {name: mock.MagicMock() for name in names}
    drivers = SimpleNamespace(
        OpenStack_2_FloatingIpAddress=FakeAddress, OpenStack_2_FloatingIpPool=FakePool
    )
    fakes["libcloud.compute.drivers.openstack"] = drivers
    fakes["IM.connectors.OpenStack"].OpenStackCloudConnector = FakeConnector
    fakes["libcloud.common.exceptions"].BaseHTTPError = FakeHttpError
    with mock.patch.dict(sys.modules, fakes):
        spec = importlib.util.spec_from_file_location("MayflyOpenStack", SOURCE)
        loaded = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(loaded)
        yield loaded


def add(module, pool: Any, tags: str = f"mayfly-run={RUN}", free: FakeAddress | None = None):
    connector = module.MayflyOpenStackCloudConnector(None, None)
    connector.free = free
    vm = SimpleNamespace(info=SimpleNamespace(systems=[{"instance_tags": tags}]))
    done, address = connector.add_elastic_ip_from_pool(vm, SimpleNamespace(driver=pool))
    assert done
    return address


def test_an_address_is_made_with_the_runs_tag(module):
    neutron = FakeNeutron()
    address = add(module, FakePool("net-1", "external", neutron))
    tag = f"mayfly-run={RUN}"
    assert neutron.asked == [{"floating_network_id": "net-1", "description": tag}]
    assert (address.id, address.ip_address, address.driver) == ("fip-1", "192.0.2.7", "the driver")
    assert (address.pool.id, address.pool.name) == ("net-1", "external"), "IM asks it for its name"


def test_a_free_one_of_the_projects_is_not_touched(module):
    neutron = FakeNeutron()
    theirs = FakeAddress("fip-theirs", "192.0.2.9", None)
    assert add(module, FakePool("net-1", "external", neutron), free=theirs) is theirs
    assert neutron.asked == []


def test_without_a_run_it_is_ims_own_way(module):
    neutron = FakeNeutron()
    add(module, FakePool("net-1", "external", neutron), tags="")
    assert neutron.asked == [{"floating_network_id": "net-1"}]


def test_a_neutron_without_descriptions_makes_one_without(module):
    neutron = FakeNeutron(refuses=400)
    assert add(module, FakePool("net-1", "external", neutron)).id == "fip-plain"
    assert ["description" in asked for asked in neutron.asked] == [True, False]


def test_a_quota_is_told_and_not_asked_again(module):
    neutron = FakeNeutron(refuses=409)
    with pytest.raises(FakeHttpError):
        add(module, FakePool("net-1", "external", neutron))
    assert len(neutron.asked) == 1


def test_im_can_load_it_by_its_name(module):
    """IM takes the type of a cloud as the name of module and class, of fifteen characters."""
    name = module.MayflyOpenStackCloudConnector.type
    assert (name, SOURCE.stem) == ("MayflyOpenStack", name)
    assert len(name) <= 15
