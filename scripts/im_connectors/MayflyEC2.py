# Copyright (C) 2026 Mayfly developers
# SPDX-License-Identifier: GPL-3.0-or-later
#
# This program is free software: you can redistribute it and/or modify it under the terms of the GNU
# General Public License as published by the Free Software Foundation, either version 3 of the
# License, or (at your option) any later version. It is distributed WITHOUT ANY WARRANTY; see the
# GNU General Public License, https://www.gnu.org/licenses/, for details.
"""IM connector `MayflyEC2`: EC2 nodes, spot nodes too, that can all be found again.

IM's own connector makes them; this one changes what it asks Amazon for. Everything is tagged by the
call that makes it, so that nothing is without its owner for a moment. A spot node is asked for by
RunInstances, which answers at once: no request stays open behind it. What Amazon refuses for good
(no capacity, a quota) is asked for once.
"""

from __future__ import annotations

import time

import boto3
import botocore.session
from botocore.config import Config as ClientConfig
from botocore.exceptions import ClientError
from IM.connectors.EC2 import EC2CloudConnector, InstanceTypeInfo
from IM.connectors.exceptions import CloudConnectorException, NoAuthData

INFRASTRUCTURE = "IM-INFRA-ID"  # IM itself gives this tag to networks; instance_tags has the run's
# What each call makes. Not images and snapshots: who asks for one wants it to outlive the run.
MADE_BY = {
    "RunInstances": ("instance", "volume", "network-interface"),
    "CreateSecurityGroup": ("security-group",),
    "CreateVolume": ("volume",),
    "AllocateAddress": ("elastic-ip",),
    "CreateKeyPair": ("key-pair",),
    "ImportKeyPair": ("key-pair",),
    "CreateVpc": ("vpc",),
    "CreateSubnet": ("subnet",),
    "CreateInternetGateway": ("internet-gateway",),
}
# Refused before anything was done, and soon not any more: only then is asking again harmless
# (docs.aws.amazon.com/AWSEC2/latest/APIReference/errors-overview.html).
PASSING = ("RequestLimitExceeded", "Throttling", "ThrottlingException")
ATTEMPTS = 3  # of other calls, by boto itself
TIMEOUT_S = 30


