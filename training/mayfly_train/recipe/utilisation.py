"""What a node is busy with: cores, memory and GPUs, as one line of JSON for each sample."""

from __future__ import annotations

import csv
import shutil
import subprocess
import time
from typing import Any

import psutil

_ASKED = ("index", "utilization.gpu", "memory.used", "memory.total")
_TIMEOUT_S = 4.0


def sample() -> dict[str, Any]:
    """CPU in percent of all cores since the last sample, memory and disk in bytes, and GPUs."""
    memory, disk = psutil.virtual_memory(), psutil.disk_usage("/")
    return {
        "time": round(time.time(), 3),
        "cpu_percent": psutil.cpu_percent(),
        "load": round(psutil.getloadavg()[0], 2),
        "memory_bytes": memory.total - memory.available,
        "memory_total_bytes": memory.total,
        "disk_bytes": disk.used,
        "disk_total_bytes": disk.total,
        "gpus": gpus(),
    }


def gpus() -> list[dict[str, float]]:
    """What the driver says of each GPU; nothing where there is none, or it does not answer."""
    if not shutil.which("nvidia-smi"):
        return []
    words = ["nvidia-smi", f"--query-gpu={','.join(_ASKED)}", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(words, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return read_gpus(said.stdout)


def read_gpus(text: str) -> list[dict[str, float]]:
    """The GPUs in the answer of nvidia-smi, whose memory is in MiB; a line that has no numbers
    (`[N/A]`) is left out."""
    found = []
    for row in csv.reader(text.splitlines()):
        try:
            index, percent, used, total = (float(each) for each in row)
        except ValueError:
            continue
        found.append(
            {
                "index": int(index),
                "percent": percent,
                "memory_bytes": int(used) << 20,
                "memory_total_bytes": int(total) << 20,
            }
        )
    return found
