"""A foreign IM for tests: IM's real service with an account of its own, in a process of its own.

Our connectors are beside IM's own ones in it, under names of theirs: nobody who asks a foreign IM
asks for them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mayfly.local import imservice
from mayfly.local.daemons import Daemon
from mayfly.local.paths import CHECKOUT, find_paths
from mayfly.local.ports import free_ports

CONNECTORS = CHECKOUT / "scripts/im_connectors"
SERVICE = CONNECTORS / "im_local_service.py"
USER = "ada"
START_S = 180


@dataclass(frozen=True)
class Foreign:
    """The service: its address, its directory, and Python with IM in it."""

    url: str
    directory: Path
    python: Path


@contextmanager
def serving(
    directory: Path, password: str, service: Path = SERVICE, told: Mapping[str, str] | None = None
) -> Iterator[Foreign]:
    """A service in the block, which `service` starts; `told` are further variables for it."""
    environment = imservice.install(find_paths(), lambda text: print(text, file=sys.stderr))
    (port,) = free_ports(1)
    users = {"users": [{"username": USER, "password": password}]}
    (directory / "users.json").write_text(json.dumps(users))
    (directory / "im.cfg").write_text(imservice.config(directory, port))
    ours = CONNECTORS / "contextualization"
    imservice.make_contextualization(environment, ours, directory / "contextualization")
    (directory / "tmp").mkdir()
    daemon, python = Daemon("foreign-im", directory), environment / "bin/python"
    environ = imservice._environ(directory, environment) | dict(told or {})
    daemon.start([str(python), str(service)], environ)
    url = f"http://{imservice.ADDRESS}:{port}"
    try:
        daemon.wait(lambda: imservice._answers(url), START_S)
        yield Foreign(url, directory, python)
    finally:
        daemon.stop()


def keys(foreign: Foreign, password: str) -> dict[str, str]:
    """The variables with which a user names it."""
    return {"IM_URL": foreign.url, "IM_USER": USER, "IM_PASSWORD": password}
