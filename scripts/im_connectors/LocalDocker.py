# Copyright (C) 2026 Mayfly developers
# SPDX-License-Identifier: GPL-3.0-or-later
#
# This program is free software: you can redistribute it and/or modify it under the terms of the GNU
# General Public License as published by the Free Software Foundation, either version 3 of the
# License, or (at your option) any later version. It is distributed WITHOUT ANY WARRANTY; see the
# GNU General Public License, https://www.gnu.org/licenses/, for details.
"""IM connector `LocalDocker`: containers on this machine's Docker Engine as nodes.

The engine is reached through its Unix socket, so it publishes nothing; nodes are reached at their
addresses on its bridges. Images are taken as they are, never pulled.
"""

from __future__ import annotations

import io
import json
import os
import socket
import tarfile
import uuid
from http import HTTPStatus
from pathlib import Path

import requests
from docker.transport import UnixHTTPAdapter
from IM.config import Config
from IM.connectors.Docker import DockerCloudConnector
from IM.connectors.exceptions import NoAuthData
from IM.SSH import SSH
from IM.VirtualMachine import VirtualMachine
from radl.radl import Feature

USER = "root"
KEY = "disk.0.os.credentials.private_key"
SSH_SECONDS = 2
DEVICES = "mayfly.devices"  # the label of an image whose nodes need devices
# One bit each, in order: include/uapi/linux/capability.h.
CAPABILITIES = [
    "CHOWN", "DAC_OVERRIDE", "DAC_READ_SEARCH", "FOWNER", "FSETID", "KILL", "SETGID",
    "SETUID", "SETPCAP", "LINUX_IMMUTABLE", "NET_BIND_SERVICE", "NET_BROADCAST", "NET_ADMIN",
    "NET_RAW", "IPC_LOCK", "IPC_OWNER", "SYS_MODULE", "SYS_RAWIO", "SYS_CHROOT", "SYS_PTRACE",
    "SYS_PACCT", "SYS_ADMIN", "SYS_BOOT", "SYS_NICE", "SYS_RESOURCE", "SYS_TIME",
    "SYS_TTY_CONFIG", "MKNOD", "LEASE", "AUDIT_WRITE", "AUDIT_CONTROL", "SETFCAP",
    "MAC_OVERRIDE", "MAC_ADMIN", "SYSLOG", "WAKE_ALARM", "BLOCK_SUSPEND", "AUDIT_READ",
    "PERFMON", "BPF", "CHECKPOINT_RESTORE",
]  # fmt: skip


