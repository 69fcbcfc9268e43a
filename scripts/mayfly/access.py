"""Reach the nodes of a run: states, shells, and the tunnel to its TensorBoard."""

from __future__ import annotations

import re
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mayfly import remote
from mayfly.errors import RemoteError, UserError
from mayfly.im import Manager, Node
from mayfly.ledger import Record

TASK = re.compile(r"(head|ps|worker|chief|evaluator)-\d+")
TENSORBOARD_PORT = 6006
TUNNEL_PATIENCE_S = 60.0


def looks_like_task(word: str) -> bool:
    """Return whether a word is a node's or a task's name rather than a run's."""
    return TASK.fullmatch(word) is not None


def node_of_task(task: str) -> str:
    """Return the node that runs a task: the chief and the evaluator share worker-0."""
    kind, _, number = task.partition("-")
    if kind in ("chief", "evaluator"):
        return "worker-0"
    return f"worker-{int(number) + 1}" if kind == "worker" else task


def nodes(im: Manager, record: Record) -> list[Node]:
    """Return the nodes of a run; raises UserError when it has none any more."""
    if record.destroyed or not record.infrastructure:
        raise UserError(f"run {record.run} has no nodes: {record.state}", "see `mayfly ls`")
    return im.nodes(record.infrastructure)


def states(im: Manager, record: Record) -> dict[str, str]:
    """Return node → state, empty when the run has no infrastructure or IM does not know it."""
    if not record.infrastructure:
        return {}
    try:
        named = remote.names(im.nodes(record.infrastructure))
    except RemoteError:
        return {}
    return {name: node.state for name, node in named.items()}


def log_in(im: Manager, record: Record, name: str | None, command: Sequence[str]) -> int:
    """Run ssh on this terminal and return its exit code."""
    found = nodes(im, record)
    return remote.interactive(found, remote.choose(found, name), (), command)


def describe_login(
    im: Manager, record: Record, name: str | None, command: Sequence[str]
) -> dict[str, Any]:
    """Return where a node is, and what a command printed there if one is given."""
    found = nodes(im, record)
    node = remote.choose(found, name)
    document: dict[str, Any] = {
        "run": record.run,
        "node": name or "worker-0",
        "user": node.user,
        "public_ip": node.public_ip,
        "private_ip": node.private_ip,
    }
    if command:
        document["output"] = remote.run(found, node, command)
    return document


@contextmanager
def tunnel(im: Manager, record: Record, port: int) -> Iterator[tuple[str, Callable[[], None]]]:
    """Open an SSH tunnel to the chief's TensorBoard; gives its URL and a function that waits.

    Raises RemoteError when nothing answers at the other end.
    """
    found = nodes(im, record)
    chief = remote.choose(found, "worker-0")
    local = port or _free_port()
    forward = f"127.0.0.1:{local}:{chief.private_ip}:{TENSORBOARD_PORT}"
    options = ("-N", "-o", "ExitOnForwardFailure=yes", "-L", forward)
    with remote.login(found, chief, options) as line:
        # In a session of its own, so that Ctrl-C reaches us first and the tunnel ends quietly.
        process = subprocess.Popen(
            line,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            url = f"http://127.0.0.1:{local}/"
            _await(url, process)
            yield url, lambda: _wait(process)
        finally:
            process.terminate()
            process.wait()


def _wait(process: subprocess.Popen[str]) -> None:
    try:
        process.wait()
    except KeyboardInterrupt:
        return
    raise RemoteError("the tunnel was closed by the other end", "is the run still there?")


def _await(url: str, process: subprocess.Popen[str]) -> None:
    """Return when TensorBoard answers through the tunnel; it takes its time to start."""
    deadline = time.monotonic() + TUNNEL_PATIENCE_S
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while time.monotonic() < deadline:
        if process.poll() is not None:
            said = (process.stderr.read() if process.stderr else "").strip().splitlines()
            cause = said[-1] if said else "no cause given"
            raise RemoteError(f"the tunnel to TensorBoard could not be opened: {cause}")
        try:
            direct.open(url, timeout=5).close()
        except OSError:
            time.sleep(0.5)
        else:
            return
    raise RemoteError(
        f"TensorBoard has not answered for {TUNNEL_PATIENCE_S:.0f} s",
        "it runs from the start of training on, unless the job file says tensorboard: false",
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
