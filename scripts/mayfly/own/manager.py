"""What IM is for rented nodes, for machines of the user's own: ansible-playbook runs the job there.

An inventory is the "infrastructure", and its path the identifier. To create it is to claim the
machines and start the playbooks; to destroy it is to end them. What they have done is taken back by
the sweep that follows (own/machines.py).
"""

# Much of what IM is asked for has no counterpart here.
# ruff: noqa: ARG002

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from mayfly import collection, inventory
from mayfly.errors import RemoteError
from mayfly.im import READY, Node, State
from mayfly.own import playbook
from mayfly.own.machines import Machines
from mayfly.own.playbook import Playbook
from mayfly.redact import Secret
from mayfly.spec import CHECKOUT

SITE = "mayfly.training.site"
STANDING = "own"  # the state of a machine on which nobody works at the moment


class Machinist:
    """A Manager over an inventory, for one run; `secrets` are environment variables."""

    def __init__(
        self, path: Path, environ: Mapping[str, str], secrets: Mapping[str, Secret], cache: Path
    ) -> None:
        """Ansible runs in `environ`; the collection is built and installed below `cache`."""
        self.restarts = 0
        self._path = path
        self._environ = environ
        self._secrets = secrets
        self._cache = cache
        self._book: Playbook | None = None
        self._files = tempfile.TemporaryDirectory(prefix="mayfly-job-")  # gone with this object

    def create(self, radl: str) -> str:
        """Claim the machines and start the playbooks; `radl` are the job's variables as YAML.

        Raises an error when a machine does not answer, or another run has it.
        """
        run = str(yaml.safe_load(radl)["trainer_run"])
        installed = collection.install(collection.build(CHECKOUT, self._cache))
        Machines(self._path, self._environ).claim(run)
        keys = {name: secret.reveal() for name, secret in self._secrets.items()}
        environment = playbook.environment(
            self._environ, ANSIBLE_COLLECTIONS_PATH=str(installed), **keys
        )
        variables = Path(self._files.name) / "variables.yml"
        variables.write_text(radl, encoding="utf-8")
        self._book = Playbook(["-i", str(self._path), "-e", f"@{variables}", SITE], environment)
        return str(self._path)

    def state(self, infrastructure: str) -> State:
        """Return how far the playbooks are: a machine is up from the start."""
        code = self._book.code() if self._book else None
        if self._book is None:
            word = STANDING
        else:
            word = "running" if code is None else READY if code == 0 else "unconfigured"
        hosts = inventory.read(self._path).names
        return State(word, {str(number): word for number in range(len(hosts))})

    def messages(self, infrastructure: str) -> str:
        """Return what ansible-playbook has printed so far."""
        return self._book.output() if self._book else ""

    def node_messages(self, infrastructure: str, number: str) -> str:
        """Return nothing: all machines' messages are in one text."""
        return ""

    def nodes(self, infrastructure: str) -> list[Node]:
        """Return the machines with what the user's ssh needs.

        Raises RemoteError for one that ssh alone does not reach, UserError for a wrong inventory.
        """
        content = inventory.listed(self._path)
        hosts = inventory.hosts_of(content, self._path)
        variables = content.get("_meta", {}).get("hostvars", {})
        groups = {**dict.fromkeys(hosts.ps, "ps"), **dict.fromkeys(hosts.worker, "worker")}
        return [
            _node(number, host, groups[host], variables.get(host, {}))
            for number, host in enumerate(hosts.names)
        ]

    def infrastructures(self) -> list[str]:
        """Return the inventory while this command's playbooks run."""
        return [str(self._path)] if self._book and self._book.code() is None else []

    def find(self, text: str) -> list[str]:
        """Return nothing: only this command knows its playbooks."""
        return []

    def add(self, infrastructure: str, radl: str) -> list[str]:
        """Raises RemoteError: there are the machines of the inventory, and no others."""
        del radl
        raise RemoteError(f"no machine can be added to {infrastructure}", "add it to the inventory")

    def remove(self, infrastructure: str, numbers: Sequence[str]) -> None:
        """Raises RemoteError: the machines are the user's own."""
        del numbers
        raise RemoteError(f"no machine can be removed from {infrastructure}", "edit the inventory")

    def destroy(self, infrastructure: str) -> None:
        """End the playbooks."""
        if self._book:
            self._book.stop()

    def forget(self, infrastructure: str) -> None:
        """Do nothing: nothing is remembered."""

    def reconfigure(self, infrastructure: str) -> None:
        """Raise RemoteError: playbooks that were lost are started by a new run."""
        raise RemoteError("the playbooks are not started again", "start the run again")

    def wipe(self, infrastructures: Collection[str]) -> None:
        """Do nothing: nothing is remembered."""


def _node(number: int, host: str, group: str, variables: Mapping[str, Any]) -> Node:
    connection = _first(variables, "ansible_connection") or "ssh"
    if connection.rpartition(".")[2] != "ssh":
        raise RemoteError(
            f"the inventory reaches {host} by connection {connection!r}, not ssh",
            "log in there as the inventory does",
        )
    password = _first(variables, "ansible_ssh_pass", "ansible_password", "ansible_ssh_password")
    return Node(
        number=str(number),
        group=group,
        state=STANDING,
        name=host,
        public_ip=_first(variables, "ansible_ssh_host", "ansible_host") or host,
        private_ip=_first(variables, "ansible_host") or host,
        user=_first(variables, "ansible_ssh_user", "ansible_user") or "",
        password=Secret(password) if password else None,
        private_key=None,
        own=_ssh_options(variables),
    )


def _ssh_options(variables: Mapping[str, Any]) -> tuple[str, ...]:
    """The options of ssh that Ansible would use, as far as inventories commonly have them."""
    port = _first(variables, "ansible_ssh_port", "ansible_port")
    key = _first(variables, "ansible_ssh_private_key_file", "ansible_private_key_file")
    extra = [_first(variables, f"ansible_ssh_{kind}_args") for kind in ("common", "extra")]
    return (
        *(("-p", port) if port else ()),
        *(("-i", str(Path(key).expanduser())) if key else ()),
        *(word for text in extra if text for word in shlex.split(text)),
    )


def _first(variables: Mapping[str, Any], *names: str) -> str | None:
    """The first variable that is set. Raises UserError for one that only Ansible can compute."""
    for name in names:
        if (value := variables.get(name)) not in (None, ""):
            if "{{" in str(value) or not isinstance(value, str | int):
                raise RemoteError(f"{name} is computed by Ansible", "log in as the inventory does")
            return str(value)
    return None
