"""What this machine is, read from text of /proc."""

from __future__ import annotations

from ipaddress import IPv4Network
from pathlib import Path

import pytest

from mayfly.errors import MayflyError, UserError
from mayfly.local import host

ROUTES = """\
Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT
eth0\t00000000\t010200C0\t0003\t0\t0\t0\t00000000\t0\t0\t0
docker0\t0000D50A\t00000000\t0001\t0\t0\t0\t0000FFFF\t0\t0\t0
eth0\t000200C0\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0
"""


@pytest.mark.parametrize(
    ("bounding", "missing"),
    [
        ("000001ffffffffff", []),
        ("000001fffeffffff", ["SYS_RESOURCE"]),
        ("0000003fffffffff", ["PERFMON", "BPF", "CHECKPOINT_RESTORE"]),
    ],
)
def test_capabilities_that_the_bounding_set_lacks(bounding: str, missing: list[str]) -> None:
    status = f"Name:\tx\nCapEff:\t0000000000000000\nCapBnd:\t{bounding}\nCapAmb:\t0\n"
    assert host.missing_capabilities(status) == missing


def test_used_networks_leave_out_the_default_route() -> None:
    expected = [IPv4Network("10.213.0.0/16"), IPv4Network("192.0.2.0/24")]
    assert host.used_networks(ROUTES) == expected


def test_the_pool_avoids_routes_that_overlap() -> None:
    used = [IPv4Network("10.213.0.0/16"), IPv4Network("10.214.7.0/24")]
    assert host.choose_pool(used) == IPv4Network("10.215.0.0/16")


def test_no_pool_left() -> None:
    with pytest.raises(MayflyError, match="no free network"):
        host.choose_pool([IPv4Network("10.0.0.0/8")])


def test_version_of_control_groups(tmp_path: Path) -> None:
    assert not host.is_cgroup_v2(tmp_path)
    (tmp_path / "cgroup.controllers").touch()
    assert host.is_cgroup_v2(tmp_path)


def test_a_failed_command_gives_its_last_line() -> None:
    with pytest.raises(MayflyError, match="sh failed: the cause"):
        host.run(["sh", "-c", "echo first; echo the cause >&2; exit 3"])


def test_packages_are_not_installed_without_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(UserError, match=r"needs root.*apt install docker\.io"):
        host.install_packages(["docker.io"], "running nodes", print)
