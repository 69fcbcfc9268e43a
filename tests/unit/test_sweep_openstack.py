"""The sweep of an OpenStack project, against a fake of the list and delete calls it uses."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from openstack import exceptions
from openstack.block_storage.v3 import _proxy as block_storage
from openstack.compute.v2 import _proxy as compute
from openstack.network.v2 import _proxy as network
from tests.unit.deploy_fakes import FakeClock, FakeIM

from mayfly.destroy import Destroyer
from mayfly.errors import RemoteError, UserError
from mayfly.ledger import Ledger
from mayfly.sweep.openstack import OpenStackAccount
from mayfly.sweep.things import TAG
from mayfly.watch import Pace

RUN, OTHER_RUN = "faces-261128-100000-abcd", "faces-261128-100000-abce"
INFRA = "0a1b2c3d-0000-11f1-8000-0242ac110002"
OTHER = "0a1b2c3d-0000-11f1-8000-0242ac110003"
EMPTY: dict[str, Any] = {
    "metadata": {},
    "created_at": "2026-11-28T10:00:00Z",
    "status": "ACTIVE",
    "security_groups": [],
    "security_group_ids": [],
    "attachments": [],
    "device_id": "",
    "device_owner": "",
    "network_id": "",
    "port_id": None,
    "floating_ip_address": "192.0.2.7",
    "description": "",
    "task_state": None,
}


class FakeProxy:
    """Lets through to the fake only what the SDK's own part has, with the arguments it takes."""

    def __init__(self, fake: FakeOpenStack, real: type) -> None:
        self._fake, self._real = fake, real

    def __getattr__(self, name: str) -> Any:
        signature = inspect.signature(getattr(self._real, name))

        def call(*given: Any, **named: Any) -> Any:
            signature.bind(None, *given, **named)
            return getattr(self._fake, name)(*given, **named)

        return call


@dataclass
class FakeOpenStack:
    """A project as tables, with the rules that decide the order: what is in use stays.

    A server is gone at the second look after its deletion; its ports go with it.
    """

    tables: dict[str, dict[str, Any]] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)  # call → HTTP status
    current_project_id: str = "project-1"
    services: set[str] = field(default_factory=lambda: {"block-storage"})
    order: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.compute = FakeProxy(self, compute.Proxy)
        self.network = FakeProxy(self, network.Proxy)
        self.block_storage = FakeProxy(self, block_storage.Proxy)

    def add(self, table: str, what: str, **given: Any) -> str:
        row = SimpleNamespace(**{**EMPTY, "id": what, "name": what, **given})
        self.tables.setdefault(table, {})[what] = row
        return what

    def rows(self, table: str) -> list[Any]:
        return [*self.tables.get(table, {}).values()]

    def names(self) -> dict[str, set[str]]:
        return {table: {*rows} for table, rows in self.tables.items()}

    def has_service(self, name: str) -> bool:
        return name in self.services

    def servers(self, details: bool) -> list[Any]:
        for row in self.rows("servers"):
            if row.task_state == "deleting":
                row.looks = getattr(row, "looks", 0) + 1
                if row.looks > 1:
                    del self.tables["servers"][row.id]
                    for port in self.rows("ports"):
                        if port.device_id == row.id:
                            del self.tables["ports"][port.id]
        return self._listed("servers")

    def ips(self) -> list[Any]:
        return self._listed("ips")

    def ports(self, **query: str) -> list[Any]:
        rows = self._listed("ports")
        if "device_id" in query:
            return [row for row in rows if row.device_id == query["device_id"]]
        if "fixed_ips" in query:
            return [row for row in rows if f"subnet_id={row.subnet}" == query["fixed_ips"]]
        return rows

    def volumes(self, details: bool) -> list[Any]:
        return self._listed("volumes")

    def security_groups(self) -> list[Any]:
        return self._listed("security_groups")

    def routers(self) -> list[Any]:
        return self._listed("routers")

    def subnets(self) -> list[Any]:
        return self._listed("subnets")

    def networks(self) -> list[Any]:
        return self._listed("networks")

    def keypairs(self) -> list[Any]:
        return self._listed("keypairs")

    def _listed(self, table: str) -> list[Any]:
        self._maybe_refuse(table)
        return self.rows(table)

    def _maybe_refuse(self, call: str) -> None:
        if status := self.refused.get(call):
            raise refusal(exceptions.HttpException("not for you"), status)

    def delete_server(self, what: str, ignore_missing: bool) -> None:
        self._maybe_refuse("delete_server")
        self.order.append(what)
        self.tables["servers"][what].task_state = "deleting"

    def delete_port(self, what: str, ignore_missing: bool) -> None:
        self._require(not self.tables["ports"][what].device_owner.startswith("network:"))
        self._drop("ports", what)

    def delete_ip(self, what: str, ignore_missing: bool) -> None:
        self._maybe_refuse("delete_ip")
        self._drop("ips", what)

    def delete_volume(self, what: str, ignore_missing: bool) -> None:
        self._drop("volumes", what)

    def delete_security_group(self, what: str, ignore_missing: bool) -> None:
        self._require(not any(what in p.security_group_ids for p in self.rows("ports")))
        self._drop("security_groups", what)

    def remove_interface_from_router(self, router: str, port: str) -> None:
        self._drop("ports", port)

    def delete_router(self, what: str, ignore_missing: bool) -> None:
        self._require(not any(port.device_id == what for port in self.rows("ports")))
        self._drop("routers", what)

    def delete_subnet(self, what: str, ignore_missing: bool) -> None:
        ports = [port for port in self.rows("ports") if getattr(port, "subnet", "") == what]
        self._require(all(port.device_owner == "network:dhcp" for port in ports))
        self._drop("subnets", what)

    def delete_network(self, what: str, ignore_missing: bool) -> None:
        ports = [port for port in self.rows("ports") if port.network_id == what]
        self._require(all(port.device_owner == "network:dhcp" for port in ports))
        for port in ports:
            del self.tables["ports"][port.id]
        self._drop("networks", what)

    def delete_keypair(self, what: str, ignore_missing: bool) -> None:
        self._drop("keypairs", what)

    def _drop(self, table: str, what: str) -> None:
        self.order.append(what)
        del self.tables[table][what]

    @staticmethod
    def _require(free: bool) -> None:
        if not free:
            raise refusal(exceptions.ConflictException("in use"), 409)


