"""What runs own in an OpenStack project, by a connection of openstacksdk that is passed in.

Nova keeps our tag as metadata of the servers, and Neutron as the description of the floating
addresses that our connector makes; all else that IM makes is known by its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mayfly.errors import MayflyError
from mayfly.sweep.things import (
    TAG,
    Listing,
    Marks,
    Refused,
    Thing,
    Unlisted,
    infrastructure_of,
    now,
)

LAG_S = 2.0
SERVER, ADDRESS, PORT, VOLUME = "server", "floating address", "port", "volume"
GROUP, ROUTER, SUBNET, NETWORK, KEY = "security group", "router", "subnet", "network", "key pair"

STAGES = (
    (SERVER,),
    (ADDRESS, PORT, VOLUME, KEY),
    (ROUTER, GROUP),
    (SUBNET,),
    (NETWORK,),
)
LISTS: dict[str, Callable[[Any], Any]] = {
    SERVER: lambda cloud: cloud.compute.servers(details=True),
    ADDRESS: lambda cloud: cloud.network.ips(),
    PORT: lambda cloud: cloud.network.ports(),
    VOLUME: lambda cloud: cloud.block_storage.volumes(details=True),
    GROUP: lambda cloud: cloud.network.security_groups(),
    ROUTER: lambda cloud: cloud.network.routers(),
    SUBNET: lambda cloud: cloud.network.subnets(),
    NETWORK: lambda cloud: cloud.network.networks(),
    KEY: lambda cloud: cloud.compute.keypairs(),
}
ROUTER_PORT = "network:router_interface"


@dataclass(frozen=True)
class OpenStackAccount:
    """The project of the connection's user."""

    connect: Callable[..., Any]

    def who(self) -> str | None:
        """Return the project's identifier, None without an answer."""
        try:
            found = self.connect().current_project_id
        except MayflyError:
            return None
        return str(found) if found else None

    def place(self, region: str | None) -> Project:
        """Return the project in a region, the connection's own for None."""
        return Project(lambda: self.connect(region) if region else self.connect(), region)


@dataclass(frozen=True)
class Project:
    """A project in one region; `connect` is called when something is first asked."""

    connect: Callable[[], Any]
    region: str | None = None
    grace_s: float = 0.0
    lag_s: float = LAG_S

    @cached_property
    def cloud(self) -> Any:
        """The connection. Raises UserError when there is none."""
        return self.connect()

    @property
    def name(self) -> str:
        """What it is, for people."""
        return f"OpenStack, {self.region}" if self.region else "OpenStack"

    def look(self, marks: Marks) -> Listing:
        """List all that carries the marks, and what belongs to it by its own description."""
        try:
            look = _Look(self.cloud, self.name, marks)
        except MayflyError as error:
            silent = tuple(Unlisted(kind, error.message) for kind in LISTS)
            return Listing(self.name, STAGES, (), silent, taken=now())
        look.all()
        return Listing(
            place=self.name,
            stages=STAGES,
            things=tuple(look.things),
            unlisted=tuple(look.unlisted),
            notes=tuple(look.notes),
            infrastructures=look.found,
            taken=now(),
        )

    def remove(self, thing: Thing) -> None:
        """Ask for the removal of one thing. Raises Refused."""
        try:
            _REMOVE[thing.kind](self.cloud, thing.id)
        except Exception as error:  # keystoneauth and the SDK each have their own
            raise Refused(f"{thing}: {_said(error)}", for_good=_for_good(error)) from None


