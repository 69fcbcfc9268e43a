"""What runs own in a region of Amazon EC2, by boto3 clients that are passed in.

API: https://docs.aws.amazon.com/AWSEC2/latest/APIReference/ (DescribeInstances and its sisters).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    NoCredentialsError,
    PartialCredentialsError,
)

from mayfly.providers.aws import ClientOf
from mayfly.sweep.things import (
    IM_TAG,
    TAG,
    Listing,
    Marks,
    Refused,
    Thing,
    Unlisted,
    infrastructure_of,
    now,
    plain_tags,
)

PAGE = 500  # entries of an answer
VALUES = 200  # of one filter: EC2's own limit
LAG_S = 5.0  # EC2's listings are "eventually consistent", which its guide counts in seconds
# Codes that begin so stay until somebody changes permissions, keys or the account.
FOR_GOOD = ("Unauthorized", "AccessDenied", "AuthFailure", "InvalidClientToken", "OptIn", "Expired")
INSTANCE, SPOT, GROUP = "instance", "spot request", "security group"
VOLUME, INTERFACE, ADDRESS = "volume", "network interface", "public address"
KEY, GATEWAY, SUBNET, NETWORK = "key pair", "internet gateway", "subnet", "network"
LIVE_SPOT = ("open", "active", "disabled")  # these make an instance yet, or have one
ENDED = ("terminated",)  # listed for about an hour more

Raw = Mapping[str, Any]  # one thing as EC2 describes it
Owned = tuple[str, Raw]  # the run that owns it, and the thing
Filters = list[dict[str, Any]]


@dataclass(frozen=True)
class Kind:
    """How things of one kind are listed, and where an answer says what."""

    name: str
    call: str
    path: tuple[str, ...]
    id: str
    named: tuple[str, str] | None = None
    """Filter by name and key of the name, for kinds that IM may know by their name only."""
    state: str | None = None
    since: str | None = None


KINDS = (
    Kind(
        SPOT,
        "describe_spot_instance_requests",
        ("SpotInstanceRequests",),
        "SpotInstanceRequestId",
        state="State",
        since="CreateTime",
    ),
    Kind(
        INSTANCE,
        "describe_instances",
        ("Reservations", "Instances"),
        "InstanceId",
        since="LaunchTime",
    ),
    Kind(ADDRESS, "describe_addresses", ("Addresses",), "AllocationId"),
    Kind(
        INTERFACE,
        "describe_network_interfaces",
        ("NetworkInterfaces",),
        "NetworkInterfaceId",
        state="Status",
    ),
    Kind(VOLUME, "describe_volumes", ("Volumes",), "VolumeId", state="State", since="CreateTime"),
    Kind(
        KEY,
        "describe_key_pairs",
        ("KeyPairs",),
        "KeyName",
        ("key-name", "KeyName"),
        since="CreateTime",
    ),
    Kind(
        GROUP,
        "describe_security_groups",
        ("SecurityGroups",),
        "GroupId",
        ("group-name", "GroupName"),
        state="GroupName",
    ),
    Kind(GATEWAY, "describe_internet_gateways", ("InternetGateways",), "InternetGatewayId"),
    Kind(SUBNET, "describe_subnets", ("Subnets",), "SubnetId", state="State"),
    Kind(NETWORK, "describe_vpcs", ("Vpcs",), "VpcId", state="State"),
)
BY_NAME = {kind.name: kind for kind in KINDS}
# A cancelled request no longer makes instances, and what it has made is only known by it.
STAGES = (
    (SPOT, INSTANCE),
    (ADDRESS, INTERFACE, VOLUME, KEY),
    (GROUP, GATEWAY),
    (SUBNET,),
    (NETWORK,),
)


@dataclass(frozen=True)
class AwsAccount:
    """The account of the keys that the clients have."""

    client_of: ClientOf
    region: str
    """The region where none is named."""

    def who(self) -> str | None:
        """Return the account's number (STS wants no permission for it), None without an answer."""
        try:
            return str(self.client_of("sts", self.region).get_caller_identity()["Account"])
        except (ClientError, BotoCoreError):
            return None

    def place(self, region: str | None) -> Ec2:
        """Return a region."""
        return Ec2(self.client_of("ec2", region or self.region), region or self.region)


