"""What is done in the fake account: each case ends by `mayfly destroy`, and says what it saw.

A case is a function of a lab with an account as good as new; what every case has in common, that
nothing is left, is looked at by `play`.
"""

from __future__ import annotations

import base64
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fake_ec2.fault_proxy import Fault, Refusal
from fake_ec2.lab import BUCKET, FOREIGN_IM, Lab
from foreign_im import keys, serving
from mayfly.local import imservice

SEEN_S = 0.5
# What another shell may want of a run that is at work.
OTHERS = {"destroy": ("destroy",), "status": ("status",), "gc": ("gc", "--cloud", "aws", "--yes")}

STOCK_IM = Path(__file__).with_name("stock_im.py")
IM_PASSWORD = "a password of somebody else's IM"
RECIPE = """
name: naps
experiments:
  nap:
    command: sleep {{seconds}}
    parameters: {seconds: {range: 1-8}}
"""
ZONES = ("eu-west-1a", "eu-west-1b")
IN_TWO_ZONES = ("--set", f"ordered=[{{zone: {ZONES[0]}}}, {{zone: {ZONES[1]}}}]")
NO_RIGHT = (
    "You are not authorized to perform this operation. User: arn:aws:iam::123456789012:user/tests"
    " is not authorized to perform: ec2:RunInstances on resource:"
    " arn:aws:ec2:eu-west-1:123456789012:instance/* because no identity-based policy allows the"
    " ec2:RunInstances action."
)


@dataclass
class Outcome:
    """What was there in the end, and what a case wants to tell."""

    left: dict[str, set[str]]
    foreign_lost: dict[str, set[str]]
    foreign_changed: bool
    destroyed: bool
    im_runs: bool
    seconds: float
    told: dict[str, Any] = field(default_factory=dict)

    @property
    def leaks(self) -> int:
        return sum(len(things) for things in self.left.values())


Case = Callable[[Lab], dict[str, Any]]


def play(lab: Lab, case: Case) -> Outcome:
    """Run a case in a fresh account, then destroy, and look at what is left."""
    lab.fresh()
    lab.new_state()
    groups = lab.groups_of_others()
    started = time.monotonic()
    told = case(lab)
    told["destroy"] = 0
    if (record := lab.record()) and not record.destroyed:
        told["destroy"] = lab.run("destroy").code
    seconds = time.monotonic() - started
    record = lab.record()
    return Outcome(
        left=lab.ours(),
        foreign_lost=lab.foreign_lost(),
        foreign_changed=lab.groups_of_others() != groups,
        destroyed=record is None or record.destroyed,
        im_runs=lab.im_runs(),
        seconds=seconds,
        told=told,
    )


# --- without faults ------------------------------------------------------------------------------


def created_and_destroyed(lab: Lab) -> dict[str, Any]:
    """The command is killed when the nodes are there, and `destroy` comes later."""
    command = lab.deploy()
    lab.wait_for_state("configuring", command=command)
    command.kill()
    lab.end(command)
    marks = marks_of(lab)
    status = lab.run("status")
    return {"marks": marks, "calls": list(lab.proxy.writes), "status": status.document}


def interrupted(lab: Lab) -> dict[str, Any]:
    """Ctrl-C while IM configures; before it, others want the run while it is at work."""
    command = lab.deploy()
    lab.wait_for_state("configuring", command=command)
    others = {name: lab.run(*words) for name, words in OTHERS.items()}
    there = lab.ours()
    ended, left = lab.interrupt(command), lab.ours()
    return {
        "pid": command.pid,
        "others": others,
        "there": there,
        "code": ended.code,
        "document": ended.document,
        "left": left,
        "again": lab.run("destroy"),
    }


def spot_fulfilled(lab: Lab) -> dict[str, Any]:
    command = lab.deploy("--set", "nodes.worker.spot=true")
    lab.wait_for_state("configuring", command=command)
    marks = marks_of(lab)
    ended = lab.interrupt(command)
    return {"marks": marks, "code": ended.code, "left": lab.ours()}


def spot_held_open(lab: Lab) -> dict[str, Any]:
    """Amazon has no spot node, and leaves the request open."""
    (lab.directory / "spot_hold").touch()
    ended = lab.end(lab.deploy("--set", "nodes.worker.spot=true"))
    return {"ended": ended, "asked": lab.proxy.count("RunInstances")}