def refusal(error: exceptions.HttpException, status: int) -> exceptions.HttpException:
    error.status_code = status
    return error


@pytest.fixture
def ledger(tmp_path):
    opened = Ledger(tmp_path / "ledger.sqlite")
    opened.add(RUN, "openstack", f"s3://bucket/{RUN}/", {})
    opened.set_infrastructure(RUN, INFRA)
    yield opened
    opened.close()


def destroy(ledger: Ledger, cloud: FakeOpenStack):
    clock = FakeClock()
    pace = Pace(1.0, 60.0, clock=clock, sleep=clock.sleep)
    account = OpenStackAccount(lambda region=None: cloud)
    destroyer = Destroyer(FakeIM(), ledger, None, None, account, pace)
    return destroyer.destroy(ledger.get(RUN), lambda text: None)


def fill(cloud: FakeOpenStack, run: str, infrastructure: str, mark: str) -> None:
    """What IM's connector makes for a run where the project had no network."""
    groups = [
        cloud.add("security_groups", f"{mark}-group-{net}", name=f"im-{infrastructure}-{net}")
        for net in ("public", "private")
    ]
    net = cloud.add("networks", f"{mark}-net", name=f"im-{infrastructure}-private")
    subnet = cloud.add("subnets", f"{mark}-subnet", name=f"im-{infrastructure}-subprivate")
    router = cloud.add("routers", f"{mark}-router", name=f"im-{infrastructure}")
    port = {"network_id": net, "subnet": subnet}
    gateway = {"device_id": router, "device_owner": "network:router_interface"}
    cloud.add("ports", f"{mark}-gateway", **port, **gateway)
    dhcp = {"device_id": "dhcp-agent", "device_owner": "network:dhcp"}
    cloud.add("ports", f"{mark}-dhcp", **port, **dhcp)
    for number in range(2):
        server = cloud.add(
            "servers",
            f"{mark}-server-{number}",
            metadata={TAG: run} if run else {},
            security_groups=[{"name": f"im-{infrastructure}-private"}],
        )
        cloud.add(
            "ports",
            f"{mark}-port-{number}",
            device_id=server,
            device_owner="compute:nova",
            security_group_ids=groups,
            **port,
        )
    cloud.add("volumes", f"{mark}-volume", metadata={TAG: run} if run else {})


def test_ours_goes_in_order_and_all_that_is_foreign_stays(ledger):
    cloud = FakeOpenStack()
    fill(cloud, OTHER_RUN, OTHER, "other")
    fill(cloud, "", "frontend", "theirs")
    for name in ("im-", f"im-{INFRA}x", f"im-{INFRA}-staging", INFRA):
        cloud.add("security_groups", name)
        cloud.add("networks", name)
    cloud.add("keypairs", "ada")
    before = cloud.names()
    fill(cloud, RUN, INFRA, "ours")
    cloud.add("ports", "ours-lost", security_group_ids=["ours-group-private"])
    proof = destroy(ledger, cloud)
    assert cloud.names() == before
    assert (proof.clean, proof.who) == (True, "project-1")
    assert {*proof.listings[0].kinds} >= {"server", "floating address", "volume", "key pair"}
    place = {name: cloud.order.index(name) for name in cloud.order}
    assert place["ours-server-1"] < place["ours-group-private"]
    assert place["ours-router"] < place["ours-subnet"] < place["ours-net"]


