"""Talk to a Docker Engine through its command line client."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mayfly.errors import RemoteError
from mayfly.local.host import last_line

OURS = "mayfly=1"  # the label on everything that we make
INFRASTRUCTURE = "im.infrastructure"  # the label that the connector adds
REMOVAL_S = 120.0  # a container of a busy machine takes this long to go, no longer


@dataclass(frozen=True)
class Docker:
    """A Docker Engine that answers on `host` (unix://PATH)."""

    host: str

    def __call__(self, *arguments: str) -> str:
        """Run `docker ARGUMENTS`; returns its output, raises RemoteError when it fails."""
        result = subprocess.run(
            self.command(*arguments),
            check=False,
            capture_output=True,
            text=True,
            env=self.environ(),
        )
        if result.returncode:
            raise RemoteError(f"docker {arguments[0]}: {last_line(result.stdout, result.stderr)}")
        return result.stdout.strip()

    def logged(self, log: Path, *arguments: str) -> None:
        """Run `docker ARGUMENTS` with its output in a file, which a RemoteError names."""
        with log.open("w") as file:
            result = subprocess.run(
                self.command(*arguments),
                check=False,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=self.environ(),
            )
        if result.returncode:
            # The builder's own last line repeats the command; what the command said comes before.
            said = [line for line in log.read_text().splitlines() if "non-zero code" not in line]
            cause = last_line("\n".join(said))
            raise RemoteError(f"docker {arguments[0]} failed: {cause}", f"see {log}")

    def command(self, *arguments: str) -> list[str]:
        return ["docker", "-H", self.host, *arguments]

    def environ(self) -> Mapping[str, str]:
        """The client's environment: the classic builder needs no plug-in, and no other context."""
        drop = ("DOCKER_HOST", "DOCKER_CONTEXT", "DOCKER_TLS_VERIFY", "DOCKER_CERT_PATH")
        kept = {name: value for name, value in os.environ.items() if name not in drop}
        return kept | {"DOCKER_BUILDKIT": "0"}

    def lines(self, *arguments: str) -> list[str]:
        """The output of a command as a list of lines."""
        return self(*arguments).splitlines()

    def answers(self) -> bool:
        """Whether an engine answers; a client alone does not make one."""
        try:
            return bool(self("version", "--format", "{{.Server.Version}}"))
        except (RemoteError, FileNotFoundError):
            return False

    def has_image(self, tag: str) -> bool:
        return bool(self("images", "-q", tag))

    def inspect_network(self, name: str) -> dict[str, Any] | None:
        """The network's description, or None when there is none of that name."""
        if name not in self.lines("network", "ls", "--format", "{{.Name}}"):
            return None
        found: dict[str, Any] = json.loads(self("network", "inspect", name))[0]
        return found

    def containers(self, label: str) -> list[str]:
        """Ids of containers with a label, running or not."""
        return self.lines("ps", "-aq", "--no-trunc", "--filter", f"label={label}")

    def remove(self, containers: Collection[str]) -> None:
        """Remove containers by their whole ids, running or not, with their volumes.

        One that somebody else removes (a run that ends at this moment) is waited for, REMOVAL_S at
        most. Raises RemoteError when one stays.
        """
        deadline = time.monotonic() + REMOVAL_S
        left = list(containers)
        while left:
            try:
                self("rm", "-f", "-v", *left)
            except RemoteError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.5)
            left = [each for each in self.lines("ps", "-aq", "--no-trunc") if each in left]

    def networks(self, label: str) -> list[str]:
        return self.lines("network", "ls", "-q", "--no-trunc", "--filter", f"label={label}")

    def volumes(self, label: str) -> list[str]:
        return self.lines("volume", "ls", "-q", "--filter", f"label={label}")


def socket_path(host: str) -> Path:
    """The path in a unix:// address."""
    return Path(host.removeprefix("unix://"))