class MayflyEC2CloudConnector(EC2CloudConnector):
    """IM's EC2 connector with marks on everything, working spot nodes and few calls."""

    type = "MayflyEC2"
    known_types = {}  # (region, name) → InstanceTypeInfo, for all infrastructures

    def __init__(self, cloud_info, inf):
        super().__init__(cloud_info, inf)
        self.place = None  # region and keys of the call that is served
        self.marks = {}
        self.spot = False
        self.zone = None
        self.launching = False
        self.refusal = None
        self.session = None

    def concrete_system(self, radl_system, str_url, auth_data):
        """Complete a system; its type is looked up where its image is."""
        self.place = (self.getAMIData(str_url)[0], auth_data)
        return super().concrete_system(radl_system, str_url, auth_data)

    def launch_with_retry(self, inf, radl, requested_radl, num_vm, auth_data, max_num, delay):  # noqa: PLR0913, PLR0917
        """Launch nodes, again only while Amazon says that it is asked too often."""
        launched, failed = [], []
        for attempt in range(max_num):
            if attempt:
                time.sleep(delay)
            wanted = num_vm - len(launched)
            try:
                answers = self.launch(inf, radl, requested_radl, wanted, auth_data)
            except Exception as error:
                self.log_exception("Error launching nodes")
                answers = [(False, f"Error: {error}")] * wanted
            launched += [answer for answer in answers if answer[0]]
            failed = [answer for answer in answers if not answer[0]][:wanted]
            if not failed or not all(is_passing(text) for _, text in failed):
                break
        return launched + failed

    def launch(self, inf, radl, requested_radl, num_vm, auth_data):
        """Start nodes; each is (True, VM), or (False, why it could not be started)."""
        system = radl.systems[0]
        self._stand_for(system, inf, system.getValue("disk.0.image.url"), auth_data)
        self.spot = system.getValue("spot") == "yes"
        self.zone = system.getValue("availability_zone")
        plain = radl.clone()
        plain.systems[0].delValue("spot")  # IM's own way to spot nodes is not taken
        self.launching, self.session, self.refusal = True, None, None
        try:
            return super().launch(inf, plain, requested_radl, num_vm, auth_data)
        finally:
            self.launching, self.session, self.spot = False, None, False

    def get_default_subnet(self, conn):
        """Network and subnet where none is named: the subnet of the zone that is asked for, as
        Amazon refuses a node whose zone is not its subnet's. IM takes the first one."""
        vpc, subnet = super().get_default_subnet(conn)
        if not vpc or not self.zone:
            return vpc, subnet
        inside = [
            {"Name": "vpc-id", "Values": [vpc]},
            {"Name": "availability-zone", "Values": [self.zone]},
        ]
        found = conn.describe_subnets(Filters=inside)["Subnets"]
        if not found:
            raise CloudConnectorException(f"No subnet of {vpc} is in zone {self.zone}.")
        return vpc, found[0]["SubnetId"]

    def updateVMInfo(self, vm, auth_data):
        """Tell IM the node's state and addresses."""
        self._stand_for_vm(vm, auth_data)
        return super().updateVMInfo(vm, auth_data)

    def finalize(self, vm, last, auth_data):
        """Terminate the node, and remove what only the infrastructure has with the last one."""
        self._stand_for_vm(vm, auth_data)
        return super().finalize(vm, last, auth_data)

    def alterVM(self, vm, radl, auth_data):
        """Change the node's type."""
        self._stand_for_vm(vm, auth_data)
        return super().alterVM(vm, radl, auth_data)

    def get_connection(self, region_name, auth_data, service_name, object_type="client"):
        """A boto3 client or resource, whose calls are marked; IM makes one for each call."""
        found = auth_data.getAuthInfo(self.type)
        if not found:
            raise NoAuthData(self.type)
        keys = (region_name, found[0]["username"], found[0]["password"], found[0].get("token"))
        if self.session is None or self.session[0] != keys:
            self.session = (keys, self._new_session(*keys))
        return getattr(self.session[1], object_type)(service_name)

    def get_instance_type(self, radl):
        """What the type has that a system names; without a name, IM's catalogue decides."""
        name = radl.getValue("instance_type")
        if not name or "*" in name:
            return super().get_instance_type(radl)
        return self.get_instance_type_by_name(name)

    def get_instance_type_by_name(self, name):
        """Ask Amazon, once: IM's catalogue is a file elsewhere that grows old. None: no such."""
        region, auth_data = self.place
        if (region, name) not in self.known_types:
            conn = self.get_connection(region, auth_data, "ec2")
            try:
                found = conn.describe_instance_types(InstanceTypes=[name])["InstanceTypes"]
            except ClientError as error:
                if error.response["Error"]["Code"] != "InvalidInstanceType":
                    raise
                found = []
            if not found:
                return None
            self.known_types[region, name] = type_info(found[0])
        return self.known_types[region, name]

    def _get_security_group(self, conn, sg_name):
        """The infrastructure's own group of that name: a foreign one is never used."""
        named = {"Name": "group-name", "Values": [sg_name]}
        found = conn.describe_security_groups(Filters=[named, self._owned()])["SecurityGroups"]
        return found[0] if found else None

    def _get_security_groups(self, conn, vm):  # noqa: ARG002
        """The groups that go with the last node: only the infrastructure's own ones."""
        return conn.describe_security_groups(Filters=[self._owned()])["SecurityGroups"]

    def _owned(self):
        return {"Name": f"tag:{INFRASTRUCTURE}", "Values": [self.marks[INFRASTRUCTURE]]}

    def _stand_for_vm(self, vm, auth_data):
        system = vm.info.systems[0]
        self._stand_for(system, vm.inf, system.getValue("disk.0.image.url"), auth_data)

    def _stand_for(self, system, inf, image_url, auth_data):
        """Remember for whom the calls that follow are made."""
        self.place = (self.getAMIData(image_url)[0], auth_data)
        tags = self.get_instance_tags(system, auth_data, inf)
        self.marks = {**tags, INFRASTRUCTURE: str(inf.id)}

    def _new_session(self, region_name, key_id, secret, token):
        """A session with our hooks in it; while nodes are launched boto asks nothing twice."""
        attempts = 1 if self.launching else ATTEMPTS
        inner = botocore.session.get_session()
        inner.set_default_client_config(
            ClientConfig(
                retries={"mode": "standard", "total_max_attempts": attempts},
                connect_timeout=TIMEOUT_S,
                read_timeout=TIMEOUT_S,
            )
        )
        session = boto3.session.Session(
            region_name=region_name,
            aws_access_key_id=key_id,
            aws_secret_access_key=secret,
            aws_session_token=token,
            botocore_session=inner,
        )
        if region_name != "universal" and region_name not in session.get_available_regions("ec2"):
            raise CloudConnectorException(f"Incorrect region name: {region_name}")
        for call in MADE_BY:
            session.events.register(f"before-parameter-build.ec2.{call}", self._mark)
        session.events.register("before-parameter-build.ec2.RunInstances", self._shape)
        session.events.register("after-call.ec2.RunInstances", self._note_refusal)
        session.events.register("after-call.ec2.DescribeAddresses", name_no_instance)
        return session

    def _mark(self, params, model, **_):
        """Add the marks to what a call makes."""
        kinds = MADE_BY[model.name]
        if model.name == "RunInstances" and self.spot:
            kinds = (*kinds, "spot-instances-request")
        params["TagSpecifications"] = marked(params.get("TagSpecifications"), kinds, self.marks)

    def _shape(self, params, **_):
        """Make a node end when it powers itself off, and be a spot node where one is wanted."""
        if self.refusal:
            raise CloudConnectorException(f"not asked for after: {self.refusal}")
        params["InstanceInitiatedShutdownBehavior"] = "terminate"
        if self.spot:
            params["InstanceMarketOptions"] = {
                "MarketType": "spot",
                # No MaxPrice: Amazon's limit is the price on demand.
                "SpotOptions": {
                    "SpotInstanceType": "one-time",
                    "InstanceInterruptionBehavior": "terminate",
                },
            }

    def _note_refusal(self, parsed, **_):
        """One refusal holds for all nodes of the same launch: they are alike."""
        error = parsed.get("Error")
        if error and error.get("Code") not in PASSING:
            self.refusal = f"{error.get('Code')}: {error.get('Message')}"


