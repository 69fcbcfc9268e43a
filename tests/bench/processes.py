"""What the benches read of processes: peak memory, file descriptors, and whose they are."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from kept import testenv

PROC = Path("/proc")
STATE = Path(testenv.VARIABLES["MAYFLY_STATE_DIR"]).absolute() / "local"
# Nodes are containers on this machine, so their processes are in /proc too.
HDFS = re.compile(r"org\.apache\.hadoop\.hdfs\.server\.\w+\.(NameNode|DataNode)\b")


def command_line(pid: int) -> str:
    """A process's command line, empty when it is gone."""
    try:
        return (PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def pids() -> Iterator[int]:
    """All processes of this machine, those in containers too."""
    return (int(path.name) for path in PROC.glob("[0-9]*"))


def memory_mib(pid: int, field: str = "VmRSS") -> float:
    """Resident memory of a process in MiB, or its peak with VmHWM; 0 when it is gone."""
    try:
        text = (PROC / str(pid) / "status").read_text()
    except OSError:
        return 0.0
    found = re.search(rf"^{field}:\s+(\d+) kB", text, re.MULTILINE)
    return int(found[1]) / 1024 if found else 0.0


def descriptors(pid: int) -> int:
    """How many files a process has open."""
    try:
        return len(list((PROC / str(pid) / "fd").iterdir()))
    except OSError:
        return 0


def services() -> dict[str, int]:
    """The local platform's services: name → process."""
    words = {
        "engine": f"dockerd --config-file {STATE}",
        "s3": f"-dir={STATE}",
        "im": "im_local_service.py",
    }
    lines = {pid: command_line(pid) for pid in pids()}
    return {
        name: pid
        for name, word in words.items()
        for pid, line in lines.items()
        if word in line and _is_ours(pid, name)
    }


def _is_ours(pid: int, name: str) -> bool:
    """Another checkout's IM service has the same command line, but not our settings."""
    if name != "im":
        return True
    try:
        return str(STATE).encode() in (PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return False