def refused(code: str, status: int, after: int) -> Case:
    """Amazon refuses the node that follows the first `after` ones."""

    def case(lab: Lab) -> dict[str, Any]:
        lab.proxy.refusals["RunInstances"] = Refusal(code, status, after)
        ended = lab.end(lab.deploy())
        return {"ended": ended, "asked": lab.proxy.count("RunInstances"), "left": lab.ours()}

    return case


def no_room_in_the_first_zone(lab: Lab) -> dict[str, Any]:
    """Amazon has one node in the first zone, and no second one; it has all in the next zone."""
    lab.proxy.refusals["RunInstances"] = Refusal(
        "InsufficientInstanceCapacity", 500, after=1, until=2
    )
    command = lab.deploy(*IN_TWO_ZONES)
    lab.wait_for_state("configuring", command=command)
    zones, journal = zones_of(lab), lab.journal()
    ended = lab.interrupt(command)
    asked = lab.proxy.count("RunInstances")
    return {"zones": zones, "journal": journal, "ended": ended, "asked": asked, "left": lab.ours()}


def not_permitted(lab: Lab) -> dict[str, Any]:
    """The user's keys may make security groups, and no nodes."""
    lab.proxy.refusals["RunInstances"] = Refusal("UnauthorizedOperation", 403, message=NO_RIGHT)
    ended = lab.end(lab.deploy(*IN_TWO_ZONES))
    asked = lab.proxy.count("RunInstances")
    return {"ended": ended, "asked": asked, "journal": lab.journal(), "left": lab.ours()}


def throttled(lab: Lab) -> dict[str, Any]:
    """Amazon is asked too often, once: the node is asked for again."""
    lab.proxy.refusals["RunInstances"] = Refusal("RequestLimitExceeded", 503, after=1, until=2)
    command = lab.deploy()
    lab.wait_for_state("configuring", "destroyed", command=command)
    ours = lab.ours()
    lab.interrupt(command)
    return {"ours": ours, "asked": lab.proxy.count("RunInstances")}


def foreign_group_in_the_way(lab: Lab) -> dict[str, Any]:
    """All groups that IM makes are somebody else's already, by their names."""
    lab.proxy.refusals["CreateSecurityGroup"] = Refusal("InvalidGroup.Duplicate")
    return {"ended": lab.end(lab.deploy()), "asked": lab.proxy.count("RunInstances")}


def database_deleted(lab: Lab) -> dict[str, Any]:
    """IM is killed and forgets all that it made."""
    command = lab.deploy()
    lab.wait_for_state("configuring", command=command)
    command.kill()
    lab.end(command)
    lab.kill_im()
    for path in lab.im_directory.glob(f"{imservice.DATABASE}*"):
        path.unlink()
    return {"there": lab.ours()}


def foreign_im(lab: Lab) -> dict[str, Any]:
    """Somebody else's IM, with IM's own connector, makes the nodes and destroys them."""
    directory = lab.state / FOREIGN_IM
    directory.mkdir()
    told = {name: lab.environ()[name] for name in ("AWS_ENDPOINT_URL", "AWS_EC2_METADATA_DISABLED")}
    with serving(directory, IM_PASSWORD, STOCK_IM, told) as service:
        lab.more = keys(service, IM_PASSWORD)
        spot = lab.end(lab.deploy("--set", "nodes.worker.spot=true"))
        writes_for_spot = list(lab.proxy.writes)
        command = lab.deploy("--set", "nodes.worker.spot=prefer")
        lab.wait_for_state("configuring", command=command)
        command.kill()
        lab.end(command)
        nodes, there = lab.nodes(), lab.ours()
        lab.more = {}
        elsewhere = lab.run("destroy")
        still_there = lab.ours()
        lab.more = keys(service, IM_PASSWORD)
        destroyed = lab.run("destroy")
    return {
        "spot": spot,
        "writes_for_spot": writes_for_spot,
        "nodes": nodes,
        "there": there,
        "elsewhere": elsewhere,
        "still_there": still_there,
        "destroyed": destroyed,
    }


def quota_for_fewer_nodes(lab: Lab) -> dict[str, Any]:
    """A recipe wishes for a head and four workers, and the account may have three nodes."""
    lab.proxy.refusals["RunInstances"] = Refusal("VcpuLimitExceeded", after=3, until=4)
    file = lab.directory / "recipe.yml"
    file.write_text(RECIPE)
    where = ("--cloud", "aws", "--workers", "4", "--store", f"s3://{BUCKET}/")
    command = lab.start("recipe", "run", str(file), *where, "--yes")
    lab.wait_for_state("configuring", command=command)
    nodes, asked = lab.nodes(), lab.proxy.count("RunInstances")
    ended = lab.interrupt(command)
    return {"nodes": nodes, "asked": asked, "ended": ended, "left": lab.ours()}


