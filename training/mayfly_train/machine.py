"""What a launcher needs to know of the node that it runs on."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from mayfly_train.errors import NodeError

GPU_REPORT = Path("/etc/mayfly/gpu.json")  # role gpu writes it
PACKAGE = Path(__file__).parent


@dataclass(frozen=True)
class Machine:
    """This node: the interface on the way to rank 0, GPUs, and cores that may be used.

    `package` is the directory of this package there, for what another Python runs by its file.
    """

    interface: str
    gpus: int
    cores: int
    package: PurePath = PACKAGE

    @property
    def processes(self) -> int:
        """Training processes: one for each GPU, one without any."""
        return max(1, self.gpus)


def look(rank_zero: str) -> Machine:
    """This node, seen from the way to rank 0's address. Raises NodeError as `interface_of` does."""
    listed = subprocess.run(
        ["ip", "-json", "-4", "address"], check=False, capture_output=True, text=True
    )
    own = own_address(rank_zero)
    return Machine(
        interface=interface_of(json.loads(listed.stdout or "[]"), own, rank_zero),
        gpus=gpus_in(GPU_REPORT),
        cores=usable_cores(len(os.sched_getaffinity(0)), cgroup_quota()),
    )


def born(process: Path = Path("/proc/1/stat")) -> float | None:
    """When this node's first process began, in seconds since 1970; None when it cannot be read.

    That is the boot of a machine and the start of a container, whose uptime is its host's. See
    proc(5) for starttime, the 22nd field; the name of the process may have blanks in it.
    """
    try:
        ticks = int(process.read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age


def own_address(target: str) -> str:
    """The address that this node talks to the target from; on the target itself, its own."""
    try:
        # Connecting a datagram socket sends nothing, and makes the kernel choose the way.
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((target, 9))
            return str(probe.getsockname()[0])
    except OSError as error:
        raise NodeError(
            f"no way to rank 0 at {target!r}: {error.strerror or error} — check the network"
        ) from None


def interface_of(interfaces: Any, own: str, rank_zero: str) -> str:
    """The name of the interface that has our address, from the output of `ip -json address`.

    Loopback is refused: the other nodes would be told an address that is their own.
    """
    for interface in interfaces:
        addresses = [item.get("local") for item in interface.get("addr_info", [])]
        if own in addresses and "LOOPBACK" not in interface.get("flags", []):
            return str(interface["ifname"])
    raise NodeError(
        f"rank 0 is {rank_zero!r}, which is reached from {own}, and no interface but loopback has "
        "that — give rank 0's address on the nodes' network, not a name that /etc/hosts maps to it"
    )


def gpus_in(report: Path) -> int:
    """GPUs that role gpu has found to work; 0 without its report."""
    try:
        found = json.loads(report.read_text(encoding="utf-8"))
        return 0 if found.get("problem") else int(found.get("count") or 0)
    except (OSError, ValueError, AttributeError):
        return 0


def usable_cores(allowed: int, quota: float | None) -> int:
    """Cores that this process may use: its CPU affinity, bounded by its control group's quota."""
    return max(1, min(allowed, math.ceil(quota))) if quota else allowed


def cgroup_quota(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """CPU quota of this container in cores, from cgroup v2 or v1; None when there is none."""
    try:
        if (root / "cpu.max").exists():
            quota, period = (root / "cpu.max").read_text().split()
        else:
            quota = (root / "cpu/cpu.cfs_quota_us").read_text()
            period = (root / "cpu/cpu.cfs_period_us").read_text()
        return int(quota) / int(period) if int(quota) > 0 else None
    except (OSError, ValueError):
        return None
