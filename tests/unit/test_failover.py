"""Why a provider gave no nodes, in its own words, and which offer comes next."""

from __future__ import annotations

import pytest

from mayfly.failover import (
    Cause,
    NotMade,
    Pool,
    classify,
    missing_permission,
    next_offer,
    telling_line,
)

# What IM 2.0 puts before a provider's own words (InfrastructureManager._launch_deploy).
IM = "Error launching the VMs of type worker to cloud ID x of type {}. Attempt 1: "
EC2 = IM.format("EC2") + "Error Launching in region us-east-1 with image: ami-0. An error occurred "
RUN = "when calling the RunInstances operation"
GCE = IM.format("GCE")
NOVA = IM.format("OpenStack")
AZURE = IM.format("Azure") + "Error creating the VM: "

TEXTS = [
    (
        Cause.CAPACITY,
        EC2 + f"(InsufficientInstanceCapacity) {RUN} (reached max retries: 4): We currently do not"
        " have sufficient g5.xlarge capacity in the Availability Zone you requested (us-east-1a).",
    ),
    (
        Cause.CAPACITY,
        EC2 + f"(Unsupported) {RUN}: Your requested instance type (g6.xlarge) is not supported in"
        " your requested Availability Zone (us-east-1e).",
    ),
    (Cause.CAPACITY, EC2 + f"(SpotMaxPriceTooLow) {RUN}: Your Spot request price is too low."),
    (
        Cause.QUOTA,
        EC2 + f"(VcpuLimitExceeded) {RUN}: You have requested more vCPU capacity than your current"
        " vCPU limit of 0 allows for the instance bucket that the specified instance type belongs"
        " to.",
    ),
    (Cause.QUOTA, EC2 + f"(MaxSpotInstanceCountExceeded) {RUN}: Max spot instance count exceeded"),
    (Cause.QUOTA, EC2 + f"(InstanceLimitExceeded) {RUN}: Your quota allows for 0 more running"),
    (
        Cause.PERMISSION,
        EC2 + f"(UnauthorizedOperation) {RUN}: You are not authorized to perform this operation."
        " Encoded authorization failure message: 4qk",
    ),
    (Cause.PERMISSION, IM.format("EC2") + "Error connecting with EC2, check the credentials"),
    (Cause.PERMISSION, EC2 + f"(OptInRequired) {RUN}: You are not subscribed to this service."),
    (Cause.OTHER, EC2 + f"(InvalidParameterValue) {RUN}: Invalid value for instanceType."),
    (
        Cause.CAPACITY,
        GCE + "ZONE_RESOURCE_POOL_EXHAUSTED: The zone 'projects/p/zones/us-central1-a' does not"
        " have enough resources available to fulfill the request. Try a different zone.",
    ),
    (
        Cause.CAPACITY,
        GCE + "A n1-standard-4 VM instance with 1 nvidia-tesla-t4 accelerator(s) is currently"
        " unavailable in the us-central1-b zone.",
    ),
    (Cause.QUOTA, GCE + "Quota 'C2_CPUS' exceeded.  Limit: 50.0 in region us-east1."),
    (Cause.QUOTA, GCE + "Quota 'GPUS_ALL_REGIONS' exceeded. Limit: 0.0 globally."),
    (
        Cause.PERMISSION,
        GCE + "Required 'compute.instances.create' permission for 'projects/p/zones/z/instances/i'",
    ),
    (Cause.CAPACITY, NOVA + "No valid host was found. There are not enough hosts available."),
    (
        Cause.QUOTA,
        NOVA + "403 Forbidden Quota exceeded for cores, ram: Requested 32, 98304, but already used"
        " 0, 0 of 20, 51200 cores, ram",
    ),
    (
        Cause.PERMISSION,
        NOVA + "403 Forbidden Policy doesn't allow os_compute_api:servers:create to be performed.",
    ),
    (Cause.PERMISSION, NOVA + "401 The request you have made requires authentication."),
    (
        Cause.CAPACITY,
        AZURE + "(SkuNotAvailable) The requested VM size for resource 'Following SKUs have failed"
        " for Capacity Restrictions: Standard_NC4as_T4_v3' is currently not available.",
    ),
    (Cause.CAPACITY, AZURE + "(ZonalAllocationFailed) Allocation failed."),
    (
        Cause.QUOTA,
        AZURE + "(OperationNotAllowed) Operation could not be completed as it results in exceeding"
        " approved Total Regional Cores quota. Current Limit: 10, Current Usage: 8",
    ),
    (
        Cause.PERMISSION,
        AZURE + "(AuthorizationFailed) The client 'c' with object id 'o' does not have"
        " authorization to perform action 'Microsoft.Compute/virtualMachines/write' over scope",
    ),
    (Cause.OTHER, "no node came up in 30 min 00 s: node 0 pending"),
    (Cause.OTHER, ""),
    (
        Cause.IMAGE,
        EC2 + f"(InvalidAMIID.NotFound) {RUN}: The image id '[ami-0]' does not exist",
    ),
    (Cause.IMAGE, NOVA + "400 Bad Request Can not find requested image"),
    (Cause.IMAGE, NOVA + "404 Not Found Image debian-12 could not be found."),
    (
        Cause.IMAGE,
        GCE + "The resource 'projects/debian-cloud/global/images/debian-0' was not found",
    ),
    (
        Cause.IMAGE,
        AZURE + "(PlatformImageNotFound) The platform image 'debian:debian-12:12:latest' is not"
        " available.",
    ),
]


