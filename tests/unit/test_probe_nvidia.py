"""The probe of role gpu, with an `nvidia-smi`, a CUDA library and PCI devices made for it."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "roles/gpu/files/probe_nvidia.py"
TWO_GPUS = "echo 535.183.01; echo 535.183.01"
MISMATCH = "Failed to initialize NVML: Driver/library version mismatch"


class FakeCuda:
    """libcuda.so.1 of a driver that serves this CUDA, or answers with this error."""

    def __init__(self, version: int, status: int = 0) -> None:
        self.version, self.status = version, status

    def cuDriverGetVersion(self, pointer: Any) -> int:
        pointer._obj.value = self.version
        return self.status


@pytest.fixture
def probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, on a machine that has only what a test gives it; CUDA 12.2 serves."""
    spec = importlib.util.spec_from_file_location("probe_nvidia", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in ("bin", "devices"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(module, "PCI_DEVICES", tmp_path / "devices")
    monkeypatch.setattr(module, "REBOOT_REQUIRED", tmp_path / "reboot-required")
    monkeypatch.setattr(module.ctypes, "CDLL", lambda name: FakeCuda(12020))
    return module


@pytest.fixture
def nvidia_smi(tmp_path: Path, probe: ModuleType):
    """Put an nvidia-smi on the path, made of these commands."""

    def make(commands: str) -> None:
        stub = tmp_path / "bin/nvidia-smi"
        stub.write_text(f"#!/bin/sh\n{commands}\n")
        stub.chmod(0o755)

    return make


def add_device(tmp_path: Path, address: str, vendor: str, kind: str) -> None:
    device = tmp_path / "devices" / address
    device.mkdir()
    (device / "vendor").write_text(f"{vendor}\n")
    (device / "class").write_text(f"{kind}\n")


def test_each_gpu_of_the_driver_counts(probe, nvidia_smi, capsys):
    nvidia_smi(TWO_GPUS)
    probe.main()
    assert json.loads(capsys.readouterr().out) == {
        "count": 2,
        "driver": "535.183.01",
        "cuda": "12.2",
        "reboot_needed": False,
        "problem": None,
    }


def test_a_module_that_is_not_the_drivers_needs_a_reboot(probe, nvidia_smi):
    nvidia_smi(f"echo '{MISMATCH}'; echo 'NVML library version: 535.183'; exit 18")
    found = probe.probe()
    assert (found["count"], found["driver"], found["reboot_needed"]) == (0, None, True)
    assert found["problem"] == f"nvidia-smi: {MISMATCH}"


def test_a_reboot_that_the_system_asks_for_is_told_beside_gpus_that_work(
    probe, nvidia_smi, tmp_path
):
    nvidia_smi(TWO_GPUS)
    (tmp_path / "reboot-required").touch()
    found = probe.probe()
    assert (found["count"], found["reboot_needed"], found["problem"]) == (2, True, None)


def no_library(name: str) -> FakeCuda:
    raise OSError(f"{name}: cannot open shared object file")


@pytest.mark.parametrize("load", [no_library, lambda name: FakeCuda(0, status=999)])
def test_a_driver_without_its_cuda_library_serves_no_gpu(probe, nvidia_smi, monkeypatch, load):
    nvidia_smi(TWO_GPUS)
    monkeypatch.setattr(probe.ctypes, "CDLL", load)
    found = probe.probe()
    assert (found["count"], found["driver"], found["cuda"]) == (0, "535.183.01", None)
    assert found["problem"] == "libcuda.so.1 does not work"
    assert found["reboot_needed"] is False


def test_an_error_without_a_word_is_told_by_its_code(probe, nvidia_smi):
    nvidia_smi("exit 9")
    assert probe.probe()["problem"] == "nvidia-smi: 9"


@pytest.mark.parametrize(
    ("vendor", "kind", "says"),
    [
        ("0x10de", "0x030200", "there is a GPU but no driver"),
        ("0x10de", "0x030000", "there is a GPU but no driver"),
        ("0x10de", "0x040300", "there is no GPU"),  # sound of such a card
        ("0x1002", "0x030000", "there is no GPU"),  # another vendor's
    ],
)
def test_without_a_driver_pci_tells_whether_there_is_a_gpu(probe, tmp_path, vendor, kind, says):
    add_device(tmp_path, "0000:00:00.0", "0x8086", "0x060000")
    add_device(tmp_path, "0000:65:00.0", vendor, kind)
    found = probe.probe()
    assert (found["count"], found["reboot_needed"]) == (0, False)
    assert found["problem"] == f"{says} (nvidia-smi not found)"


def test_a_machine_without_pci_has_no_gpu(probe, monkeypatch, tmp_path):
    monkeypatch.setattr(probe, "PCI_DEVICES", tmp_path / "absent")
    assert probe.has_hardware() is False
