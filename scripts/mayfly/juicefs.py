"""A run's shared file system on JuiceFS: what it is called, where it is, and the end of its data.

JuiceFS puts all objects of a file system below its name at the top of a bucket, and takes no other
prefix. Nodes that are gone cannot remove them, and the model of a failed run may still be among
them, so the control side deletes them when it destroys the nodes.
"""

from __future__ import annotations

from typing import Any

from mayfly.errors import RemoteError
from mayfly.ledger import Record
from mayfly.spec import JUICEFS, split_s3_uri
from mayfly_train import s3
from mayfly_train.errors import NodeError

MOUNT_POINT = "/mnt/mayfly"
MODEL_DIR = f"{MOUNT_POINT}/model"


def store_name(run: str) -> str:
    """The name of a run's file system: 54 characters at most, and JuiceFS takes 63."""
    return f"{run}-store"


def image_extras(store: str) -> tuple[str, ...]:
    """What the node image of CLOUD=local needs for a job's `store` beside what all nodes have."""
    return (JUICEFS,) if store == JUICEFS else ()


def uri_of(record: Record) -> str | None:
    """Where the objects of a recorded run's file system lie, None when it has none."""
    if record.spec.get("store") != JUICEFS:
        return None
    bucket, _ = split_s3_uri(record.uri)
    return f"s3://{bucket}/{store_name(record.run)}/"


def count(client: Any, uri: str) -> int | None:
    """How many objects a run's file system has in the bucket; None when that does not answer."""
    try:
        return len(s3.list_sizes(client, s3.parse_uri(uri)))
    except NodeError:
        return None


def is_left(client: Any, record: Record) -> bool:
    """Whether a run's objects are in the bucket, or may be, as the bucket does not answer."""
    uri = uri_of(record)
    return uri is not None and count(client, uri) != 0


def remove(client: Any, uri: str) -> int:
    """Delete the objects and return how many there were; none are left then.

    Raises RemoteError that names the address when they cannot be deleted.
    """
    try:
        return s3.delete_below(client, s3.parse_uri(uri))
    except NodeError as error:
        raise RemoteError(
            f"the run's file system is still in the bucket: {error}",
            f"run `mayfly destroy` again, or delete {uri} by hand",
        ) from error
