"""The last part of a run, the export of its model, and to take it up again after it has failed.

A model that is not in the bucket is on the nodes only. So when its export fails the nodes are kept,
and `mayfly export` brings it home, with the keys of today.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mayfly import access, remote
from mayfly.credentials import S3Settings
from mayfly.display import Phases
from mayfly.errors import LimitReached, MayflyError, UserError
from mayfly.im import Manager
from mayfly.ledger import Record
from mayfly.run_store import RunStore
from mayfly.services import Services
from mayfly.verify import verify_model
from mayfly.watch import (
    EXPORT_FAILED,
    STOPPED,
    SUCCEEDED,
    Broken,
    NotExported,
    Pace,
    Status,
    describe,
    wait_for_status,
)
from mayfly_train.errors import NodeError

# Longer than SSH and a NameNode on a busy node take together.
RESUME_S = 180.0
# The new file replaces the old one only when it is whole; nobody else can ever read it.
SCRIPT = (
    "set -e; umask 077; cat > /etc/mayfly/s3.env.new; mv /etc/mayfly/s3.env.new /etc/mayfly/s3.env;"
    " exec /usr/local/bin/mayfly-node resume-export"
)
HOLD = "touch /etc/mayfly/keep"


@dataclass(frozen=True)
class Watched:
    """A run whose export is followed."""

    run: str
    uri: str
    services: Services
    infrastructure: str
    pace: Pace

    def nodes(self) -> str:
        """Return the nodes' states, to explain a silence."""
        try:
            return silent_nodes(self.services.im, self.infrastructure)
        except MayflyError as error:
            return str(error)


def silent_nodes(im: Manager, infrastructure: str) -> str:
    """Return which nodes do not answer over SSH; IM's states of all when each does."""
    found = im.nodes(infrastructure)
    silent = []
    for name, node in remote.names(found).items():
        try:
            remote.run(found, node, ["true"], timeout=15)
        except MayflyError:
            silent.append(f"{name} ({node.state})")
    if silent:
        return f"no answer from {', '.join(silent)}; see `mayfly status`"
    return f"every node answers: {describe(im.state(infrastructure))}"


def follow(watched: Watched, read: Callable[[], Status | None], phases: Phases) -> Status:
    """Return the last status once the model was verified; raises NotExported when it is not.

    A run that its limits ended meanwhile raises LimitReached.
    """
    try:
        with phases.phase("export") as report:
            status = wait_for_status(
                (SUCCEEDED, STOPPED),
                read,
                watched.nodes,
                watched.pace,
                lambda now: report(*now.exported()),
            )
            found = verify_model(watched.services.client, watched.uri)
            report(f"{len(found.files)} files verified, {found.total_bytes / 2**20:,.1f} MiB", 1.0)
    except LimitReached:
        raise
    except (MayflyError, NodeError) as error:
        raise not_exported(error, watched.run) from error
    return status


def not_exported(error: Exception, run: str) -> NotExported:
    """The error that says what became of the model."""
    details = error.details if isinstance(error, Broken) else {}
    return NotExported(
        str(error), f"the model is on the nodes only: `mayfly export {run}`", details
    )


def explained(error: Broken, run: str) -> Broken:
    """The same error, or NotExported for an export that failed between two looks."""
    of_export = (error.details.get("message") or "").startswith(EXPORT_FAILED)
    return not_exported(error, run) if of_export else error


def hold_nodes(im: Manager, record: Record, say: Callable[[str], None]) -> None:
    """Let the dead-man timer wait for its longest limit: the model is on these nodes only."""
    try:
        found = access.nodes(im, record)
        for node in found:
            remote.run(found, node, remote.as_root(HOLD))
    except MayflyError as error:
        say(f"the nodes power off before long, export soon: {error}")


def resume(record: Record, services: Services, phases: Phases, pace: Pace) -> Status:
    """Take up a failed export with the keys of now and follow it to its end.

    Raises UserError for a run without nodes or with nothing to export, NotExported when it fails.
    """
    if record.outcome == "succeeded":
        raise UserError(f"run {record.run} has its model in {record.uri}", "nothing is to be done")
    found = access.nodes(services.im, record)
    store = RunStore(services.client, record.uri)
    before = store.status()
    with phases.phase("resume"):
        chief = remote.choose(found, None)
        remote.run(found, chief, remote.as_root(SCRIPT), RESUME_S, env_file(services.s3))

    def read() -> Status | None:
        status = store.status()
        return None if before and status and status.updated == before.updated else status

    infrastructure = record.infrastructure or ""
    return follow(Watched(record.run, record.uri, services, infrastructure, pace), read, phases)


def env_file(s3: S3Settings) -> str:
    """The text of a node's s3.env, as role model_export writes it."""
    values = {**s3.plain().environ(), "AWS_EC2_METADATA_DISABLED": "true"}
    quoted = {n: v.replace("\\", "\\\\").replace('"', '\\"') for n, v in values.items() if v}
    return "".join(f'{name}="{value}"\n' for name, value in quoted.items())