def test_the_infrastructure_is_learnt_from_the_servers(ledger):
    cloud = FakeOpenStack()
    fill(cloud, RUN, INFRA, "ours")
    ledger._write("UPDATE runs SET infrastructure = NULL", ())
    destroy(ledger, cloud)
    assert ledger.get(RUN).infrastructure == INFRA
    assert not any(cloud.tables.values())


def test_addresses_that_our_connector_made_are_released_and_foreign_ones_stay(ledger):
    """Also when the node is gone, and they point nowhere."""
    cloud = FakeOpenStack()
    fill(cloud, OTHER_RUN, OTHER, "other")
    for name, more in {
        "free": {},
        "theirs": {"port_id": "other-port-0", "description": f"{TAG}={OTHER_RUN}"},
        "alike": {"description": f"{TAG}={RUN}2"},
        "talk": {"description": f"was {TAG}={RUN}"},
        "other-key": {"description": f"{TAG}s={RUN}"},
    }.items():
        cloud.add("ips", name, **more)
    fill(cloud, RUN, INFRA, "ours")
    cloud.add("ips", "taken", port_id="ours-port-1")
    before = cloud.names()["ips"]
    cloud.add("ips", "ours-used", port_id="ours-port-0", description=f"{TAG}={RUN}")
    cloud.add("ips", "ours-lost", description=f"{TAG}={RUN}")
    proof = destroy(ledger, cloud)
    assert (proof.clean, cloud.names()["ips"]) == (True, before)
    assert [note for note in proof.notes if "192.0.2.7 points to a server of ours" in note]
    done = {(e.action, e.outcome) for e in ledger.journal(RUN) if "floating address" in e.target}
    assert done == {("remove", "done")}


def test_an_address_that_may_not_be_released_is_left_and_named(ledger):
    cloud = FakeOpenStack(refused={"delete_ip": 403})
    cloud.add("ips", "ours", description=f"{TAG}={RUN}")
    with pytest.raises(RemoteError, match=r"floating address ours \(192.0.2.7\)"):
        destroy(ledger, cloud)


def test_unmarked_addresses_and_volumes_are_told_and_left(ledger):
    cloud = FakeOpenStack()
    fill(cloud, RUN, INFRA, "ours")
    cloud.add("ips", "address", port_id="ours-port-0")
    cloud.add("volumes", "data", attachments=[{"server_id": "ours-server-0"}])
    proof = destroy(ledger, cloud)
    assert (cloud.names()["ips"], cloud.names()["volumes"]) == ({"address"}, {"data"})
    assert "192.0.2.7" in " ".join(proof.notes)
    assert "data" in " ".join(proof.notes)


LISTED = [
    *("servers", "ips", "ports", "volumes", "security_groups"),
    *("routers", "subnets", "networks", "keypairs"),
]


@pytest.mark.parametrize("call", LISTED)
def test_what_may_not_be_listed_is_not_empty(ledger, call):
    with pytest.raises(RemoteError, match="not listed: HttpException"):
        destroy(ledger, FakeOpenStack(refused={call: 403}))
    assert not ledger.get(RUN).destroyed


def test_a_project_without_block_storage_has_no_volumes(ledger):
    cloud = FakeOpenStack(refused={"volumes": 404}, services=set())
    assert destroy(ledger, cloud).clean


def test_im_destroys_though_the_project_does_not_answer(ledger):
    def connect(region=None):
        raise UserError("no OpenStack to talk to")

    im, clock = FakeIM(radls={INFRA: RUN}), FakeClock()
    pace = Pace(1.0, 60.0, clock=clock, sleep=clock.sleep)
    destroyer = Destroyer(im, ledger, None, None, OpenStackAccount(connect), pace)
    with pytest.raises(RemoteError, match="servers in OpenStack not listed: no OpenStack"):
        destroyer.destroy(ledger.get(RUN), lambda text: None)
    assert im.radls == {}
    assert not ledger.get(RUN).destroyed


def test_a_server_that_may_not_be_deleted_is_named(ledger):
    cloud = FakeOpenStack(refused={"delete_server": 403})
    fill(cloud, RUN, INFRA, "ours")
    with pytest.raises(RemoteError, match="server ours-server-0"):
        destroy(ledger, cloud)
    assert "ours-server-0" in cloud.names()["servers"]
