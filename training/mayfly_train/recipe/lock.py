"""One head for a run: a lease in the store, renewed while it works."""

from __future__ import annotations

import os
import secrets
import socket
import time

from mayfly_train.errors import BadInput, NodeError
from mayfly_train.recipe import identity, names
from mayfly_train.recipe.store import Store, read_json, to_bytes

EVERY_S = 5.0
STALE_S = 30.0


class Lease:
    """Held by at most one head; a dead one's is taken over, at once on the same machine."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.id = secrets.token_hex(8)
        self._renewed = 0.0

    def take(self) -> None:
        """Raises BadInput while another head holds it."""
        require_free(self._store)
        self._write()

    def renew(self) -> None:
        """Say that this head works. Raises NodeError when another has taken over."""
        if time.monotonic() - self._renewed < EVERY_S:
            return
        held = read_json(self._store, names.HEAD)
        if held is None or held["id"] != self.id:
            raise NodeError(f"another head has taken over {self._store.address} — this one ends")
        self._write()

    def release(self) -> None:
        """Let another have it at once."""
        held = read_json(self._store, names.HEAD)
        if held is not None and held["id"] == self.id:
            self._store.write(names.HEAD, to_bytes({**held, "beat": 0}))

    def is_ours(self) -> bool:
        """Whether no other head has taken over."""
        held = read_json(self._store, names.HEAD)
        return held is not None and held["id"] == self.id

    def _write(self) -> None:
        document = {
            "id": self.id,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "process": identity.own(),
            "beat": time.time(),
        }
        self._store.write(names.HEAD, to_bytes(document))
        self._renewed = time.monotonic()


def require_free(store: Store) -> None:
    """Raise BadInput while a head works on the run."""
    held = read_json(store, names.HEAD)
    if held is not None and _is_alive(held):
        raise BadInput(
            f"{store.address} is run by process {held['pid']} on {held['host']} — wait for it, or "
            "end it first"
        )


def is_held(store: Store) -> bool:
    """Whether a head works on the run."""
    held = read_json(store, names.HEAD)
    return held is not None and _is_alive(held)


def _is_alive(held: dict[str, object]) -> bool:
    """Whether a head works: seen, when it is on this machine and in this boot of it, else by its
    last word. A host's name alone says neither."""
    name = str(held["process"])
    if held["beat"] and identity.is_here(name):
        return not identity.is_gone(name)
    return time.time() - float(str(held["beat"])) < STALE_S
