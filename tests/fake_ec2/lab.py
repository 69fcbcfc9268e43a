"""A fake account, and the real command, IM and connector that work in it.

The fake EC2 and S3 is a process, the proxy before it a thread of ours. Things of somebody else are
in the account, too: they look like ours, and nothing may happen to them.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
from machine import ROOT

import testenv
from fake_ec2.fault_proxy import FaultProxy
from mayfly.ledger import Entry, Ledger, Record
from mayfly.local import imservice
from mayfly.local.imservice import CLOUDS
from mayfly.local.paths import find_paths
from mayfly.local.ports import free_ports

HERE = Path(__file__).resolve().parent
REGION = "eu-west-1"
IMAGE = "ami-0fa6e0fa6e0fa6e01"
BUCKET = "fake-models"
KEY_ID = "FAKEKEYOFTHETESTS"
FOREIGN_IM = "foreign-im"  # the directory of a service that is not ours
FOREIGN = "im-5e1f0000-aaaa-bbbb-cccc-0123456789ab"  # a group's name, as IM would give it
COMMAND_S = 900
GONE = ("terminated", "shutting-down")
PRICES = {
    "format": 1, "cloud": "aws", "region": REGION, "currency": "USD", "date": "2026-11-01",
    "source": "made up for tests", "other": {"hour": 0.01}, "disk_gb_month": 0, "address_hour": 0,
    "transfer_gb": 0,
}  # fmt: skip


@dataclass(frozen=True)
class Ended:
    """How a command ended: its exit code, its JSON document, its messages."""

    code: int
    document: dict[str, Any]
    messages: str


class Lab:
    """The fake account with one state directory of Mayfly's."""

    def __init__(self, directory: Path) -> None:
        assert [name for _, name in socket.if_nameindex()] == ["lo"], "run tests by make test-ec2"
        self.directory = directory
        (self.port,) = free_ports(1)
        self._write_files()
        self.server = self._start_server()
        self.proxy = FaultProxy(self.port)
        self.number = 0  # of the state directory
        self.more: dict[str, str] = {}  # variables of the case that is played
        self.said = ""
        self.closed = False
        self.commands: list[subprocess.Popen[str]] = []
        self.foreign: dict[str, set[str]] = {}

    def _write_files(self) -> None:
        image = {
            "ami_id": IMAGE, "name": "debian-12-amd64-fake", "description": "fake",
            "owner_id": "136693071363", "public": True, "virtualization_type": "hvm",
            "architecture": "x86_64", "state": "available", "image_type": "machine",
            "image_location": "fake", "hypervisor": "xen", "root_device_type": "ebs",
            "root_device_name": "/dev/xvda", "creation_date": "2026-11-01T00:00:00.000Z",
        }  # fmt: skip
        (self.directory / "images.json").write_text(json.dumps([image]))
        (self.directory / "prices.yml").write_text(json.dumps(PRICES))
        (self.directory / "home").mkdir()

    def _start_server(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, str(HERE / "fake_ec2_server.py"), str(self.port)]
        with (self.directory / "fake_ec2.log").open("wb") as log:
            server = subprocess.Popen(
                [*command, str(self.directory)],
                env={**os.environ, "MOTO_AMIS_PATH": str(self.directory / "images.json")},
                stdout=log,
                stderr=log,
            )
        self.wait(lambda: self._answers(server), "the fake EC2")
        return server

    def _answers(self, server: subprocess.Popen[bytes]) -> bool:
        if server.poll() is not None:
            raise RuntimeError((self.directory / "fake_ec2.log").read_text()[-3000:])
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{self.port}/moto-api/", timeout=5).close()
        except OSError:
            return False
        return True

    def close(self) -> None:
        """End all that was started here, commands that a case had no time to wait for, too."""
        self.closed = True
        for command in self.commands:
            command.kill()
            command.wait()
        self.stop_im()
        self.proxy.close()
        self.server.terminate()
        self.server.wait(timeout=30)

    # --- the account -------------------------------------------------------------------------

    def client(self, service: str) -> Any:
        """A client that nobody counts and no fault meets."""
        return boto3.client(
            service,
            region_name=REGION,
            endpoint_url=f"http://127.0.0.1:{self.port}",
            aws_access_key_id="observer",
            aws_secret_access_key="observer",
        )

    def fresh(self) -> None:
        """An empty account but for somebody else's things, and the data of the default job."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/moto-api/reset", method="POST"
        )
        urllib.request.urlopen(request, timeout=60).close()
        (self.directory / "spot_hold").unlink(missing_ok=True)
        self.proxy.reset()
        s3 = self.client("s3")
        s3.create_bucket(Bucket=BUCKET, CreateBucketConfiguration={"LocationConstraint": REGION})
        files = [{"path": "train-0.tfrecords", "size": 1, "sha256": "0" * 64}]
        manifest = {"version": 1, "kind": "dataset", "created": "now", "files": files}
        data = "datasets/fashion-mnist/"
        s3.put_object(Bucket=BUCKET, Key=f"{data}manifest.json", Body=json.dumps(manifest))
        s3.put_object(Bucket=BUCKET, Key=f"{data}train-0.tfrecords", Body=b"x")
        self._make_foreign()
        self.foreign = self.everything()

    def _make_foreign(self) -> None:
        """One of each kind, with a name or a tag that comes close to ours."""
        ec2 = self.client("ec2")
        tags = [{"Key": "mayfly-runs", "Value": "other"}, {"Key": "Name", "Value": "worker-1"}]
        for name in (FOREIGN, f"{FOREIGN}-public"):
            ec2.create_security_group(
                GroupName=name, Description="Security group created by the IM"
            )
        node = [{"ResourceType": "instance", "Tags": tags}]
        ec2.run_instances(ImageId=IMAGE, MinCount=1, MaxCount=1, TagSpecifications=node)
        ec2.create_volume(Size=1, AvailabilityZone=f"{REGION}a")
        subnet = ec2.describe_subnets()["Subnets"][0]["SubnetId"]
        ec2.create_network_interface(SubnetId=subnet)
        ec2.allocate_address(Domain="vpc")
        ec2.create_key_pair(KeyName="im-somebody")
        spec = {"ImageId": IMAGE, "InstanceType": "m6i.large"}
        ec2.request_spot_instances(InstanceCount=1, LaunchSpecification=spec)

    def everything(self) -> dict[str, set[str]]:
        """What the account has, by kind; what is gone or only remembered does not count."""
        ec2 = self.client("ec2")
        nodes = [
            node
            for page in ec2.describe_instances()["Reservations"]
            for node in page["Instances"]
            if node["State"]["Name"] not in GONE
        ]
        requests = ec2.describe_spot_instance_requests()["SpotInstanceRequests"]
        return {
            "instance": {node["InstanceId"] for node in nodes},
            "spot request": {
                one["SpotInstanceRequestId"]
                for one in requests
                if one["State"] in ("open", "active")
            },
            "security group": {
                group["GroupId"]
                for group in ec2.describe_security_groups()["SecurityGroups"]
                if group["GroupName"] != "default"
            },
            "volume": {one["VolumeId"] for one in ec2.describe_volumes()["Volumes"]},
            "interface": {
                one["NetworkInterfaceId"]
                for one in ec2.describe_network_interfaces()["NetworkInterfaces"]
            },
            "address": {one["AllocationId"] for one in ec2.describe_addresses()["Addresses"]},
            "key pair": {one["KeyPairId"] for one in ec2.describe_key_pairs()["KeyPairs"]},
            "network": {one["VpcId"] for one in ec2.describe_vpcs()["Vpcs"]},
        }

    def ours(self) -> dict[str, set[str]]:
        """What is there beside somebody else's things, by kind; empty kinds are left out."""
        now = self.everything()
        found = {kind: things - self.foreign[kind] for kind, things in now.items()}
        return {kind: things for kind, things in found.items() if things}

    def nodes(self) -> list[dict[str, Any]]:
        """Our nodes, as EC2 describes them."""
        ours = self.ours().get("instance", set())
        return [
            node
            for page in self.client("ec2").describe_instances()["Reservations"]
            for node in page["Instances"]
            if node["InstanceId"] in ours
        ]

    def foreign_lost(self) -> dict[str, set[str]]:
        """Somebody else's things that are gone."""
        now = self.everything()
        lost = {kind: things - now[kind] for kind, things in self.foreign.items()}
        return {kind: things for kind, things in lost.items() if things}

    def groups_of_others(self) -> list[Any]:
        """Somebody else's groups as they are, with their rules."""
        listed = self.client("ec2").describe_security_groups()["SecurityGroups"]
        return [group for group in listed if group["GroupId"] in self.foreign["security group"]]

    # --- commands ----------------------------------------------------------------------------

    def new_state(self) -> Path:
        """Another state directory: another laptop, in effect."""
        self.stop_im()
        self.more = {}
        self.number += 1
        path = self.state
        path.mkdir()
        (self.im_port,) = free_ports(1)
        return path

    @property
    def state(self) -> Path:
        return self.directory / f"state-{self.number}"

    def environ(self) -> dict[str, str]:
        """All that a user's command sees; nothing of this process's own keys or proxies."""
        kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
        return kept | {
            "HOME": str(self.directory / "home"),
            "PYTHONPATH": f"{ROOT / 'scripts'}:{ROOT / 'training'}",
            "MAYFLY_STATE_DIR": str(self.state),
            "MAYFLY_CACHE_DIR": str(find_paths().cache),
            "MAYFLY_CLOUD_IM_PORT": str(self.im_port),
            "MAYFLY_S3_ENDPOINT": f"http://127.0.0.1:{self.port}",
            "MAYFLY_PRICES": str(self.directory / "prices.yml"),
            "AWS_ACCESS_KEY_ID": KEY_ID,
            "AWS_SECRET_ACCESS_KEY": testenv.CANARY,
            "AWS_ENDPOINT_URL": self.proxy.url,
            "AWS_REGION": REGION,
            "AWS_EC2_METADATA_DISABLED": "true",
            **self.more,
        }

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Start a mayfly command, as a user would."""
        if self.closed:
            raise RuntimeError("the lab is closed")
        command = subprocess.Popen(
            [sys.executable, "-m", "mayfly.cli", *words, "--json"],
            env=self.environ(),
            cwd=self.directory,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.commands.append(command)
        return command

    def deploy(self, *words: str) -> subprocess.Popen[str]:
        """Start a deploy of one ps and two workers."""
        fixed = ("--cloud", "aws", "--workers", "2", "--bucket", f"s3://{BUCKET}/", "--yes")
        return self.start("deploy", *fixed, *words)

    def end(self, command: subprocess.Popen[str]) -> Ended:
        """Wait for a command."""
        try:
            shown, messages = command.communicate(timeout=COMMAND_S)
        except subprocess.TimeoutExpired:
            command.kill()
            shown, messages = command.communicate()
            messages += f"\nkilled after {COMMAND_S} s"
        print(messages[-4000:], file=sys.stderr)
        document = json.loads(shown) if shown.strip().startswith("{") else {}
        self.said += shown + messages
        return Ended(command.returncode, document, messages)

    def run(self, *words: str) -> Ended:
        return self.end(self.start(*words))

    def record(self) -> Record | None:
        """The latest run of this state directory's ledger, None when there is none."""
        path = self.state / "ledger.sqlite"
        if not path.exists():
            return None
        ledger = Ledger(path)
        try:
            return next(iter(ledger.runs()), None)
        finally:
            ledger.close()

    def journal(self) -> list[Entry]:
        """What was journalled for the latest run of this state directory."""
        ledger = Ledger(self.state / "ledger.sqlite")
        try:
            return ledger.journal(ledger.get(None).run)
        finally:
            ledger.close()

    def wait_for_state(self, *states: str, command: subprocess.Popen[str]) -> None:
        """Wait until the run is in one of these states, or its command has ended."""

        def there() -> bool:
            record = self.record()
            return command.poll() is not None or (record is not None and record.state in states)

        self.wait(there, f"state {' or '.join(states)}")

    def is_configuring(self) -> bool:
        record = self.record()
        return record is not None and record.state == "configuring"

    def interrupt(self, command: subprocess.Popen[str]) -> Ended:
        """Ctrl-C."""
        command.send_signal(signal.SIGINT)
        return self.end(command)

    # --- IM ----------------------------------------------------------------------------------

    @property
    def im_directory(self) -> Path:
        return self.state / "local" / CLOUDS.part

    def im_runs(self) -> bool:
        return imservice._daemon(self.im_directory).process() is not None

    def kill_im(self) -> None:
        """kill -9 of our own IM."""
        process = imservice._daemon(self.im_directory).process()
        if process:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            self.wait(lambda: not process.alive(), "IM's end")

    def stop_im(self) -> None:
        if self.number:
            self.kill_im()

    # --- looking -----------------------------------------------------------------------------

    def canary_in(self) -> list[str]:
        """Files with the canary: of this lab, and what was rendered. The fake's own log counts; a
        foreign IM keeps in its database what it was sent, and nobody but its owner can wipe it."""
        hits = [
            path
            for path in self._files()
            if FOREIGN_IM not in path.parts and testenv.CANARY.encode() in path.read_bytes()
        ]
        said = ["what commands said"] if testenv.CANARY in self.said else []
        return [str(path) for path in hits] + said

    def _files(self) -> Iterator[Path]:
        for directory in (self.directory, ROOT / "build"):
            for path in directory.rglob("*"):
                with contextlib.suppress(OSError):
                    if path.is_file():
                        yield path

    @staticmethod
    def wait(what: Callable[[], bool], whose: str, patience_s: float = 600) -> None:
        deadline = time.monotonic() + patience_s
        while not what():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{whose}: not within {patience_s:.0f} s")
            time.sleep(0.2)