@pytest.mark.parametrize(("cause", "text"), TEXTS, ids=lambda value: str(value)[-30:])
def test_a_provider_s_words_say_what_is_missing(cause: Cause, text: str):
    assert classify(text) is cause
    assert classify(f"All VMs failed. No contextualize.\n{text}\n") is cause


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("Required 'compute.instances.create' permission for 'x'", "compute.instances.create"),
        ("Policy doesn't allow os_compute_api:servers:create to", "os_compute_api:servers:create"),
        (
            "authorization to perform action 'Microsoft.Compute/x/write'",
            "Microsoft.Compute/x/write",
        ),
        ("is not authorized to perform: ec2:RunInstances on resource", "ec2:RunInstances"),
        (f"(UnauthorizedOperation) {RUN}: You are not", "RunInstances"),
        ("check the credentials", None),
    ],
)
def test_a_missing_permission_is_named(words: str, name: str | None):
    assert missing_permission(words) == name
    error = str(NotMade(Cause.PERMISSION, words))
    assert (name or "more rights") in error


def test_the_line_that_tells_is_chosen_and_short():
    long = "x" * 400
    text = f"All VMs failed.\n\n{TEXTS[0][1]}\n{long}"
    assert "InsufficientInstanceCapacity" in telling_line(text)
    assert len(telling_line(long)) == 300
    assert telling_line(f"{long} No valid host was found").endswith("No valid host was found")
    assert telling_line("") == "no reason given"


def pool(region: str, kind: str = "g5.xlarge", *, spot: bool = False, nodes: int = 3) -> Pool:
    return Pool(region, (("worker", kind, spot),), nodes)


POOLS = [pool("a"), pool("a"), pool("a", "g4dn.xlarge"), pool("b"), pool("b", spot=True)]


def test_without_room_the_next_offer_is_tried():
    spent: set[Pool] = set()
    assert [next_offer(Cause.CAPACITY, at, POOLS, spent) for at in range(5)] == [1, 2, 3, 4, None]


def test_without_its_image_the_next_offer_is_tried():
    assert next_offer(Cause.IMAGE, 0, POOLS, set()) == 1


def test_a_quota_needs_another_region_or_type():
    spent: set[Pool] = set()
    assert next_offer(Cause.QUOTA, 0, POOLS, spent) == 2
    assert next_offer(Cause.CAPACITY, 2, POOLS, spent) == 3
    assert next_offer(Cause.QUOTA, 3, POOLS, spent) == 4
    again = [pool("a"), pool("b"), pool("a")]
    assert next_offer(Cause.QUOTA, 0, again, spent := set()) == 1
    assert next_offer(Cause.CAPACITY, 1, again, spent) is None, "its quota is used up"


def test_a_quota_that_is_too_small_may_do_for_fewer_nodes():
    fewer = [pool("a", nodes=9), pool("a", nodes=5), pool("b", nodes=5), pool("a", nodes=3)]
    spent: set[Pool] = set()
    assert next_offer(Cause.QUOTA, 0, fewer, spent) == 1
    assert next_offer(Cause.QUOTA, 1, fewer, spent) == 2
    assert next_offer(Cause.QUOTA, 2, fewer, spent) == 3
    more = [pool("a", nodes=3), pool("a", nodes=5)]
    assert next_offer(Cause.QUOTA, 0, more, set()) is None


@pytest.mark.parametrize("cause", [Cause.PERMISSION, Cause.OTHER])
def test_what_no_offer_can_help_stops(cause: Cause):
    assert next_offer(cause, 0, POOLS, set()) is None
