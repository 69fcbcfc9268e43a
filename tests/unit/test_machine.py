"""What a launcher knows of its node: the interface, GPUs, cores."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from mayfly_train.errors import NodeError
from mayfly_train.machine import (
    Machine,
    born,
    cgroup_quota,
    gpus_in,
    interface_of,
    own_address,
    usable_cores,
)

# As `ip -json -4 address` prints it.
INTERFACES = [
    {"ifname": "lo", "flags": ["LOOPBACK", "UP"], "addr_info": [{"local": "127.0.0.1"}]},
    {"ifname": "eth0", "flags": ["BROADCAST", "UP"], "addr_info": [{"local": "203.0.113.7"}]},
    {
        "ifname": "eth1",
        "flags": ["BROADCAST", "UP"],
        "addr_info": [{"local": "10.0.0.9"}, {"local": "10.0.0.2"}],
    },
    {"ifname": "wg0", "flags": ["POINTOPOINT"]},
]


def test_the_interface_is_the_one_with_our_address_towards_rank_zero() -> None:
    assert interface_of(INTERFACES, "10.0.0.2", "10.0.0.1") == "eth1"


@pytest.mark.parametrize("own", ["127.0.0.1", "192.0.2.1"])
def test_loopback_and_unknown_addresses_are_refused(own: str) -> None:
    with pytest.raises(NodeError, match=f"rank 0 is 'ps-0', which is reached from {own}"):
        interface_of(INTERFACES, own, "ps-0")


def test_the_kernel_says_what_we_talk_from() -> None:
    assert own_address("127.0.0.1") == "127.0.0.1"
    with pytest.raises(NodeError, match="no way to rank 0 at 'no such host'"):
        own_address("no such host")


def test_a_node_is_as_old_as_its_first_process(tmp_path: Path) -> None:
    ours = born(Path("/proc/self/stat"))
    assert ours is not None
    assert (born() or 0) <= ours <= time.time() + 1 / os.sysconf("SC_CLK_TCK")
    strange = tmp_path / "stat"
    ticks = int(time.clock_gettime(time.CLOCK_BOOTTIME)) * os.sysconf("SC_CLK_TCK")
    strange.write_text(f"1 (a ) b) S {' '.join(['0'] * 18)} {ticks} 0 0")
    assert time.time() - (born(strange) or 0) == pytest.approx(0, abs=60)
    strange.write_text("what?")
    assert born(strange) is None


def test_processes_are_gpus_or_one(tmp_path: Path) -> None:
    report = tmp_path / "gpu.json"
    assert gpus_in(report) == 0
    report.write_text('{"count": 4, "problem": null}')
    assert Machine("eth0", gpus_in(report), 16).processes == 4
    report.write_text('{"count": 4, "problem": "the driver does not answer"}')
    assert Machine("eth0", gpus_in(report), 16).processes == 1


def test_a_quota_bounds_the_cores(tmp_path: Path) -> None:
    assert usable_cores(8, None) == 8
    assert usable_cores(8, 1.5) == 2
    assert usable_cores(1, 4.0) == 1
    assert cgroup_quota(tmp_path) is None
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert cgroup_quota(tmp_path) is None
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert cgroup_quota(tmp_path) == 1.5
