"""One head for a run: a lease in the store, renewed while it works.

How old it is, is told by the store's clock alone: those of two machines may differ by more than a
lease lasts.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from mayfly_train.errors import BadInput, NodeError
from mayfly_train.recipe import identity, names
from mayfly_train.recipe.store import Store, read_json, to_bytes

EVERY_S = 5.0
STALE_S = 30.0
STUCK_S = 600.0  # a head that has not turned for so long works no more, though its process lives
_LOOK_S = 1.0


class Lease:
    """Held by at most one head; a dead one's is taken over, at once on the same machine."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.id = secrets.token_hex(8)
        self._renewed = self._turned = 0.0
        self._one = threading.Lock()
        self._ended = threading.Event()

    def take(self) -> None:
        """Raises BadInput while another head holds it."""
        require_free(self._store)
        self._turned = time.monotonic()
        self._write()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Renew it beside the block, in which the head may be busy for longer than a lease lasts:
        it lists a million markers, or copies a large ledger."""
        threading.Thread(target=self._keep, name="lease", daemon=True).start()
        try:
            yield
        finally:
            self._ended.set()

    def _keep(self) -> None:
        while not self._ended.wait(_LOOK_S):
            self.keep()

    def keep(self) -> None:
        """Renew it for a head that has turned within STUCK_S; what fails is tried again, and the
        head itself sees when another has taken over."""
        if time.monotonic() - self._turned < STUCK_S:
            with suppress(NodeError):
                self._renew()

    def renew(self) -> None:
        """Say that this head turns. Raises NodeError when another has taken over."""
        self._turned = time.monotonic()
        self._renew()

    def _renew(self) -> None:
        with self._one:
            if self._ended.is_set() or time.monotonic() - self._renewed < EVERY_S:
                return
            held = read_json(self._store, names.HEAD)
            if held is None or held["id"] != self.id:
                where = self._store.address
                raise NodeError(f"another head has taken over {where} — this one ends")
            self._write()

    def release(self) -> None:
        """Let another have it at once."""
        self._ended.set()
        with self._one:
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
    if held is not None and _is_alive(held, store):
        raise BadInput(
            f"{store.address} is run by process {held['pid']} on {held['host']} — wait for it, or "
            "end it first"
        )


def is_held(store: Store) -> bool:
    """Whether a head works on the run."""
    held = read_json(store, names.HEAD)
    return held is not None and _is_alive(held, store)


def _is_alive(held: dict[str, object], store: Store) -> bool:
    """Whether a head works: seen, when it is on this machine and in this boot of it, else by the
    age of its last word. A host's name alone says neither."""
    name = str(held["process"])
    if not held["beat"]:
        return False  # it has let go
    if identity.is_here(name):
        return not identity.is_gone(name)
    age = store.age(names.HEAD)
    return age is not None and age < STALE_S
