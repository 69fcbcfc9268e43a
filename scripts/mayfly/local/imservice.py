"""Our own Infrastructure Manager, in an environment of its own: one service for each of two uses.

One makes containers on this machine (LOCAL), one makes nodes on clouds (CLOUDS); they differ in
data only. Each listens on loopback, and serves only who has its password: the one acts for root on
the Docker Engine, the other remembers the nodes that cost money. The keys to a cloud are in no file
of it: they come with each call, and IM keeps none.
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
from mayfly.redact import Secret

REQUIREMENTS = ("IM==2.0.0", "docker==7.1.0")
ADDRESS = "127.0.0.1"
USER = "mayfly"
DATABASE = "im.sqlite"
PROGRAMS = {"ssh": "openssh-client"}
START_SECONDS = 180  # ten are enough where nothing else runs
STOP_SECONDS = 10
DATABASE_SECONDS = 30


@dataclass(frozen=True)
class Kind:
    """What sets one service apart from the other."""

    part: str
    """Its directory below the state directory."""
    title: str
    port_variable: str
    default_port: int
    settings: Mapping[str, object]
    """Of im.cfg, beside those that both have."""
    short: bool
    """Nodes are configured by our short playbooks: their image carries what IM's would install."""
    told: tuple[str, ...] = ()
    """Variables that it gets of the user's, beside those that every daemon of ours gets."""


# Short waits, as everything is on this machine.
LOCAL = Kind(
    part="im",
    title="IM service",
    port_variable="MAYFLY_IM_PORT",
    default_port=8800,
    settings={
        "WAIT_SSH_ACCCESS_TIMEOUT": 120,
        "CHECK_CTXT_PROCESS_INTERVAL": 1,
        "CONFMAMAGER_CHECK_STATE_INTERVAL": 1,
        "UPDATE_CTXT_LOG_INTERVAL": 5,
        "VM_INFO_UPDATE_FREQUENCY": 1,
    },
    short=True,
)
# IM's own waits and playbooks. It checks certificates, which IM does not do by itself.
CLOUDS = Kind(
    part="im-clouds",
    title="IM service for clouds",
    port_variable="MAYFLY_CLOUD_IM_PORT",
    default_port=8801,
    settings={"VERIFI_SSL": True},
    short=False,
    told=(
        "AWS_CA_BUNDLE",
        "AWS_ENDPOINT_URL",
        "AWS_ENDPOINT_URL_EC2",
        "REQUESTS_CA_BUNDLE",
        "SSL_CERT_DIR",
    ),
)


@dataclass(frozen=True)
class ImService:
    """The running service: its address, and the password that a client of it gives."""

    url: str
    password: Secret
    auth_file: Path
    """The same password as IM's clients read it, with the engine that containers are made on."""
    reused: bool


def up(
    kind: Kind,
    paths: Paths,
    progress: Progress,
    environ: Mapping[str, str] = os.environ,
    engine: tuple[str, str] | None = None,
) -> ImService:
    """Start a service unless it runs as it is wanted; raises UserError for a taken port.

    `engine` has the address of the Docker Engine and the network of its nodes.
    """
    directory = paths.of(kind.part)
    daemon, record, auth = _daemon(directory), directory / "service.json", directory / "auth.dat"
    connectors = paths.checkout / "scripts/im_connectors"
    told = {name: environ[name] for name in kind.told if environ.get(name)}
    wish = {"engine": list(engine or ()), "connectors": _digest(connectors), "told": told}
    known, password = read_record(record), _password(directory)
    if daemon.process() and wish.items() <= known.items():
        return ImService(known["url"], Secret(password), auth, reused=True)
    if daemon.process() and _is_busy(
        kind, paths
    ):  # as by another command, with nodes in the making
        progress(f"the {kind.title} is at work: what has changed since its start counts later")
        return ImService(known["url"], Secret(password), auth, reused=True)
    daemon.stop(STOP_SECONDS)
    port = ports.port_setting(environ, kind.port_variable, kind.default_port)
    ports.require_free(ADDRESS, port, kind.port_variable)
    environment = install(paths, progress)
    progress(f"starting the {kind.title}")
    _write_settings(directory, config(directory, port, kind), auth_lines(password, engine))
    ours = connectors / "contextualization" if kind.short else None
    make_contextualization(environment, ours, directory / "contextualization")
    command = [str(environment / "bin/python"), str(connectors / "im_local_service.py")]
    daemon.start(command, _environ(directory, environment) | told)
    url = f"http://{ADDRESS}:{port}"
    daemon.wait(lambda: _answers(url), START_SECONDS)
    record.write_text(json.dumps({"url": url, **wish}))
    return ImService(url, Secret(password), auth, reused=False)


def _is_busy(kind: Kind, paths: Paths) -> bool:
    """Whether a running service is not to be started anew: clouds' nodes cost while it is away."""
    return (
        kind is CLOUDS
        and running(kind, paths) is not None
        and known_infrastructures(kind, paths) > 0
    )