@dataclass(frozen=True)
class Ec2:
    """One region."""

    client: Any
    region: str
    grace_s: float = 0.0
    lag_s: float = LAG_S

    @property
    def name(self) -> str:
        """What it is, for people."""
        return f"Amazon EC2, {self.region}"

    def look(self, marks: Marks) -> Listing:
        """List all that carries the marks, and what belongs to it by its own description."""
        look = _Look(self.client, self.name, marks)
        look.all()
        return Listing(
            place=self.name,
            stages=STAGES,
            things=tuple(look.things.values()),
            unlisted=tuple(look.unlisted),
            notes=tuple(look.notes),
            infrastructures=look.found,
            taken=now(),
        )

    def remove(self, thing: Thing) -> None:
        """Ask for the removal of one thing. Raises Refused."""
        try:
            _REMOVE[thing.kind](self.client, thing.id)
        except ClientError as error:
            code = error.response["Error"]["Code"]
            if "NotFound" not in code:  # else it is gone
                what = f"{thing}: {_said(error)}"
                raise Refused(what, for_good=_for_good(error)) from None
        except BotoCoreError as error:
            raise Refused(f"{thing}: {_said(error)}", for_good=_for_good(error)) from None


class _Look:
    """One look around a region; later questions use what earlier ones have found."""

    def __init__(self, client: Any, place: str, marks: Marks) -> None:
        self.client, self.place, self.marks = client, place, marks
        self.things: dict[tuple[str, str], Thing] = {}
        self.unlisted: list[Unlisted] = []
        self.notes: list[str] = []
        self.found: dict[str, str] = {}

    def all(self) -> None:
        """Look at every kind."""
        instances = self._owned(INSTANCE)
        self._learn(instances)
        groups = self._owned(GROUP)
        requests = self._spot_requests(groups, instances)
        instances |= self._instances_of(requests)
        for kind in KINDS:
            if kind.name not in (SPOT, INSTANCE, GROUP):
                self._add_all(kind, self._owned(kind.name))
        self._add_all(BY_NAME[GROUP], groups)
        self._add_all(BY_NAME[SPOT], requests)
        self._add_all(BY_NAME[INSTANCE], instances)
        self._look_beside(instances)

    def _owned(self, name: str) -> dict[str, Owned]:
        """Return what carries the marks: id → its run, and its description."""
        kind = BY_NAME[name]
        owned = {}
        for raw in self._ask(kind, _filters(kind, self.marks)):
            called = str(raw.get(kind.named[1])) if kind.named else None
            if run := self.marks.owner(_tags(raw), called):
                owned[str(raw[kind.id])] = (run, raw)
        return owned

    def _learn(self, instances: Mapping[str, Owned]) -> None:
        """Take the infrastructures' ids from the groups that IM has put their nodes in."""
        for run, raw in instances.values():
            for group in _groups(raw):
                found = infrastructure_of(str(group.get("GroupName")))
                if found and found not in self.marks.infrastructures:
                    self.found[found] = run
        self.marks = self.marks.knowing(self.found)

    def _spot_requests(
        self, groups: Mapping[str, Owned], instances: Mapping[str, Owned]
    ) -> dict[str, Owned]:
        """Return our requests; stock IM gives them no tag, but only groups of its own making."""
        owned = {}
        for raw in self._ask(BY_NAME[SPOT], [[]]):
            wanted = raw.get("LaunchSpecification", {}).get("SecurityGroups", ())
            ids = [str(group["GroupId"]) for group in wanted]
            tags = _tags(raw)
            run = self.marks.owner(tags)
            if run is None and TAG not in tags and ids and all(each in groups for each in ids):
                run = groups[ids[0]][0]
            instance = str(raw.get("InstanceId"))
            if run is None and TAG not in tags and instance in instances:
                run = instances[instance][0]
            if run:
                owned[str(raw["SpotInstanceRequestId"])] = (run, raw)
        return owned

    def _instances_of(self, requests: Mapping[str, Owned]) -> dict[str, Owned]:
        """Return the instances that our spot requests have got."""
        ids = {str(raw["InstanceId"]): run for run, raw in requests.values() if "InstanceId" in raw}
        questions = [_values("instance-id", part) for part in _parts(ids)]
        found = self._ask(BY_NAME[INSTANCE], questions)
        return {
            str(raw["InstanceId"]): (ids[str(raw["InstanceId"])], raw)
            for raw in found
            if TAG not in _tags(raw)
        }

    def _look_beside(self, instances: Mapping[str, Owned]) -> None:
        """Count what ends with our instances, and name what will outlive them unmarked."""
        live = {each: pair for each, pair in instances.items() if not _ended(pair[1])}
        for owner, (run, raw) in live.items():
            for kind, what, ends in _attached(raw):
                known = self.things.get((kind, what))
                if ends:
                    thing = known or Thing(kind, what, self.place, run, f"of {owner}")
                    self.things[kind, what] = replace(thing, going=True)
                elif known is None:
                    self.notes.append(f"{kind} {what} is attached to our {owner}, without our tag")
        questions = [_values("instance-id", part) for part in _parts(live)]
        for raw in self._ask(BY_NAME[ADDRESS], questions):
            what = str(raw.get("AllocationId") or raw.get("PublicIp"))
            if (ADDRESS, what) not in self.things:
                target = raw.get("InstanceId")
                self.notes.append(f"{ADDRESS} {what} points to our {target}, without our tag")

    def _add_all(self, kind: Kind, owned: Mapping[str, Owned]) -> None:
        for what, (run, raw) in owned.items():
            state = _state(kind, raw)
            if (kind.name == SPOT and state not in LIVE_SPOT) or state in ENDED:
                continue
            since = raw.get(kind.since) if kind.since else None
            self.things[kind.name, what] = Thing(
                kind.name,
                what,
                self.place,
                run,
                state,
                since.isoformat() if isinstance(since, datetime) else since,
                going=state in ("shutting-down", "deleting"),
            )

    def _ask(self, kind: Kind, questions: Iterable[Filters]) -> Iterator[Raw]:
        """Give the answers to all questions; a refusal is noted once for the kind."""
        try:
            answers = [raw for filters in questions for raw in self._pages(kind, filters)]
        except (ClientError, BotoCoreError) as error:
            if all(unlisted.kind != kind.name for unlisted in self.unlisted):
                self.unlisted.append(Unlisted(kind.name, _said(error), _for_good(error)))
            return
        yield from answers

    def _pages(self, kind: Kind, filters: Filters) -> Iterator[Raw]:
        given = {"Filters": filters} if filters else {}
        if self.client.can_paginate(kind.call):
            pages = self.client.get_paginator(kind.call).paginate(
                **given, PaginationConfig={"PageSize": PAGE}
            )
        else:
            pages = [getattr(self.client, kind.call)(**given)]
        for page in pages:
            found = [page]
            for key in kind.path:
                found = [item for each in found for item in each.get(key, ())]
            yield from found