def marked(specifications, kinds, marks):
    """Tag specifications of a call with our marks for each kind; tags that are there stay."""
    tags = {one["ResourceType"]: list(one["Tags"]) for one in specifications or []}
    for kind in kinds:
        own = tags.setdefault(kind, [])
        there = {tag["Key"] for tag in own}
        own += [{"Key": key, "Value": value} for key, value in marks.items() if key not in there]
    return [{"ResourceType": kind, "Tags": own} for kind, own in tags.items()]


def is_passing(text):
    """Whether what failed may be asked for again, by boto's text of the error."""
    return any(f"({code})" in str(text) for code in PASSING)


def name_no_instance(parsed, **_):
    """Amazon leaves out the instance of an address without one; IM stumbles over that."""
    for address in parsed.get("Addresses", []):
        address.setdefault("InstanceId", "")


def type_info(described):
    """A type as EC2 describes it, for IM; it knows no price, and IM needs none of a named type."""
    gpus = described.get("GpuInfo", {}).get("Gpus", [])
    model = " ".join(gpus[0].get(key, "") for key in ("Manufacturer", "Name")) if gpus else None
    return InstanceTypeInfo(
        name=described["InstanceType"],
        cpu_arch=described["ProcessorInfo"]["SupportedArchitectures"],
        num_cpu=described["VCpuInfo"]["DefaultVCpus"],
        mem=described["MemoryInfo"]["SizeInMiB"],
        gpu=sum(gpu["Count"] for gpu in gpus),
        gpu_model=model,
    )