def check(kind: Kind, paths: Paths, environ: Mapping[str, str] = os.environ) -> None:
    """Raise UserError, before anything is made, when a service's port is taken."""
    port = ports.port_setting(environ, kind.port_variable, kind.default_port)
    if _daemon(paths.state / kind.part).process() is None:
        ports.require_free(ADDRESS, port, kind.port_variable)


def install(paths: Paths, progress: Progress) -> Path:
    """The environment with IM, and the programs that it calls, installed when missing."""
    missing = [package for program, package in PROGRAMS.items() if not shutil.which(program)]
    if missing:
        host.install_packages(missing, "the IM service", progress)
    return venvs.ensure(paths, "im", REQUIREMENTS, progress)


def stop(kind: Kind, paths: Paths) -> bool:
    """Stop a service and leave its files. Returns whether it ran."""
    return _daemon(paths.state / kind.part).stop(STOP_SECONDS)


def down(kind: Kind, paths: Paths) -> list[str]:
    """Stop a service and delete its database. Returns what was removed, in words."""
    directory = paths.state / kind.part
    if not directory.exists():
        return []
    stop(kind, paths)
    shutil.rmtree(directory)
    return [kind.title]


def running(kind: Kind, paths: Paths) -> str | None:
    """A service's address, or None when it does not run."""
    directory = paths.state / kind.part
    return (
        read_record(directory / "service.json").get("url") if _daemon(directory).process() else None
    )


def known_infrastructures(kind: Kind, paths: Paths) -> int:
    """How many infrastructures a service remembers that it has not destroyed."""
    database = paths.state / kind.part / DATABASE
    if not database.exists():
        return 0
    with contextlib.closing(sqlite3.connect(database, timeout=DATABASE_SECONDS)) as connection:
        if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'inf_list'").fetchone():
            return 0
        count = connection.execute("SELECT count(*) FROM inf_list WHERE deleted = 0").fetchone()
        return int(count[0])


def wipe(kind: Kind, paths: Paths, infrastructure_id: str) -> bool:
    """Forget a destroyed infrastructure: IM keeps its RADL, and so its secrets, for ever.

    The row's bytes are overwritten, not only freed (sqlite.org/pragma.html#pragma_secure_delete).
    Returns whether there was a row.
    """
    database = paths.state / kind.part / DATABASE
    if not database.exists():
        return False
    with contextlib.closing(sqlite3.connect(database, timeout=DATABASE_SECONDS)) as connection:
        connection.execute("PRAGMA secure_delete = ON")
        with connection:
            found = connection.execute("DELETE FROM inf_list WHERE id = ?", (infrastructure_id,))
        connection.execute("VACUUM")
        return found.rowcount > 0


def config(directory: Path, port: int, kind: Kind = LOCAL) -> str:
    """The text of im.cfg: what a service of this kind does, and no payloads logged."""
    settings = {
        "REST_ADDRESS": ADDRESS,
        "REST_PORT": port,
        "DATA_DB": f"sqlite:///{directory}/{DATABASE}",
        "USER_DB": directory / "users.json",
        "LOG_FILE": directory / "im.log",
        "LOG_LEVEL": "INFO",  # DEBUG has whole RADLs
        "CONTEXTUALIZATION_DIR": directory / "contextualization",
        "RECIPES_DIR": directory / "contextualization/AnsibleRecipes",
        "MAX_SIMULTANEOUS_LAUNCHES": 1,  # more: IM numbers nodes anew when they have names
        "SSH_REVERSE_TUNNELS": False,  # nodes would have to reach this machine
        **kind.settings,
    }
    return "[im]\n" + "".join(f"{name} = {value}\n" for name, value in settings.items())


def auth_lines(password: str, engine: tuple[str, str] | None) -> str:
    """The text of the auth file: who asks, and on which engine and network containers are made."""
    text = f"id = im; type = InfrastructureManager; username = {USER}; password = {password}\n"
    if engine:
        host = f"unix://localhost{socket_path(engine[0])}"
        text += f"id = local; type = LocalDocker; host = {host}; network = {engine[1]}\n"
    return text


def make_contextualization(environment: Path, ours: Path | None, target: Path) -> None:
    """IM's files for configuring nodes, with those of the directory `ours` over them, if any."""
    stock = next(environment.glob("lib/python3*/site-packages/contextualization"), None)
    if stock is None:
        raise UserError(f"the IM environment is not complete: {environment}", "delete it")
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(stock, target, ignore=shutil.ignore_patterns("__pycache__"))
    if ours:
        shutil.copytree(ours, target, dirs_exist_ok=True)


def _write_settings(directory: Path, settings: str, auth: str) -> None:
    users = [{"username": USER, "password": _password(directory)}]
    _write(directory / "users.json", json.dumps({"users": users}))
    _write(directory / "auth.dat", auth)
    _write(directory / "im.cfg", settings)
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
