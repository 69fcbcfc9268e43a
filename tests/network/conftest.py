"""Machines in network namespaces need no node, and no local cloud."""

from __future__ import annotations

import shutil
import sys

import pytest

from mayfly.local import host

NEEDED = {"ip": "iproute2", "iptables": "iptables"}


@pytest.fixture(scope="session", autouse=True)
def tools() -> None:
    """The commands that make networks and their firewalls."""
    missing = [package for command, package in NEEDED.items() if not shutil.which(command)]
    if missing:
        host.install_packages(missing, "making networks", lambda text: print(text, file=sys.stderr))