def _filters(kind: Kind, marks: Marks) -> Iterator[Filters]:
    """The questions that together find all that carries the marks."""
    if marks.runs is None:
        yield _values("tag-key", [TAG])
    else:
        yield from (_values(f"tag:{TAG}", part) for part in _parts(marks.runs))
    for part in _parts(marks.infrastructures):
        yield _values(f"tag:{IM_TAG}", part)
    if kind.named:
        yield from (_values(kind.named[0], part) for part in _parts(marks.names()))


def _values(name: str, values: Iterable[str]) -> Filters:
    return [{"Name": name, "Values": list(values)}]


def _parts(values: Iterable[str]) -> Iterator[list[str]]:
    listed = sorted(values)
    return (listed[start : start + VALUES] for start in range(0, len(listed), VALUES))


def _tags(raw: Raw) -> dict[str, str]:
    """The tags of a thing; network interfaces have them in a place of their own."""
    return plain_tags(raw.get("Tags") or raw.get("TagSet"))


def _groups(instance: Raw) -> Iterator[Raw]:
    """The security groups of an instance and of its interfaces."""
    yield from instance.get("SecurityGroups", ())
    for interface in instance.get("NetworkInterfaces", ()):
        yield from interface.get("Groups", ())


def _state(kind: Kind, raw: Raw) -> str:
    if kind.name == INSTANCE:
        return str(raw["State"]["Name"])
    return str(raw.get(kind.state, "")) if kind.state else ""


