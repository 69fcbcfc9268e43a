"""The parts of IM's connector that need neither IM nor an engine."""

from __future__ import annotations

import importlib.util
import io
import sys
import tarfile
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest

SOURCE = Path(__file__).parents[2] / "scripts/im_connectors/LocalDocker.py"
ABSENT = (  # IM has an environment of its own: its modules are not here
    "IM",
    "IM.config",
    "IM.connectors",
    "IM.connectors.Docker",
    "IM.connectors.exceptions",
    "IM.SSH",
    "IM.VirtualMachine",
    "docker",
    "docker.transport",
    "requests",
)


@pytest.fixture(scope="module")
def connector() -> ModuleType:
    fakes: dict[str, Any] = {name: mock.MagicMock() for name in ABSENT}
    fakes["IM.connectors.Docker"].DockerCloudConnector = object
    with mock.patch.dict(sys.modules, fakes):
        spec = importlib.util.spec_from_file_location("LocalDocker", SOURCE)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


def test_version_1_mounts_the_hierarchies_read_only(connector: ModuleType) -> None:
    assert connector.control_groups(version_2=False)["Binds"] == [
        "/sys/fs/cgroup:/sys/fs/cgroup:ro"
    ]


def test_version_2_has_a_name_space_and_not_the_hosts_tree(connector: ModuleType) -> None:
    assert connector.control_groups(version_2=True) == {"CgroupnsMode": "private"}


@pytest.mark.parametrize(
    ("wanted", "present", "limit"), [(1, 2, 10**9), (2, 2, 2 * 10**9), (4, 2, 0), (None, 2, 0)]
)
def test_the_cpu_limit_is_what_the_machine_has(connector, wanted, present, limit) -> None:
    assert connector.nano_cpus(wanted, present) == limit


@pytest.mark.parametrize("labels", [None, {}, {"mayfly": "1"}, {"mayfly.devices": ""}])
def test_an_image_without_the_label_gets_no_device(connector, labels) -> None:
    assert connector.devices(labels) == []


def test_an_image_gets_the_devices_of_its_label(connector) -> None:
    (fuse, other) = connector.devices({"mayfly.devices": "/dev/fuse,/dev/x"})
    assert fuse == {
        "PathOnHost": "/dev/fuse",
        "PathInContainer": "/dev/fuse",
        "CgroupPermissions": "rwm",
    }
    assert other["PathOnHost"] == "/dev/x"


def test_capabilities_that_the_machine_lacks_are_dropped(connector: ModuleType) -> None:
    status = "CapEff:\t0\nCapBnd:\t000001fffeffffff\n"
    assert connector.missing_capabilities(status) == ["SYS_RESOURCE"]


def test_the_key_is_root_s_alone(connector: ModuleType) -> None:
    with tarfile.open(fileobj=io.BytesIO(connector.key_archive("ssh-rsa AAAA\n"))) as archive:
        directory, file = archive.getmembers()
        content = archive.extractfile(file)
        assert content is not None
        assert content.read() == b"ssh-rsa AAAA\n"
    assert (directory.name, directory.mode) == (".ssh", 0o700)
    assert (file.name, file.mode, file.uid) == (".ssh/authorized_keys", 0o600, 0)


def test_both_lists_of_capabilities_are_the_kernels(connector: ModuleType) -> None:
    from mayfly.local import host  # noqa: PLC0415

    assert host.CAPABILITIES == connector.CAPABILITIES


def test_the_licence_is_im_s() -> None:
    for path in SOURCE.parent.rglob("*.py"):
        assert "SPDX-License-Identifier: GPL-3.0-or-later" in path.read_text(), path
