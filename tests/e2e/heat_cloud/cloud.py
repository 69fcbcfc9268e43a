"""Makes what a template asks for of containers: a network with its CIDR, a server for each
OS::Nova::Server that runs its own user data under systemd, and waits for its wait conditions."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any

from heat_cloud.hot import Hot
from heat_cloud.signals import Signals
from mayfly.errors import RemoteError
from mayfly.local.docker import Docker

LABEL = "mayfly.heat"
USER_DATA = "/var/lib/cloud/instance/user-data.txt"
KINDS = {
    "OS::Neutron::Net", "OS::Neutron::Subnet", "OS::Neutron::Router", "OS::Neutron::Port",
    "OS::Neutron::RouterInterface", "OS::Neutron::SecurityGroup", "OS::Neutron::FloatingIP",
    "OS::Heat::Value", "OS::Heat::WaitConditionHandle", "OS::Heat::WaitCondition",
    "OS::Nova::Server",
}  # fmt: skip


@dataclass
class Stack:
    """One stack on an engine; `delete` removes all of it."""

    docker: Docker
    image: str
    name: str
    text: str
    parameters: Mapping[str, Any]
    labels: tuple[str, ...] = ()
    absent: frozenset[str] = frozenset()  # servers that never come up
    started: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.hot = Hot.parse(
            self.text,
            self.parameters,
            self.name,
            reference=lambda resource: f"{self.name}-{resource}",
            attribute=self.attribute,
        )
        self.resources: dict[str, Any] = self.hot.template["resources"]
        unknown = {r["type"] for r in self.resources.values()} - KINDS
        assert not unknown, f"not in the subset: {unknown}"
        self.signals: Signals | None = None

    def create(self) -> None:
        """Make everything but wait for nothing: what depends on another comes after it."""
        for name in self.in_order():
            kind = self.resources[name]["type"]
            if kind == "OS::Neutron::Subnet":
                self._make_network(self.properties(name))
            elif kind == "OS::Nova::Server" and name not in self.absent:
                self._make_server(name)

    def in_order(self) -> Iterator[str]:
        done: set[str] = set()
        while len(done) < len(self.resources):
            for name, resource in self.resources.items():
                if name not in done and set(needs(resource, self.resources)) <= done:
                    done.add(name)
                    yield name

    def properties(self, name: str) -> dict[str, Any]:
        return self.hot.resolve(self.resources[name].get("properties", {}))

    def attribute(self, resource: str, name: str) -> Any:
        kind = self.resources[resource]["type"]
        if kind == "OS::Heat::Value":
            return self.properties(resource)["value"]
        assert (kind, name) == ("OS::Heat::WaitConditionHandle", "curl_cli")
        assert self.signals is not None
        return self.signals.curl_cli(resource)

    def wait(self, limit_s: float, grace_s: float = 60) -> tuple[str, dict[str, str]]:
        """CREATE_COMPLETE or CREATE_FAILED, and each node's reason.

        Heat fails a stack with its first failure; here the others get `grace_s` more to say theirs.
        """
        handles = {}
        limit = limit_s
        for name, resource in self.resources.items():
            if resource["type"] == "OS::Heat::WaitCondition":
                condition = self.properties(name)
                handles[name.rpartition("_")[0]] = condition["handle"].removeprefix(f"{self.name}-")
                limit = min(limit, condition["timeout"])
        end = time.monotonic() + limit
        while True:
            first = {node: self._first_signal(handle) for node, handle in handles.items()}
            if any(signal["status"] == "FAILURE" for signal in first.values()):
                end = min(end, time.monotonic() + grace_s)
                grace_s = float("inf")
            if all(signal["status"] for signal in first.values()) or time.monotonic() > end:
                break
            time.sleep(0.5)
        complete = all(signal["status"] == "SUCCESS" for signal in first.values())
        reasons = {node: signal["reason"] for node, signal in first.items()}
        return "CREATE_COMPLETE" if complete else "CREATE_FAILED", reasons

    def _first_signal(self, handle: str) -> dict[str, Any]:
        received = self.signals.received.get(handle) if self.signals else None
        return received[0] if received else {"status": "", "reason": "no signal"}

    def running(self) -> list[str]:
        """The servers that are on."""
        states = {name: self._inspect(name)["State"]["Status"] for name in self.started}
        return [name for name, state in states.items() if state == "running"]

    def wait_until_off(self, limit_s: float) -> list[str]:
        """The servers that are still on after the limit."""
        end = time.monotonic() + limit_s
        while self.running() and time.monotonic() < end:
            time.sleep(0.5)
        return self.running()

    def on(self, server: str, *command: str) -> str:
        """Run a command on a server; its output, also when it fails."""
        try:
            return self.docker("exec", self.container(server), *command)
        except RemoteError as error:
            return str(error)

    def read(self, server: str, path: str) -> str:
        """A file of a server, whether it is on or off."""
        with tempfile.TemporaryDirectory() as directory:
            target = Path(directory, "file")
            try:
                self.docker("cp", f"{self.container(server)}:{path}", str(target))
            except RemoteError as error:
                return str(error)
            return target.read_text(errors="replace")

    def delete(self) -> None:
        containers = self.docker.lines("ps", "-aq", "--filter", f"label={LABEL}={self.name}")
        if containers:
            self.docker("rm", "-f", "-v", *containers)
        if self.signals is not None:
            self.signals.close()
        if self.docker.inspect_network(self.name):
            self.docker("network", "rm", self.name)

    def container(self, server: str) -> str:
        return f"{self.name}-{server}"

    def _make_network(self, subnet: dict[str, Any]) -> None:
        """The host has the gateway's address, so signals and the repository are there."""
        gateway = str(IPv4Network(subnet["cidr"])[1])
        wanted = ["--subnet", subnet["cidr"], "--gateway", gateway]
        self.docker("network", "create", *wanted, *self._labels(), self.name)
        self.signals = Signals(gateway)

    def _make_server(self, name: str) -> None:
        properties = self.properties(name)
        (network,) = properties["networks"]
        address = []
        if "port" in network:
            port = self.properties(network["port"].removeprefix(f"{self.name}-"))
            (fixed,) = port["fixed_ips"]
            address = ["--ip", fixed["ip_address"]]
        assert properties["user_data_format"] == "RAW"
        container = self.container(name)
        options = ["--name", container, "--hostname", properties["name"], "--network", self.name]
        self.docker("create", *options, *address, *self._labels(), *machine(), self.image)
        self.docker("start", container)
        self._run_user_data(container, properties["user_data"])
        self.started[name] = time.monotonic()

    def _run_user_data(self, container: str, text: str) -> None:
        """As cloud-init does: once, as root, when the system is up."""
        wait = "until systemctl is-system-running 2>/dev/null | grep -qE 'running|degraded'"
        self.docker("exec", container, "timeout", "60", "bash", "-c", f"{wait}; do sleep 0.2; done")
        with tempfile.NamedTemporaryFile("w") as file:
            file.write(text)
            file.flush()
            self.docker("exec", container, "mkdir", "-p", str(Path(USER_DATA).parent))
            self.docker("cp", file.name, f"{container}:{USER_DATA}")
        self.docker("exec", container, "bash", USER_DATA)

    def _inspect(self, server: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.docker("inspect", self.container(server)))[0]
        return found

    def _labels(self) -> list[str]:
        labels = (f"{LABEL}={self.name}", *self.labels)
        return [word for label in labels for word in ("--label", label)]


def needs(resource: dict[str, Any], known: Mapping[str, Any]) -> set[str]:
    """The resources that this one names."""
    found = set(resource.get("depends_on", []))

    def walk(value: Any) -> None:
        if isinstance(value, list):
            for item in value:
                walk(item)
        elif isinstance(value, dict):
            for key, item in value.items():
                if key == "get_resource":
                    found.add(item)
                elif key == "get_attr":
                    found.add(item[0])
                else:
                    walk(item)

    walk(resource.get("properties", {}))
    return found & set(known)


def machine() -> list[str]:
    """What the node image's systemd needs (as in tests/molecule/create.yml), and to power off."""
    options = ["--security-opt", "seccomp=unconfined", "--security-opt", "apparmor=unconfined"]
    options += ["--tmpfs", "/run:exec", "--tmpfs", "/run/lock"]
    options += ["--cap-add", "SYS_ADMIN", "--cap-add", "SYS_BOOT"]
    if Path("/sys/fs/cgroup/cgroup.controllers").exists():
        return [*options, "--cgroupns", "private"]
    return [*options, "--cgroupns", "host", "-v", "/sys/fs/cgroup:/sys/fs/cgroup:ro"]
