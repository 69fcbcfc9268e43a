"""The Docker Engine of the local platform: one that answers already, or one of our own.

Our own keeps its state in the platform's directory and has its own socket, bridge, address pool and
containerd name space. It writes no firewall rules: the engine's start would flush the chains of any
other engine on the machine, and its end leaves its own behind. The few rules that nodes need are
set here, marked by a comment, and taken away again.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any

from mayfly.errors import MayflyError, UserError
from mayfly.local import host
from mayfly.local.daemons import Daemon, plain_environ
from mayfly.local.docker import OURS, Docker, socket_path
from mayfly.local.host import Progress
from mayfly.local.paths import Paths

DEFAULT_SOCKET = "unix:///var/run/docker.sock"
PACKAGES = ("docker.io", "iptables", "iproute2")
START_SECONDS = 60
STOP_SECONDS = 30


@dataclass(frozen=True)
class Engine:
    """A Docker Engine in use: `own` is one that we started and may end."""

    docker: Docker
    own: bool
    reused: bool


def up(paths: Paths, progress: Progress, environ: Mapping[str, str] = os.environ) -> Engine:
    """Return an engine that answers, starting our own when there is none.

    Raises UserError that says what is missing when none can be started here.
    """
    own = OwnEngine(paths)
    if own.answers():
        own.set_rules()
        return Engine(own.docker, own=True, reused=True)
    # Networks and images of before are in the engine that we had: it is started again.
    found = None if own.config.exists() else find_running(environ)
    if found:
        return Engine(found, own=False, reused=True)
    own.start(progress)
    return Engine(own.docker, own=True, reused=False)


def check(paths: Paths, environ: Mapping[str, str] = os.environ) -> str:
    """What `up` would use, in words; nothing is started. Raises UserError as `up` would."""
    own = OwnEngine(paths)
    if own.answers():
        return f"our own answers at {own.docker.host}"
    found = None if own.config.exists() else find_running(environ)
    if found:
        return f"answers at {found.host}"
    _require_root()
    return "none answers: our own will be started"


def find_running(environ: Mapping[str, str] = os.environ) -> Docker | None:
    """The engine at DOCKER_HOST, or at the default socket; None when nothing answers at the latter.

    Raises UserError when DOCKER_HOST names one that is not here or does not answer, or when the
    user may not talk to the one that is here.
    """
    given = environ.get("DOCKER_HOST")
    docker = Docker(given or DEFAULT_SOCKET)
    if not docker.host.startswith("unix://"):
        raise UserError(
            f"DOCKER_HOST is not on this machine: {given}",
            "nodes are reached over this machine's bridges: unset it, or give unix://PATH",
        )
    socket_file = socket_path(docker.host)
    if socket_file.exists() and not os.access(socket_file, os.W_OK):
        raise UserError(
            f"the Docker Engine at {docker.host} does not let you in",
            "run as root, or become a member of the group docker",
        )
    if socket_file.exists() and shutil.which("docker") and docker.answers():
        return docker
    if given:
        raise UserError(f"no Docker Engine answers at DOCKER_HOST {given}", "start it, or unset it")
    return None


class OwnEngine:
    """The engine that belongs to one state directory."""

    def __init__(self, paths: Paths) -> None:
        self.paths = paths
        self.directory = paths.state / "docker"
        self.config = self.directory / "daemon.json"
        self.docker = Docker(f"unix://{paths.run}/docker.sock")
        self.bridge = f"mayfly-{paths.id}"  # 15 bytes: the longest name an interface may have
        self.daemon = Daemon("dockerd", self.directory)

    def answers(self) -> bool:
        return self.daemon.process() is not None and self.docker.answers()

    def start(self, progress: Progress) -> None:
        """Install what is missing, start dockerd and wait for its answer."""
        _require_root()
        if not all(map(shutil.which, ("dockerd", "docker", "iptables", "ip"))):
            host.install_packages(PACKAGES, "running nodes on this machine", progress)
        progress("starting a Docker Engine")
        self.daemon.stop()
        self.paths.of("docker")
        self.paths.run.mkdir(mode=0o700, exist_ok=True)
        pool = self._pool()
        self._require_kernel()
        self._make_bridge(pool)
        self.config.write_text(json.dumps(self._settings(pool), indent=2))
        self.set_rules()
        command = ["dockerd", "--config-file", str(self.config)]
        self.daemon.start(command, plain_environ(os.environ))
        self.daemon.wait(self.docker.answers, START_SECONDS)

    def stop(self) -> list[str]:
        """End the engine and remove all it had. Returns what was removed, in words."""
        if not self.config.exists():
            return []
        removed = ["Docker Engine"]
        if self.answers():
            containers = self.docker.lines("ps", "-aq", "--no-trunc")
            if containers:
                self.docker.remove(containers)
                removed.append(f"{len(containers)} containers in it")
        self.daemon.stop(STOP_SECONDS)
        _unmount_below(self.directory, self.paths.run)
        _quietly("ip", "link", "delete", self.bridge)
        self._remove_docker_bridges()
        self._drop_rules()
        shutil.rmtree(self.directory)
        shutil.rmtree(self.paths.run, ignore_errors=True)
        return removed

    def _pool(self) -> IPv4Network:
        """The addresses of this engine's networks; the same again after a restart."""
        if self.config.exists():
            pools = json.loads(self.config.read_text())["default-address-pools"]
            return IPv4Network(pools[0]["base"]).supernet(new_prefix=16)
        return host.choose_pool(host.used_networks(Path("/proc/net/route").read_text()))

    def _settings(self, pool: IPv4Network) -> dict[str, Any]:
        # The bridge has the upper end of the pool, so the lower half is free for networks.
        settings: dict[str, Any] = {
            "data-root": str(self.directory / "data"),
            "exec-root": str(self.paths.run / "exec"),
            "pidfile": str(self.paths.run / "dockerd.pid"),
            "hosts": [self.docker.host],
            "bridge": self.bridge,
            "iptables": False,
            "default-address-pools": [{"base": str(next(pool.subnets())), "size": 24}],
            "containerd-namespace": f"mayfly-{self.paths.id}",
            "containerd-plugins-namespace": f"mayfly-{self.paths.id}-plugins",
            "log-opts": {"max-size": "10m"},
        }
        if host.missing_capabilities(Path("/proc/self/status").read_text()):
            # `docker run --privileged`, which test tools use, asks for all capabilities at once.
            runtime = Path(__file__).with_name("oci_runtime.py")
            settings["runtimes"] = {"mayfly": {"path": str(self._runtime(runtime))}}
            settings["default-runtime"] = "mayfly"
        return settings

    def _runtime(self, script: Path) -> Path:
        path = self.directory / "mayfly-runc"
        path.write_text(f'#!/bin/sh\nexec {sys.executable} {script} "$@"\n')
        path.chmod(0o755)
        return path

    def _require_kernel(self) -> None:
        """Raise UserError that names every thing that this kernel does not let us do."""
        missing = []
        with contextlib.suppress(OSError, MayflyError):
            host.run(["modprobe", "overlay"])
        if "\toverlay\n" not in Path("/proc/filesystems").read_text():
            missing.append("overlayfs")
        if _fails("iptables", "-w", "-t", "nat", "-S", "POSTROUTING"):
            missing.append("iptables with a nat table")
        if _fails("ip", "link", "show", self.bridge):
            if _fails("ip", "link", "add", self.bridge, "type", "bridge"):
                missing.append("permission to make a network bridge")
            else:
                _quietly("ip", "link", "delete", self.bridge)
        if missing:
            raise UserError(
                f"no Docker Engine answers, and none can run here: no {', no '.join(missing)}",
                "use a machine or a container with these, or set DOCKER_HOST to an engine",
            )

    def _make_bridge(self, pool: IPv4Network) -> None:
        if _fails("ip", "link", "show", self.bridge):
            host.run(["ip", "link", "add", self.bridge, "type", "bridge"])
            host.run(["ip", "addr", "add", f"{pool[255 * 256 + 1]}/24", "dev", self.bridge])
        host.run(["ip", "link", "set", self.bridge, "up"])

    def set_rules(self) -> None:
        """Let the nodes out through this machine's address, as docker's own rules would."""
        for rule in self._rules(self._pool()):
            if _fails("iptables", "-w", *rule("-C")):
                host.run(["iptables", "-w", *rule("-I")])

    def _drop_rules(self) -> None:
        for table in ("nat", "filter"):
            listed = host.run(["iptables", "-w", "-t", table, "-S"]).stdout.splitlines()
            for line in listed:
                if f"--comment {self.bridge}" in line.replace('"', ""):
                    rule = line.replace('"', "").split()
                    host.run(["iptables", "-w", "-t", table, "-D", *rule[1:]])

    def _rules(self, pool: IPv4Network) -> list[Any]:
        """Functions from -C or -I to the arguments of one rule."""
        mark = ["-m", "comment", "--comment", self.bridge]
        inside, net = str(pool), ["-s", str(pool)]
        return [
            lambda do: [
                "-t",
                "nat",
                do,
                "POSTROUTING",
                *net,
                "!",
                "-d",
                inside,
                *mark,
                "-j",
                "MASQUERADE",
            ],
            lambda do: ["-t", "filter", do, "FORWARD", "-d", inside, *mark, "-j", "ACCEPT"],
            lambda do: ["-t", "filter", do, "FORWARD", *net, *mark, "-j", "ACCEPT"],
        ]

    def _remove_docker_bridges(self) -> None:
        """Docker leaves the bridges of its networks behind when it ends."""
        pool = self._pool()
        for link in json.loads(host.run(["ip", "-j", "addr", "show", "type", "bridge"]).stdout):
            addresses = [
                item["local"] for item in link.get("addr_info", []) if item["family"] == "inet"
            ]
            if any(IPv4Network(address).subnet_of(pool) for address in addresses):
                _quietly("ip", "link", "delete", link["ifname"])