def _ended(instance: Raw) -> bool:
    return instance["State"]["Name"] in ENDED


def _attached(instance: Raw) -> Iterator[tuple[str, str, bool]]:
    """Kind and id of what is attached to an instance, and whether it ends with it."""
    for disk in instance.get("BlockDeviceMappings", ()):
        ebs = disk.get("Ebs", {})
        if "VolumeId" in ebs:
            yield VOLUME, str(ebs["VolumeId"]), bool(ebs.get("DeleteOnTermination"))
    for interface in instance.get("NetworkInterfaces", ()):
        ends = bool(interface.get("Attachment", {}).get("DeleteOnTermination"))
        yield INTERFACE, str(interface["NetworkInterfaceId"]), ends


def _release(client: Any, address: str) -> None:
    for raw in client.describe_addresses(AllocationIds=[address])["Addresses"]:
        if raw.get("AssociationId"):
            client.disassociate_address(AssociationId=raw["AssociationId"])
    client.release_address(AllocationId=address)


def _delete_group(client: Any, group: str) -> None:
    """Delete a group, and before it its rules that name groups: they may name each other."""
    for raw in client.describe_security_groups(GroupIds=[group])["SecurityGroups"]:
        for key, revoke in (
            ("IpPermissions", client.revoke_security_group_ingress),
            ("IpPermissionsEgress", client.revoke_security_group_egress),
        ):
            rules = [rule for rule in raw.get(key, ()) if rule.get("UserIdGroupPairs")]
            if rules:
                with suppress(ClientError):  # deleting the group tells what is in its way
                    revoke(GroupId=group, IpPermissions=rules)
    client.delete_security_group(GroupId=group)


def _delete_gateway(client: Any, gateway: str) -> None:
    listed = client.describe_internet_gateways(InternetGatewayIds=[gateway])
    for raw in listed["InternetGateways"]:
        for attached in raw.get("Attachments", ()):
            client.detach_internet_gateway(InternetGatewayId=gateway, VpcId=attached["VpcId"])
    client.delete_internet_gateway(InternetGatewayId=gateway)


_REMOVE: dict[str, Callable[[Any, str], object]] = {
    SPOT: lambda ec2, what: ec2.cancel_spot_instance_requests(SpotInstanceRequestIds=[what]),
    INSTANCE: lambda ec2, what: ec2.terminate_instances(InstanceIds=[what]),
    ADDRESS: _release,
    INTERFACE: lambda ec2, what: ec2.delete_network_interface(NetworkInterfaceId=what),
    VOLUME: lambda ec2, what: ec2.delete_volume(VolumeId=what),
    KEY: lambda ec2, what: ec2.delete_key_pair(KeyName=what),
    GROUP: _delete_group,
    GATEWAY: _delete_gateway,
    SUBNET: lambda ec2, what: ec2.delete_subnet(SubnetId=what),
    NETWORK: lambda ec2, what: ec2.delete_vpc(VpcId=what),
}


def _said(error: Exception) -> str:
    if isinstance(error, ClientError):
        said = error.response["Error"]
        return f"{said['Code']}: {' '.join(str(said.get('Message', '')).split())[:200]}"
    return type(error).__name__


def _for_good(error: Exception) -> bool:
    if isinstance(error, ClientError):
        return str(error.response["Error"]["Code"]).startswith(FOR_GOOD)
    return isinstance(error, NoCredentialsError | PartialCredentialsError)
