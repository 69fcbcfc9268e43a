"""A run found again from its store alone: the recipe as it began, and the head's ledger."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mayfly_train.errors import BadInput
from mayfly_train.recipe import document, globs, names, sources
from mayfly_train.recipe.head import Run
from mayfly_train.recipe.ledger import Ledger, last_head
from mayfly_train.recipe.store import S3Store, Store, read_json


def open_ledger(store: Store, state: Path) -> Ledger:
    """The ledger: this machine's, or the store's copy when another machine worked on it last, or
    when this machine's is of an earlier run of this name, which was removed from the store."""
    head, file = read_json(store, names.HEAD), state / names.LEDGER
    elsewhere = head is not None and head["id"] != last_head(file)
    run = hashlib.sha256(store.read(names.RUN) or b"").hexdigest()
    state.mkdir(parents=True, exist_ok=True, mode=0o700)
    note = state / "run"
    known = note.read_text() if note.exists() else ""
    if elsewhere or known != run or not file.exists():
        _fetch_ledger(store, state)
        note.write_text(run)
    return Ledger(file)


def _fetch_ledger(store: Store, state: Path) -> None:
    """The store's copy instead of what is here; nothing when there is none."""
    fetched = state / "fetched.sqlite"
    fetched.unlink(missing_ok=True)
    if names.LEDGER in store.names(names.LEDGER):
        store.download(names.LEDGER, fetched)
    for path in state.glob(f"{names.LEDGER}*"):
        path.unlink()
    if fetched.exists():
        fetched.rename(state / names.LEDGER)


def open_run(store: Store, state: Path) -> Run:
    """The run at a store. Raises BadInput when there is none."""
    kept = read_json(store, names.RUN)
    if kept is None:
        raise BadInput(f"there is no run at {store.address} — start it with `mayfly recipe run`")
    return run_of(kept, store, state)


def run_of(kept: Mapping[str, Any], store: Store, state: Path) -> Run:
    """The run in the document that it began with; files of this machine's lie below `state`."""
    client = store.client if isinstance(store, S3Store) else None

    def find(pattern: str) -> list[str]:
        return globs.find(pattern, client, _source(kept["source"], store, state))

    return Run(
        recipe=document.from_json(kept["recipe"]), source=kept["source"], store=store, find=find
    )


def _source(digest: str, store: Store, state: Path) -> Path | None:
    """What tasks get a copy of, unpacked here: this may be another machine than the run began on,
    and the directory may have changed since. None without one."""
    return sources.unpacked(digest, state / "sources", store) if digest else None
