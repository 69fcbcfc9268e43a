"""The Infrastructure Manager of the local platform: its own service, in an environment of its own.

It listens on loopback, and serves only who has the password in the auth file: it acts for root on
the Docker Engine.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import shutil
import sqlite3
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mayfly.errors import UserError
from mayfly.local import host, ports, venvs
from mayfly.local.daemons import Daemon, plain_environ
from mayfly.local.docker import socket_path
from mayfly.local.host import Progress, read_record
from mayfly.local.paths import Paths

REQUIREMENTS = ("IM==2.0.0", "docker==7.1.0")
DEFAULT_PORT = 8800
PORT_VARIABLE = "MAYFLY_IM_PORT"
ADDRESS = "127.0.0.1"
USER = "mayfly"
PROGRAMS = {"ssh": "openssh-client"}
START_SECONDS = 90
STOP_SECONDS = 10
DATABASE_SECONDS = 30


@dataclass(frozen=True)
class ImService:
    """The running service: its address, and the auth file that a client gives."""

    url: str
    auth_file: Path
    reused: bool


def up(
    paths: Paths,
    docker_host: str,
    network: str,
    progress: Progress,
    environ: Mapping[str, str] = os.environ,
) -> ImService:
    """Start the service unless it runs with the same engine; raises UserError for a taken port."""
    directory = paths.of("im")
    daemon, record, auth = _daemon(directory), directory / "service.json", directory / "auth.dat"
    connectors = paths.checkout / "scripts/im_connectors"
    wish = {"docker_host": docker_host, "network": network, "connectors": _digest(connectors)}
    known = read_record(record)
    if daemon.process() and wish.items() <= known.items():
        return ImService(known["url"], auth, reused=True)
    daemon.stop(STOP_SECONDS)
    port = ports.port_setting(environ, PORT_VARIABLE, DEFAULT_PORT)
    ports.require_free(ADDRESS, port, PORT_VARIABLE)
    environment = install(paths, progress)
    progress("starting the IM service")
    _write_settings(directory, port, auth_lines(_password(directory), docker_host, network))
    make_contextualization(environment, connectors, directory / "contextualization")
    launcher = connectors / "im_local_service.py"
    daemon.start([str(environment / "bin/python"), str(launcher)], _environ(directory, environment))
    url = f"http://{ADDRESS}:{port}"
    daemon.wait(lambda: _answers(url), START_SECONDS)
    record.write_text(json.dumps({"url": url, **wish}))
    return ImService(url, auth, reused=False)


def check(paths: Paths, environ: Mapping[str, str] = os.environ) -> None:
    """Raise UserError, before anything is made, when the service's port is taken."""
    port = ports.port_setting(environ, PORT_VARIABLE, DEFAULT_PORT)
    if _daemon(paths.state / "im").process() is None:
        ports.require_free(ADDRESS, port, PORT_VARIABLE)


def install(paths: Paths, progress: Progress) -> Path:
    """The environment with IM, and the programs that it calls, installed when missing."""
    missing = [package for program, package in PROGRAMS.items() if not shutil.which(program)]
    if missing:
        host.install_packages(missing, "the IM service", progress)
    return venvs.ensure(paths, "im", REQUIREMENTS, progress)


def down(paths: Paths) -> list[str]:
    """Stop the service and delete its database. Returns what was removed, in words."""
    directory = paths.state / "im"
    if not directory.exists():
        return []
    _daemon(directory).stop(STOP_SECONDS)
    shutil.rmtree(directory)
    return ["IM service"]


def running(paths: Paths) -> str | None:
    """The service's address, or None when it does not run."""
    directory = paths.state / "im"
    return (
        read_record(directory / "service.json").get("url") if _daemon(directory).process() else None
    )


def wipe(paths: Paths, infrastructure_id: str) -> bool:
    """Forget a destroyed infrastructure: IM keeps its RADL, and so its secrets, for ever.

    The row's bytes are overwritten, not only freed (sqlite.org/pragma.html#pragma_secure_delete).
    Returns whether there was a row.
    """
    database = paths.state / "im" / "im.sqlite"
    if not database.exists():
        return False
    with contextlib.closing(sqlite3.connect(database, timeout=DATABASE_SECONDS)) as connection:
        connection.execute("PRAGMA secure_delete = ON")
        with connection:
            found = connection.execute("DELETE FROM inf_list WHERE id = ?", (infrastructure_id,))
        connection.execute("VACUUM")
        return found.rowcount > 0


