"""Peak memory of each HDFS daemon, the IM service and the `mayfly` process during one main job.

Usage: memory.py [FLAG...], flags of `mayfly deploy`. JSON on standard output; exit code 1 when the
job failed or something took more than its limit. The kernel keeps each process's peak (VmHWM), so
looking once a second loses only what happens in a process's last second. The IM service and the
engine may have run before: their peaks are of their whole life.
Needs the environment of tests/testenv.py.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from kept import ROOT, machine, note, say, testenv
from processes import HDFS, command_line, memory_mib, pids, services

LIMITS_MIB = {"NameNode": 256, "DataNode": 256, "im": 400, "mayfly": 200}
COMMAND = ("deploy", "--cloud", "local", "--ps", "1", "--workers", "2", "--json")
INTERVAL_S = 1.0


def main() -> int:
    """Run the job and watch; 1 when it failed or a limit was passed."""
    before = machine()
    command = [str(ROOT / ".venv/bin/mayfly"), *COMMAND, *sys.argv[1:]]
    known = set(pids())
    job = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=testenv.environment())
    peaks: dict[tuple[str, int], float] = {}
    while job.poll() is None:
        look(job.pid, known, peaks)
        time.sleep(INTERVAL_S)
    document = summary(peaks)
    say({"exit_code": job.returncode, **document}, before)
    for line in document["above"]:
        note(line)
    return 1 if job.returncode or document["above"] else 0


def look(job: int, known: set[int], peaks: dict[tuple[str, int], float]) -> None:
    """Take the peaks of what is watched; HDFS daemons that were there before are not this job's."""
    watched = [*services().items(), ("mayfly", job)]
    watched += [(kind, pid) for pid in pids() if pid not in known and (kind := daemon(pid))]
    for key in watched:
        peaks[key] = max(peaks.get(key, 0.0), memory_mib(key[1], "VmHWM"))


def daemon(pid: int) -> str:
    """NameNode or DataNode, empty for anything else; the shell that starts one is not it."""
    found = HDFS.search(command_line(pid))
    is_java = Path(_executable(pid)).name == "java"
    return found[1] if found and is_java else ""


def _executable(pid: int) -> str:
    try:
        return str(Path(f"/proc/{pid}/exe").readlink())
    except OSError:
        return ""


def summary(peaks: dict[tuple[str, int], float]) -> dict[str, Any]:
    """Peaks in MiB, the largest first for each kind, and what is above its limit."""
    kinds = sorted({name for name, _ in peaks})
    found = {
        kind: sorted((round(m) for (name, _), m in peaks.items() if name == kind), reverse=True)
        for kind in kinds
    }
    above = [
        f"{kind}: {found[kind][0]} MiB, above its limit of {limit} MiB"
        for kind, limit in LIMITS_MIB.items()
        if found.get(kind) and found[kind][0] > limit
    ]
    missing = [f"{kind}: none was seen" for kind in LIMITS_MIB if not found.get(kind)]
    return {"peak_mib": found, "limits_mib": LIMITS_MIB, "above": above + missing}


if __name__ == "__main__":
    sys.exit(main())