class LocalDockerCloudConnector(DockerCloudConnector):
    """Launches, watches and removes containers that run systemd and sshd."""

    type = "LocalDocker"

    def create_request(self, method, url, auth_data, headers=None, body=None):
        """Ask the engine; `host = unix://localhost/PATH` in the auth line names its socket."""
        if not auth_data.getAuthInfo(self.type):
            raise NoAuthData(self.type)
        with requests.Session() as session:
            session.trust_env = False
            session.mount("http+docker://", UnixHTTPAdapter(f"http+unix://{self.cloud.path}"))
            headers = headers or {"Content-Type": "application/json"}
            return session.request(
                method, f"http+docker://localhost{url}", headers=headers, data=body, timeout=120
            )

    def concrete_system(self, radl_system, str_url, auth_data):
        """Accept docker:// images; credentials are made at launch."""
        system = super().concrete_system(radl_system, str_url, auth_data)
        if system is not None:
            system.delValue("disk.0.os.credentials.password")
        return system

    def launch(self, inf, radl, requested_radl, num_vm, auth_data):
        """Start `num_vm` nodes; each is (True, VM), or (False, why it could not be started)."""
        system = radl.systems[0]
        with inf._lock:
            self._create_networks(inf, radl, auth_data)
            self._create_labelled_volumes(inf, system, auth_data)
            public_key, private_key = self._keys(inf)
        launched = []
        for _ in range(num_vm):
            vm = VirtualMachine(inf, None, self.cloud, radl, requested_radl, self)
            vm.destroy = True
            inf.add_vm(vm)
            try:
                vm.id = self._run(vm, public_key, auth_data)
            except Exception as error:
                self.log_exception("Error launching a container")
                launched.append((False, str(error)))
                continue
            values = vm.info.systems[0]
            values.setValue("instance_id", vm.id)
            values.setValue("disk.0.os.credentials.username", USER)
            values.addFeature(Feature(KEY, "=", private_key), conflict="other", missing="other")
            vm.destroy = False
            launched.append((True, vm))
        return launched

    def updateVMInfo(self, vm, auth_data):
        """Tell IM the node's state: running when sshd answers, as IM then waits 10 s for it."""
        known_to_run = vm.state == VirtualMachine.RUNNING
        ok, result = super().updateVMInfo(vm, auth_data)
        if ok and vm.state == VirtualMachine.RUNNING and not known_to_run and not has_ssh(vm):
            vm.state = VirtualMachine.PENDING
        return ok, result

    def setIPs(self, vm, cont_info, auth_data):
        """Tell IM the node's addresses: the platform's network is the public one."""
        outside = self._public_network(auth_data)
        public, private = [], []
        for name, network in cont_info["NetworkSettings"]["Networks"].items():
            if network["IPAddress"]:
                (public if name == outside else private).append(str(network["IPAddress"]))
        vm.setIps(public, private)

    def stop(self, vm, auth_data):
        """Kill the node when it is being destroyed: it has nothing to save."""
        return self.cont_action(vm, "kill" if vm.destroy or vm.inf.deleted else "stop", auth_data)

    def finalize(self, vm, last, auth_data):
        """Remove the node, and the infrastructure's networks with the last one."""
        if vm.id:
            answer = self.create_request("DELETE", f"/containers/{vm.id}?force=1&v=1", auth_data)
            if answer.status_code not in (204, 404):
                return False, f"Error removing the container: {answer.text}"
        self._delete_volumes(vm, auth_data)
        if last:
            self._delete_networks(vm, auth_data)
        return True, ""

    def _is_swarm(self, auth_data):  # noqa: ARG002
        return False

    def _labels(self, inf, auth_data):
        """How everything of one infrastructure, and of one platform, is found again."""
        platform = self._public_network(auth_data)
        return {"mayfly": "1", "mayfly.platform": platform, "im.infrastructure": str(inf.id)}

    def _public_network(self, auth_data):
        return auth_data.getAuthInfo(self.type)[0].get("network", "bridge")

    def _keys(self, inf):
        """The infrastructure's key pair: the one of its nodes, or a new one."""
        if not hasattr(inf, "local_docker_keys"):
            inf.local_docker_keys = SSH.keygen()
        return inf.local_docker_keys

    def _create_networks(self, inf, radl, auth_data):
        for net in radl.networks:
            if net.isPublic() or radl.systems[0].getNumNetworkWithConnection(net.id) is None:
                continue
            name = net.getValue("provider_id") or f"im_{inf.id}_{net.id}"
            net.setValue("provider_id", name)
            found = self.create_request("GET", f"/networks/{name}", auth_data)
            if found.status_code == HTTPStatus.NOT_FOUND:
                body = {
                    "Name": name,
                    "CheckDuplicate": True,
                    "Labels": self._labels(inf, auth_data),
                }
                self._expect(201, "POST", "/networks/create", auth_data, json.dumps(body))

    def _create_labelled_volumes(self, inf, system, auth_data):
        """A volume for each further disk; IM's own code removes those marked `created`."""
        number = 1
        while system.getValue(f"disk.{number}.mount_path"):
            if not system.getValue(f"disk.{number}.device"):
                name = f"im_{inf.id}_{uuid.uuid4().hex[:8]}"
                body = json.dumps({"Name": name, "Labels": self._labels(inf, auth_data)})
                self._expect(201, "POST", "/volumes/create", auth_data, body)
                system.setValue(f"disk.{number}.device", name)
                system.setValue(f"disk.{number}.created", "yes")
            number += 1

    def _delete_networks(self, vm, auth_data):
        filters = json.dumps({"label": [f"im.infrastructure={vm.inf.id}"]})
        found = self.create_request("GET", f"/networks?filters={filters}", auth_data).json()
        for network in found:
            answer = self.create_request("DELETE", f"/networks/{network['Id']}", auth_data)
            if answer.status_code not in (204, 404):
                self.log_error(f"Error deleting the network {network['Name']}: {answer.text}")

    def _run(self, vm, public_key, auth_data):
        """Create and start one container; returns its id. Leaves nothing behind when it fails."""
        first, *others = self._endpoints(vm, auth_data).items()
        mounts = self._generate_mounts(vm.info.systems[0])
        body = container(vm, mounts, first, self._labels(vm.inf, auth_data))
        described = self._expect(200, "GET", f"/images/{body['Image']}/json", auth_data).json()
        body["HostConfig"]["Devices"] = devices((described.get("Config") or {}).get("Labels"))
        name = f"im-{str(vm.inf.id)[:8]}-{body['Hostname']}-{vm.im_id}"
        create = f"/containers/create?name={name}"
        node = self._expect(201, "POST", create, auth_data, json.dumps(body)).json()["Id"]
        url = f"/containers/{node}"
        try:
            for network, endpoint in others:
                wish = json.dumps({"Container": node, "EndpointConfig": endpoint})
                self._expect(200, "POST", f"/networks/{network}/connect", auth_data, wish)
            key = key_archive(public_key)
            self._expect(200, "PUT", f"{url}/archive?path=/root", auth_data, key)
            self._expect(204, "POST", f"{url}/start", auth_data)
        except Exception:
            self.create_request("DELETE", f"{url}?force=1&v=1", auth_data)
            raise
        return node

    def _expect(self, status, method, url, auth_data, body=None):
        kind = "application/x-tar" if isinstance(body, bytes) else "application/json"
        answer = self.create_request(method, url, auth_data, {"Content-Type": kind}, body)
        if answer.status_code != status:
            raise RuntimeError(f"Docker Engine: {method} {url}: {answer.text}")
        return answer

    def _endpoints(self, vm, auth_data):
        """The node's networks by name, the private ones first, with the names it has in each."""
        system = vm.info.systems[0]
        endpoints = {}
        for net_id in system.getNetworkIDs():
            net = vm.info.get_network_by_id(net_id)
            if not net.isPublic():
                host, domain = requested_name(vm, system.getNumNetworkWithConnection(net_id))
                endpoints[net.getValue("provider_id")] = {"Aliases": [host, f"{host}.{domain}"]}
        if vm.hasPublicNet() or not endpoints:
            endpoints[self._public_network(auth_data)] = {}
        return endpoints


