"""The identity of one run, and what is known of it before its nodes exist."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from datetime import UTC, datetime

from mayfly.spec import ClusterSpec


@dataclass(frozen=True)
class Run:
    """What a rendered RADL says about one run besides its spec and its cloud. Holds no secret."""

    id: str
    """Identifier: `<name>-<yymmdd-hhmmss>-<4 hex digits>`, at most 48 of a-z, 0-9 and dash."""
    image: str
    """IM's image URL of the nodes."""
    collection: str
    """What IM installs our roles from: an URL of the tarball, `mayfly.training,<version>`, or the
    placeholder of an URL that is signed."""
    s3_endpoint: str | None
    """URL of the S3 service as nodes reach it; None for Amazon's."""
    s3_region: str
    """Region of the bucket."""
    session_token: bool = False
    """The S3 keys are temporary ones, which come with a session token."""
    keep: bool = False
    """The nodes are to be kept after the run."""
    region: str | None = None
    """Region of the nodes, where the cloud has any."""

    train_s: int | None = None
    """When its budget stops the training, in seconds since the nodes were made."""
    end_s: int | None = None
    """When, by its budget, the nodes have to be gone."""

    def uri(self, spec: ClusterSpec) -> str:
        """Where all that the run knows about itself lies: `s3://bucket/prefix/<run id>/`."""
        return f"{spec.model.destination}{self.id}/"


def new_run_id(name: str, now: datetime | None = None) -> str:
    """A new identifier for a run called `name`, from the time (UTC) and two random bytes."""
    moment = (now or datetime.now(UTC)).strftime("%y%m%d-%H%M%S")
    return f"{name}-{moment}-{secrets.token_hex(2)}"