class _Look:
    """One look around a project; later questions use what earlier ones have found."""

    def __init__(self, cloud: Any, place: str, marks: Marks) -> None:
        self.cloud, self.place, self.marks = cloud, place, marks
        self.things: list[Thing] = []
        self.unlisted: list[Unlisted] = []
        self.notes: list[str] = []
        self.found: dict[str, str] = {}

    def all(self) -> None:
        """Look at every kind."""
        servers = self._servers()
        owned = {kind: self._named(kind) for kind in (GROUP, ROUTER, SUBNET, NETWORK, KEY)}
        ports = self._ports(servers, owned[GROUP], owned[NETWORK], owned[ROUTER])
        self._volumes(servers)
        self._addresses(ports)

    def _servers(self) -> dict[str, str]:
        """Return our servers: id → run; what their groups' names tell is learnt."""
        owned = {}
        for server in self._ask(SERVER):
            run = self.marks.owner(dict(server.metadata or {}))
            if not run:
                continue
            owned[str(server.id)] = run
            going = "deleting" in str(getattr(server, "task_state", None) or "")
            state = str(server.status or "").lower()
            self._add(SERVER, server, run, state=state, since=server.created_at, going=going)
            for group in server.security_groups or ():
                found = infrastructure_of(str(group.get("name")))
                if found and found not in self.marks.infrastructures:
                    self.found[found] = run
        self.marks = self.marks.knowing(self.found)
        return owned

    def _named(self, kind: str) -> dict[str, str]:
        """Return what has a name that IM makes of our infrastructures: id → run."""
        owned = {}
        for each in self._ask(kind):
            if run := self.marks.owner({}, str(each.name)):
                owned[str(each.id)] = run
                self._add(kind, each, run, state=str(each.name))
        return owned

    def _ports(
        self,
        servers: Mapping[str, str],
        groups: Mapping[str, str],
        networks: Mapping[str, str],
        routers: Mapping[str, str],
    ) -> dict[str, bool]:
        """Return our ports: id → whether it is a server's of ours.

        A server's port goes with it, a router's is taken away with the router's interface, and the
        network's own (DHCP) goes with the network. One of nobody is ours on a network of ours, or
        with groups of ours only.
        """
        owned = {}
        for port in self._ask(PORT):
            device = str(port.device_id or "")
            carried = [str(group) for group in port.security_group_ids or ()]
            run = servers.get(device) or networks.get(str(port.network_id))
            if run is None and not device and carried and all(g in groups for g in carried):
                run = groups[carried[0]]
            if run is None or device in routers or _is_services(port):
                continue
            if device and device not in servers:
                self.notes.append(f"{PORT} {port.id} on our network belongs to a foreign {device}")
                continue
            owned[str(port.id)] = device in servers
            self._add(PORT, port, run, going=device in servers)
        return owned

    def _volumes(self, servers: Mapping[str, str]) -> None:
        if not self.cloud.has_service("block-storage"):
            return  # so there can be none
        for volume in self._ask(VOLUME):
            run = self.marks.owner(dict(volume.metadata or {}))
            attached = [str(each.get("server_id")) for each in volume.attachments or ()]
            owner = next((each for each in attached if each in servers), None)
            if run:
                since = volume.created_at
                self._add(VOLUME, volume, run, state=str(volume.status), since=since)
            elif owner:
                self.notes.append(f"{VOLUME} {volume.id} is attached to our {owner}, untagged")

    def _addresses(self, ports: Mapping[str, bool]) -> None:
        """List those that our connector has made, and only name others of our servers.

        An IM without it takes free ones of the project's or makes some, and marks neither: to
        release one that merely points to a server of ours could take it from somebody else.
        """
        for address in self._ask(ADDRESS):
            name = str(address.floating_ip_address)
            if run := self.marks.owner(described_tags(address.description)):
                self._add(ADDRESS, address, run, state=name, since=address.created_at)
            elif str(address.port_id or "") in ports:
                what = f"{ADDRESS} {name} points to a server of ours"
                self.notes.append(f"{what}: IM made it, or took one of the project's")

    def _add(self, kind: str, raw: Any, run: str, **known: Any) -> None:
        self.things.append(Thing(kind, str(raw.id), self.place, run, **known))

    def _ask(self, kind: str) -> Iterator[Any]:
        try:
            listed = list(LISTS[kind](self.cloud))
        except Exception as error:  # keystoneauth and the SDK each have their own
            self.unlisted.append(Unlisted(kind, _said(error), _for_good(error)))
            return
        yield from listed


def described_tags(description: Any) -> dict[str, str]:
    """Return the tag that our connector writes as a description: exactly `mayfly-run=RUN`."""
    key, _, value = str(description or "").partition("=")
    return {TAG: value} if key == TAG and value else {}


def _is_services(port: Any) -> bool:
    """Whether a port is the network's own: a router's way into it, DHCP, metadata."""
    return str(port.device_owner or "").startswith("network:")


def _delete_router(cloud: Any, router: str) -> None:
    """Delete a router, and before it its ways into networks."""
    for port in list(cloud.network.ports(device_id=router)):
        if port.device_owner == ROUTER_PORT:
            cloud.network.remove_interface_from_router(router, port=port.id)
    cloud.network.delete_router(router, ignore_missing=True)


def _delete_subnet(cloud: Any, subnet: str) -> None:
    """Delete a subnet, and before it the way that a router of the project's has into it."""
    for port in list(cloud.network.ports(fixed_ips=f"subnet_id={subnet}")):
        if port.device_owner == ROUTER_PORT:
            cloud.network.remove_interface_from_router(port.device_id, port=port.id)
    cloud.network.delete_subnet(subnet, ignore_missing=True)


_REMOVE: dict[str, Callable[[Any, str], object]] = {
    SERVER: lambda cloud, what: cloud.compute.delete_server(what, ignore_missing=True),
    ADDRESS: lambda cloud, what: cloud.network.delete_ip(what, ignore_missing=True),
    PORT: lambda cloud, what: cloud.network.delete_port(what, ignore_missing=True),
    VOLUME: lambda cloud, what: cloud.block_storage.delete_volume(what, ignore_missing=True),
    GROUP: lambda cloud, what: cloud.network.delete_security_group(what, ignore_missing=True),
    ROUTER: _delete_router,
    SUBNET: _delete_subnet,
    NETWORK: lambda cloud, what: cloud.network.delete_network(what, ignore_missing=True),
    KEY: lambda cloud, what: cloud.compute.delete_keypair(what, ignore_missing=True),
}


def _said(error: Exception) -> str:
    text = " ".join(str(error).split())[:200]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _for_good(error: Exception) -> bool:
    """Whether a permission or the keys are missing: HTTP 401 and 403."""
    return getattr(error, "http_status", getattr(error, "status_code", None)) in (401, 403)
