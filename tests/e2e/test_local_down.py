"""`local up`, then `local down`: the machine is as before, and what others have stays.

Slow: an engine of its own loads the node image.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from machine import ROOT

import testenv

pytestmark = pytest.mark.slow
FOREIGN = "somebody-elses"


@dataclass
class Platform:
    """A platform with a state directory and ports of its own."""

    state: Path
    number: int
    docker_host: str | None = None
    """An engine that is not ours; None for one that the platform starts itself."""

    def local(self, command: str) -> dict:
        own = {
            "MAYFLY_STATE_DIR": str(self.state),
            "MAYFLY_IM_PORT": str(18810 + self.number),
            "MAYFLY_S3_PORT": str(18340 + self.number),
        }
        environ = {k: v for k, v in testenv.environment().items() if k != "DOCKER_HOST"}
        environ |= own | ({"DOCKER_HOST": self.docker_host} if self.docker_host else {})
        done = subprocess.run(
            [ROOT / ".venv/bin/mayfly", "local", command, "--json"],
            cwd=ROOT, env=environ, capture_output=True, text=True, timeout=1500, check=False,
        )  # fmt: skip
        print(done.stderr[-3000:], file=sys.stderr)
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout)


@pytest.fixture
def machine(platform) -> Iterator[dict[str, list[str]]]:
    """What is on the machine beforehand; `platform` has what is slow to make in the cache."""
    before = traces()
    yield before
    assert traces() == before


def traces() -> dict[str, list[str]]:
    """Mounts, listening ports, links and firewall rules, without what counts or changes."""
    shown = {
        "mounts": "cut -d' ' -f1-3 /proc/mounts",
        "ports": "ss -Hltn | awk '{ print $4 }'",
        "links": "ip -brief link | awk '{ print $1 }' | grep -v '^veth'",
        "rules": "iptables-save | grep -v '^[#:]'",
    }
    return {name: sorted(shell(command)) for name, command in shown.items()}


def shell(command: str) -> list[str]:
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    return done.stdout.splitlines()


def in_engine(host: str) -> dict[str, list[str]]:
    docker = f"docker -H {host}"
    return {
        "containers": sorted(shell(f"{docker} ps -a --format '{{{{.Names}}}} {{{{.State}}}}'")),
        "networks": sorted(shell(f"{docker} network ls --format '{{{{.Name}}}}'")),
        "volumes": sorted(shell(f"{docker} volume ls -q")),
    }


def test_nothing_is_left_and_nothing_of_others_goes(machine, tmp_path):
    ours = Platform(tmp_path / "ours", 1)
    made = ours.local("up")
    try:
        on_a_foreign_engine(made["docker_host"], made["image"], tmp_path)
        removed = " ".join(ours.local("down")["removed"])
    except BaseException:
        ours.local("down")
        raise
    assert all(word in removed for word in ("IM service", "S3 server", "Docker Engine")), removed
    assert not ours.state.exists()


def on_a_foreign_engine(host: str, image: str, directory: Path) -> None:
    """A platform that uses an engine which it has not started, and where others have things."""
    shell(f"docker -H {host} network create {FOREIGN}")
    shell(f"docker -H {host} volume create {FOREIGN}")
    words = f"--detach --name {FOREIGN} --network {FOREIGN} --volume {FOREIGN}:/data"
    shell(f"docker -H {host} run {words} --entrypoint sleep {image} infinity")
    before = in_engine(host)
    assert f"{FOREIGN} running" in before["containers"], before
    guest = Platform(directory / "guest", 2, docker_host=host)
    assert guest.local("up")["docker_host"] == host
    removed = " ".join(guest.local("down")["removed"])
    assert "S3 server" in removed and "Docker Engine" not in removed
    assert in_engine(host) == before
    assert not guest.state.exists()