def config(directory: Path, port: int) -> str:
    """The text of im.cfg: short waits, as everything is on this machine, and no payloads logged."""
    settings = {
        "REST_ADDRESS": ADDRESS,
        "REST_PORT": port,
        "DATA_DB": f"sqlite:///{directory}/im.sqlite",
        "USER_DB": directory / "users.json",
        "LOG_FILE": directory / "im.log",
        "LOG_LEVEL": "INFO",  # DEBUG has whole RADLs
        "CONTEXTUALIZATION_DIR": directory / "contextualization",
        "RECIPES_DIR": directory / "contextualization/AnsibleRecipes",
        "MAX_SIMULTANEOUS_LAUNCHES": 1,  # more: IM numbers nodes anew when they have names
        "WAIT_SSH_ACCCESS_TIMEOUT": 120,
        "SSH_REVERSE_TUNNELS": False,
        "CHECK_CTXT_PROCESS_INTERVAL": 1,
        "CONFMAMAGER_CHECK_STATE_INTERVAL": 1,
        "UPDATE_CTXT_LOG_INTERVAL": 5,
        "VM_INFO_UPDATE_FREQUENCY": 1,
    }
    return "[im]\n" + "".join(f"{name} = {value}\n" for name, value in settings.items())


def auth_lines(password: str, docker_host: str, network: str) -> str:
    """The text of the auth file: who asks, and which engine the nodes are made on."""
    engine = f"unix://localhost{socket_path(docker_host)}"
    return (
        f"id = im; type = InfrastructureManager; username = {USER}; password = {password}\n"
        f"id = local; type = LocalDocker; host = {engine}; network = {network}\n"
    )


def make_contextualization(environment: Path, connectors: Path, target: Path) -> None:
    """IM's files for configuring nodes, with our short versions of its playbooks over them."""
    stock = next(environment.glob("lib/python3*/site-packages/contextualization"), None)
    if stock is None:
        raise UserError(f"the IM environment is not complete: {environment}", "delete it")
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(stock, target, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(connectors / "contextualization", target, dirs_exist_ok=True)


def _write_settings(directory: Path, port: int, auth: str) -> None:
    users = [{"username": USER, "password": _password(directory)}]
    _write(directory / "users.json", json.dumps({"users": users}))
    _write(directory / "auth.dat", auth)
    _write(directory / "im.cfg", config(directory, port))
    _write(directory / "ansible.cfg", "[defaults]\nhost_key_checking = False\n")
    (directory / "tmp").mkdir(exist_ok=True)


def _password(directory: Path) -> str:
    """The service's password; it stays the same, for infrastructures belong to who has it."""
    path = directory / "password"
    if not path.exists():
        _write(path, secrets.token_urlsafe(24))
    return path.read_text()


def _digest(directory: Path) -> str:
    """A hash of the connectors: a service that runs older ones is to be started again."""
    files = sorted(path for path in directory.rglob("*") if path.suffix in (".py", ".yml"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:12]


def _environ(directory: Path, environment: Path) -> dict[str, str]:
    """IM finds its programs on PATH, its settings by variables, and leaves files in TMPDIR."""
    return plain_environ(os.environ) | {
        "PATH": f"{environment}/bin:{os.environ.get('PATH', '')}",
        "MAYFLY_IM_CONFIG": str(directory / "im.cfg"),
        "ANSIBLE_CONFIG": str(directory / "ansible.cfg"),
        "ANSIBLE_HOME": str(directory / "ansible"),
        "TMPDIR": str(directory / "tmp"),
        "PYTHONUNBUFFERED": "1",
    }


def _answers(url: str) -> bool:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        direct.open(f"{url}/version", timeout=2).close()
    except OSError:
        return False
    return True


def _write(path: Path, text: str) -> None:
    """Write a file that only its owner can read, from its first byte on."""
    path.touch(mode=0o600)
    path.write_text(text)


def _daemon(directory: Path) -> Daemon:
    return Daemon("im-service", directory)
