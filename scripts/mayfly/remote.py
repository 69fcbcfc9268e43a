"""Log in to the nodes of a run, with what IM knows of them.

Passwords and keys reach ssh through files that only their owner can read and that are gone
afterwards, so that none is ever in a process list or an environment.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from mayfly.errors import RemoteError, UserError, unknown
from mayfly.im import Node

KEPT_ALIVE = ("-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=15")
# Nodes live for one run and the next one takes their addresses: a known host means nothing.
OPTIONS = (
    *("-o", "StrictHostKeyChecking=no"),
    *("-o", "UserKnownHostsFile=/dev/null"),
    *("-o", "LogLevel=ERROR"),
    *KEPT_ALIVE,
)

_AS_ROOT = 'if [ "$(id -u)" = 0 ]; then exec sh -c "$1"; else exec sudo -n sh -c "$1"; fi'


def names(nodes: Sequence[Node]) -> dict[str, Node]:
    """Return the nodes by the names that people use: ps-0, worker-0, worker-1 …

    The number is the position in the group, ordered as the nodes' addresses are; machines of the
    user's own are ordered by name.
    """
    named: dict[str, Node] = {}
    for group in ("head", "ps", "worker"):
        members = sorted((n for n in nodes if n.group == group), key=_order)
        named |= {f"{group}-{index}": node for index, node in enumerate(members)}
    return named


def _order(node: Node) -> str:
    return node.name if node.own is not None else node.private_ip or ""


def choose(nodes: Sequence[Node], name: str | None) -> Node:
    """Return a node by name; the chief (worker-0) when none is named. Raises UserError."""
    named = names(nodes)
    if not named:
        raise UserError("the run has no nodes", "see `mayfly status`")
    wanted = name or "worker-0"
    if wanted not in named:
        raise unknown("node", wanted, named)
    return named[wanted]


@contextmanager
def login(
    nodes: Sequence[Node], node: Node, extra: Sequence[str] = (), command: Sequence[str] = ()
) -> Iterator[list[str]]:
    """Give the command line that logs in to `node`; private nodes are reached through a public one.

    `extra` are options for ssh. Raises UserError when ssh or sshpass is not installed.
    """
    _require("ssh", "openssh-client")
    with tempfile.TemporaryDirectory(prefix="mayfly-ssh-") as directory:
        files = Path(directory)
        line = _ssh(node, files)
        if not node.public_ip:
            line += ["-o", f"ProxyCommand={_proxy(_jump(nodes), files)}"]
        target = "@".join(filter(None, (node.user, node.public_ip or node.private_ip)))
        # One word is a line for the node's shell, as with ssh itself; several keep their borders.
        remote = list(command) if len(command) < 2 else [shlex.join(command)]  # noqa: PLR2004
        yield [*line, *extra, target, *remote]


def run(
    nodes: Sequence[Node],
    node: Node,
    command: Sequence[str],
    timeout: float = 60,
    text: str = "",
) -> str:
    """Run a command on a node and return its output; raises RemoteError when it fails.

    `text` is its standard input, the way for what no command line may show.
    """
    with login(nodes, node, ("-T",), command) as line:
        try:
            done = subprocess.run(
                line,
                input=text,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=timeout,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise RemoteError(f"node {node.name} does not answer: {timeout:.0f} s") from error
    if done.returncode:
        last = done.stderr.strip().splitlines() or ["no output"]
        raise RemoteError(f"{command[0]} failed on node {node.name}: {last[-1]}")
    return done.stdout


def as_root(script: str) -> list[str]:
    """Return the words that run a shell script as root, by sudo where the login is not root's."""
    return ["sh", "-c", _AS_ROOT, "sh", script]


def interactive(
    nodes: Sequence[Node], node: Node, extra: Sequence[str] = (), command: Sequence[str] = ()
) -> int:
    """Run ssh on this terminal and return its exit code."""
    with login(nodes, node, extra, command) as line:
        return subprocess.run(line, check=False).returncode


def _jump(nodes: Sequence[Node]) -> Node:
    public = [node for node in nodes if node.public_ip]
    if not public:
        raise RemoteError("no node of the run has a public address", "see `mayfly status`")
    return public[0]


def _proxy(jump: Node, files: Path) -> str:
    # %h and %p are for ssh to fill in.
    return f"{shlex.join(_ssh(jump, files))} -W %h:%p {jump.user}@{jump.public_ip}"


def _ssh(node: Node, files: Path) -> list[str]:
    secret = node.private_key or node.password
    if node.own is not None and secret is None:
        return ["ssh", *node.own, *KEPT_ALIVE]
    if secret is None:
        raise RemoteError(f"IM gives no password or key for node {node.name}")
    path = files / node.number
    path.touch(mode=0o600)
    path.write_text(secret.reveal().rstrip("\n") + "\n")
    if node.private_key:
        return ["ssh", "-i", str(path), "-o", "IdentitiesOnly=yes", *OPTIONS]
    _require("sshpass", "sshpass")
    options = OPTIONS if node.own is None else (*node.own, *KEPT_ALIVE)
    return ["sshpass", "-f", str(path), "ssh", *options]


def _require(program: str, package: str) -> None:
    if shutil.which(program) is None:
        raise UserError(f"{program} is not installed", f"apt install {package}")