def container(vm, mounts, first, labels):
    """The engine's description of a node (Engine API, ContainerCreate): systemd is its PID 1."""
    system = vm.info.systems[0]
    name, domain = requested_name(vm, 0)
    network, endpoint = first
    return {
        "Image": system.getValue("disk.0.image.url")[len("docker://") :],
        "Hostname": name,
        "Domainname": domain,
        "Labels": labels | {"im.vm": str(vm.im_id)},
        "NetworkingConfig": {"EndpointsConfig": {network: endpoint}},
        "HostConfig": {
            "NetworkMode": network,
            "Memory": int(system.getFeature("memory.size").getValue("B")),
            "NanoCpus": nano_cpus(system.getValue("cpu.count"), os.cpu_count()),
            "CapAdd": ["ALL"],
            "CapDrop": missing_capabilities(Path("/proc/self/status").read_text()),
            "SecurityOpt": ["seccomp=unconfined", "apparmor=unconfined"],
            "Tmpfs": {"/run": "exec", "/run/lock": ""},
            "Mounts": mounts,
            **control_groups(Path("/sys/fs/cgroup/cgroup.controllers").exists()),
        },
    }


def devices(labels):
    """The devices of this machine that an image's label asks for, as `/dev/fuse`, with commas."""
    paths = (labels or {}).get(DEVICES, "").split(",")
    return [
        {"PathOnHost": path, "PathInContainer": path, "CgroupPermissions": "rwm"}
        for path in paths
        if path
    ]


def control_groups(version_2):
    """What systemd needs of the host's control groups.

    Version 1: the hierarchies, read-only, where Docker makes the container's own part of
    name=systemd writable. Version 2: a name space of its own, whose root the image's first program
    makes writable; to mount the host's tree would let a node write to all of it.
    """
    if version_2:
        return {"CgroupnsMode": "private"}
    return {"Binds": ["/sys/fs/cgroup:/sys/fs/cgroup:ro"], "CgroupnsMode": "host"}


def nano_cpus(wanted, present):
    """The limit in billionths of a CPU; none (0) when this machine has not that many."""
    return int(wanted) * 10**9 if wanted and int(wanted) <= present else 0


def missing_capabilities(status):
    """Capabilities that this machine cannot give: not in the bounding set of /proc/<pid>/status."""
    line = next(line for line in status.splitlines() if line.startswith("CapBnd:"))
    mask = int(line.split()[1], 16)
    return [name for bit, name in enumerate(CAPABILITIES) if not mask >> bit & 1]


def has_ssh(vm):
    """Whether an SSH server answers on the node."""
    address = vm.getPublicIP() or vm.getPrivateIP()
    if not address:
        return False
    try:
        with socket.create_connection((address, 22), timeout=SSH_SECONDS) as connection:
            return connection.recv(4) == b"SSH-"
    except OSError:
        return False


def key_archive(public_key):
    """A tar archive to be unpacked in /root, with the key that may log in."""
    text = public_key.strip().encode() + b"\n"
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        directory = tarfile.TarInfo(".ssh")
        directory.type, directory.mode = tarfile.DIRTYPE, 0o700
        archive.addfile(directory)
        file = tarfile.TarInfo(".ssh/authorized_keys")
        file.size, file.mode = len(text), 0o600
        archive.addfile(file, io.BytesIO(text))
    return buffer.getvalue()


def requested_name(vm, interface):
    """Host name and domain that the RADL asks for on one of the node's interfaces."""
    return vm.getRequestedNameIface(
        interface, default_hostname=Config.DEFAULT_VM_NAME, default_domain=Config.DEFAULT_DOMAIN
    )