# --- kill points ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Point:
    """Who is killed, around which call that changes something: counted from the start of the
    command that is hit."""

    whom: str  # im | client | destroy | im-in-destroy
    when: str  # before | after
    call: int

    def __str__(self) -> str:
        return f"{self.whom}, {self.when} call {self.call}"


VICTIMS = {"im": 11, "client": 11, "destroy": 9, "im-in-destroy": 9}
"""How many calls that change something there are to be hit."""


def points(count: int, seed: int) -> list[Point]:
    """Kill points by lot; the victims take turns, so that few points have all of them."""
    lot = random.Random(seed)
    return [
        Point(whom, lot.choice(("before", "after")), lot.randint(1, VICTIMS[whom]))
        for number in range(count)
        for whom in [list(VICTIMS)[number % len(VICTIMS)]]
    ]


def killed(point: Point) -> Case:
    """A run in which somebody is killed at a point."""
    in_destroy = point.whom in ("destroy", "im-in-destroy")

    def case(lab: Lab) -> dict[str, Any]:
        command = None

        def strike() -> None:
            if point.whom in ("im", "im-in-destroy"):
                lab.kill_im()
            elif command:
                command.kill()

        swallows = point.whom in ("im", "im-in-destroy")
        fault = Fault(point.call, point.when, strike, swallows)
        if in_destroy:
            made = lab.deploy()
            lab.wait_for_state("configuring", command=made)
            made.kill()
            lab.end(made)
            lab.proxy.reset()
        lab.proxy.fault = fault
        command = lab.start("destroy") if in_destroy else lab.deploy()
        lab.wait(
            lambda: fault.happened.is_set() or command.poll() is not None or lab.is_configuring(),
            f"kill point {point}",
        )
        if not in_destroy:
            time.sleep(SEEN_S)  # so that the client may notice
            command.kill()
        ended = lab.end(command)
        return {"happened": fault.happened.is_set(), "call": fault.call, "code": ended.code}

    return case


def zones_of(lab: Lab) -> list[str]:
    """The zone of each of our nodes."""
    return [node["Placement"]["AvailabilityZone"] for node in lab.nodes()]


def marks_of(lab: Lab) -> dict[str, Any]:
    """How each thing of ours is marked, by kind, and what is particular to nodes."""
    ec2 = lab.client("ec2")
    listed = {
        "instance": [
            (node["InstanceId"], node)
            for page in ec2.describe_instances()["Reservations"]
            for node in page["Instances"]
        ],
        "volume": [(one["VolumeId"], one) for one in ec2.describe_volumes()["Volumes"]],
        "security group": [
            (one["GroupId"], one) for one in ec2.describe_security_groups()["SecurityGroups"]
        ],
        "interface": [
            (one["NetworkInterfaceId"], {**one, "Tags": one.get("TagSet", [])})
            for one in ec2.describe_network_interfaces()["NetworkInterfaces"]
        ],
        "spot request": [
            (one["SpotInstanceRequestId"], one)
            for one in ec2.describe_spot_instance_requests()["SpotInstanceRequests"]
        ],
    }
    ours = lab.ours()
    tags = {
        kind: [
            {tag["Key"]: tag["Value"] for tag in thing.get("Tags", [])}
            for identity, thing in things
            if identity in ours.get(kind, ())
        ]
        for kind, things in listed.items()
    }
    nodes = lab.nodes()
    ends = [
        ec2.describe_instance_attribute(
            InstanceId=node["InstanceId"], Attribute="instanceInitiatedShutdownBehavior"
        )["InstanceInitiatedShutdownBehavior"]["Value"]
        for node in nodes
    ]
    spot = sum(node.get("InstanceLifecycle") == "spot" for node in nodes)
    return {
        "tags": tags,
        "ends": ends,
        "spot": spot,
        "run": lab.record(),
        "first_boots": [first_boot_of(lab, node["InstanceId"]) for node in nodes],
    }


def first_boot_of(lab: Lab, node: str) -> str:
    """What a node is told to do at its first boot."""
    told = lab.client("ec2").describe_instance_attribute(InstanceId=node, Attribute="userData")
    return base64.b64decode(told["UserData"]["Value"]).decode()