def label(paths: Paths) -> str:
    """The label on all that one platform makes in an engine; the connector sets it too."""
    return f"mayfly.platform=mayfly-{paths.id}"


def bridge_address(docker: Docker, paths: Paths) -> tuple[str, str]:
    """Name of the platform's network, made when it is missing, and this machine's address on it.

    Raises UserError when the engine's networks are not this machine's.
    """
    name = f"mayfly-{paths.id}"
    if docker.inspect_network(name) is None:
        docker("network", "create", "--label", OURS, "--label", label(paths), name)
    network = docker.inspect_network(name) or {}
    address: str = network["IPAM"]["Config"][0]["Gateway"]
    with socket.socket() as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            raise UserError(
                f"the Docker Engine at {docker.host} has its networks elsewhere",
                "it is rootless or in a virtual machine: set DOCKER_HOST to another, or stop it",
            ) from None
    return name, address


def _require_root() -> None:
    if os.geteuid() != 0:
        raise UserError(
            "no Docker Engine answers, and starting one needs root",
            "start Docker, set DOCKER_HOST, or run as root",
        )


def _unmount_below(*directories: Path) -> None:
    """Undo the mounts that an engine leaves below its directories, the last one first."""
    points = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    for point in reversed(points):
        if any(Path(point).is_relative_to(directory) for directory in directories):
            _quietly("umount", "-l", point)


def _fails(*command: str) -> bool:
    try:
        host.run(list(command))
    except (MayflyError, FileNotFoundError):
        return True
    return False


def _quietly(*command: str) -> None:
    _fails(*command)
