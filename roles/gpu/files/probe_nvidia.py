#!/usr/bin/env python3
"""Print what NVIDIA GPUs this machine has, as one JSON object.

    {"count": 2, "driver": "535.183.01", "cuda": "12.2", "reboot_needed": false, "problem": null}

`count` is the number of GPUs that can be used now; `cuda` is the newest CUDA that the driver
serves. Where the count is 0, `problem` says why. `reboot_needed` is true when the system asks for
one, or when the loaded kernel module and the installed driver differ. Nothing is changed.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
from pathlib import Path
from typing import Any

QUERY = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
REBOOT_REQUIRED = Path("/run/reboot-required")
PCI_DEVICES = Path("/sys/bus/pci/devices")
NVIDIA_VENDOR = "0x10de"  # PCI-SIG's vendor id
DISPLAY_CLASS = "0x03"  # PCI base class: display controllers, also those without a display


def main() -> None:
    """Print the report."""
    print(json.dumps(probe()))


def probe() -> dict[str, Any]:
    """The report described above."""
    drivers, problem = ask_driver()
    cuda = None
    if drivers:
        cuda = cuda_version()
        problem = problem if cuda else "libcuda.so.1 does not work"
    return {
        "count": len(drivers) if cuda else 0,
        "driver": drivers[0] if drivers else None,
        "cuda": cuda,
        "reboot_needed": REBOOT_REQUIRED.exists() or "mismatch" in (problem or ""),
        "problem": problem,
    }


def ask_driver() -> tuple[list[str], str | None]:
    """The driver's version once for each GPU, or an empty list and the reason."""
    try:
        answer = subprocess.run(QUERY, capture_output=True, text=True, timeout=60)
    except FileNotFoundError:
        found = "there is a GPU but no driver" if has_hardware() else "there is no GPU"
        return [], f"{found} (nvidia-smi not found)"
    except subprocess.TimeoutExpired:
        return [], "nvidia-smi gave no answer within 60 s"
    if answer.returncode:
        lines = (answer.stdout + answer.stderr).strip().splitlines()
        return [], f"nvidia-smi: {lines[0] if lines else answer.returncode}"
    return answer.stdout.split(), None


def has_hardware() -> bool:
    """Whether a PCI device is a GPU of NVIDIA."""
    return any(
        (device / "vendor").read_text().strip() == NVIDIA_VENDOR
        and (device / "class").read_text().startswith(DISPLAY_CLASS)
        for device in PCI_DEVICES.glob("*")
    )


def cuda_version() -> str | None:
    """Newest CUDA of the driver as "12.2" (cuDriverGetVersion of the CUDA driver API)."""
    version = ctypes.c_int()
    try:
        status = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return None
    return f"{version.value // 1000}.{version.value % 1000 // 10}" if status == 0 else None


if __name__ == "__main__":
    main()
