"""A run found again from its store alone: the recipe as it began, and the head's ledger."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mayfly_train.errors import BadInput
from mayfly_train.recipe import document, globs, names, sources
from mayfly_train.recipe.head import Run
from mayfly_train.recipe.ledger import COPY, LIVE, Ledger, last_head, replace_content
from mayfly_train.recipe.store import S3Store, Store, read_json


def open_to_work(store: Store, state: Path) -> Ledger:
    """This machine's ledger, for whoever works on the run, and is the only one here. It becomes
    what the store's copy is when another machine worked on the run last, or when it is of an
    earlier run of this name, which was removed from the store."""
    file, note = state / names.LEDGER, state / "run"
    run = hashlib.sha256(store.read(names.RUN) or b"").hexdigest()
    known = note.read_text() if note.exists() else ""
    head = read_json(store, names.HEAD)
    elsewhere = head is not None and head["id"] != last_head(file)
    state.mkdir(parents=True, exist_ok=True, mode=0o700)
    if elsewhere or known != run or not file.exists():
        with _copy(store) as copy:
            replace_content(file, copy)
        note.write_text(run)
    return Ledger(file)


def open_to_read(store: Store, state: Path) -> Ledger:
    """What is known of a run, for whoever looks: this machine's ledger when the last head worked
    with it, else the store's copy. Nothing of the state directory is changed."""
    file, head = state / names.LEDGER, read_json(store, names.HEAD)
    if head is not None and head["id"] == last_head(file) and file.exists():
        return Ledger(file, LIVE)
    with _copy(store) as copy:  # it is read on after its name is gone
        return Ledger(copy, COPY) if copy else Ledger(Path(":memory:"))


@contextmanager
def _copy(store: Store) -> Iterator[Path | None]:
    """The store's copy of the ledger, in a file of our own for so long; None without one."""
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory) / names.LEDGER
        there = names.LEDGER in store.names(names.LEDGER)
        if there:
            store.download(names.LEDGER, copy)
        yield copy if there else None


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
