"""What this machine is: capabilities, control groups, routes, programs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any

from mayfly.errors import MayflyError, UserError

Progress = Callable[[str], None]

# Bit numbers are positions: include/uapi/linux/capability.h.
CAPABILITIES = [
    "CHOWN", "DAC_OVERRIDE", "DAC_READ_SEARCH", "FOWNER", "FSETID", "KILL", "SETGID",
    "SETUID", "SETPCAP", "LINUX_IMMUTABLE", "NET_BIND_SERVICE", "NET_BROADCAST", "NET_ADMIN",
    "NET_RAW", "IPC_LOCK", "IPC_OWNER", "SYS_MODULE", "SYS_RAWIO", "SYS_CHROOT", "SYS_PTRACE",
    "SYS_PACCT", "SYS_ADMIN", "SYS_BOOT", "SYS_NICE", "SYS_RESOURCE", "SYS_TIME",
    "SYS_TTY_CONFIG", "MKNOD", "LEASE", "AUDIT_WRITE", "AUDIT_CONTROL", "SETFCAP",
    "MAC_OVERRIDE", "MAC_ADMIN", "SYSLOG", "WAKE_ALARM", "BLOCK_SUSPEND", "AUDIT_READ",
    "PERFMON", "BPF", "CHECKPOINT_RESTORE",
]  # fmt: skip


def missing_capabilities(status: str) -> list[str]:
    """The capabilities that the text of /proc/<pid>/status has not in its bounding set."""
    bounding = next(line for line in status.splitlines() if line.startswith("CapBnd:"))
    mask = int(bounding.split()[1], 16)
    return [name for bit, name in enumerate(CAPABILITIES) if not mask >> bit & 1]


def is_cgroup_v2(root: Path = Path("/sys/fs/cgroup")) -> bool:
    """Whether this machine has the unified hierarchy (cgroups(7)) and nothing else."""
    return (root / "cgroup.controllers").exists()


def used_networks(route_table: str) -> list[IPv4Network]:
    """The networks in the text of /proc/net/route, without the default route."""
    networks = []
    for row in route_table.splitlines()[1:]:
        fields = row.split()
        address, mask = (_address(field) for field in (fields[1], fields[7]))
        if mask != "0.0.0.0":
            networks.append(IPv4Network(f"{address}/{mask}", strict=False))
    return networks


def choose_pool(used: Iterable[IPv4Network]) -> IPv4Network:
    """A /16 that overlaps none of `used`; raises MayflyError when every candidate is taken."""
    taken = list(used)
    candidates = (f"10.{number}.0.0/16" for number in (*range(213, 255), *range(100, 213)))
    for candidate in map(IPv4Network, candidates):
        if not any(candidate.overlaps(network) for network in taken):
            return candidate
    raise MayflyError("no free network in 10.100.0.0-10.254.0.0 for the nodes")


def install_packages(packages: Iterable[str], why: str, progress: Progress) -> None:
    """Install Debian packages; asks first on a terminal. Raises UserError when it must not."""
    names = " ".join(packages)
    if os.geteuid() != 0:
        raise UserError(
            f"{why} needs root to install packages", f"run as root: apt install {names}"
        )
    if shutil.which("apt-get") is None:
        raise UserError(f"{why} needs the packages {names}", "install them: there is no apt here")
    if sys.stdin.isatty() and sys.stderr.isatty():
        print(f"mayfly: {why}: install {names}? [Y/n] ", end="", file=sys.stderr, flush=True)
        if sys.stdin.readline().strip().lower() not in ("", "y", "yes"):
            raise UserError(f"{why} needs the packages {names}", f"apt install {names}")
    progress(f"installing {names}")
    with _services_held_back():
        _apt("update", "-q")
        _apt("install", "-y", "-q", "--no-install-recommends", *names.split())


def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
    """Run a command and return its output; raises MayflyError with its last line when it fails."""
    result: subprocess.CompletedProcess[str] = subprocess.run(  # type: ignore[call-overload]
        command, check=False, capture_output=True, text=True, **options
    )
    if result.returncode:
        raise MayflyError(f"{command[0]} failed: {last_line(result.stdout, result.stderr)}")
    return result


def last_line(*texts: str) -> str:
    """The last line that says something, of the last text that does."""
    lines = [line.strip() for text in texts for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no output"


def _apt(*arguments: str) -> None:
    environ = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    run(["apt-get", "-o", "DPkg::Lock::Timeout=600", *arguments], env=environ)


class _services_held_back:
    """Debian starts what it installs; a docker.service that nobody asked for is not wanted.

    See policy-rc.d in Debian's invoke-rc.d(8); a policy that is already there stays.
    """

    path = Path("/usr/sbin/policy-rc.d")

    def __enter__(self) -> None:
        self.ours = not self.path.exists()
        if self.ours:
            self.path.write_text("#!/bin/sh\nexit 101\n")
            self.path.chmod(0o755)

    def __exit__(self, *_: object) -> None:
        if self.ours:
            self.path.unlink(missing_ok=True)


def _address(word: str) -> str:
    """The dotted form of an address in /proc/net/route: hexadecimal, low byte first."""
    return ".".join(str(byte) for byte in reversed(bytes.fromhex(word)))


def read_record(path: Path) -> dict[str, Any]:
    """What a JSON file of ours says; empty when it is absent or not JSON."""
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found
