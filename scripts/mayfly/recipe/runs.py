"""Runs of recipes: where one lies, how it begins, and how another machine finds it again."""

from __future__ import annotations

import difflib
import hashlib
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mayfly import run_lock
from mayfly.errors import UserError, unknown
from mayfly.local.paths import find_paths
from mayfly.recipe.load import Loaded, load
from mayfly.spec import s3_uri, without_users
from mayfly_train.recipe import book, names, sources
from mayfly_train.recipe.head import Run
from mayfly_train.recipe.ledger import Ledger
from mayfly_train.recipe.store import Store, open_store, read_json, to_bytes
from mayfly_train.s3 import S3Settings

PREFIX = "recipes"


@dataclass(frozen=True)
class Place:
    """A run's objects, and this machine's files about it."""

    name: str
    store: Store
    state: Path
    environ: Mapping[str, str] = field(default_factory=dict, repr=False)
    """The store's keys, where they are not this process's own."""


def base_address(given: str | None, environ: Mapping[str, str]) -> str:
    """Where runs are kept: a bucket, or a directory; one of this machine's when none is given."""
    wanted = given or environ.get("MAYFLY_BUCKET")
    if not wanted:
        return str(find_paths(environ).state.parent / "store")
    if wanted.startswith(("/", ".", "~")):
        return str(Path(wanted).expanduser().absolute())
    try:
        return s3_uri(wanted).rstrip("/")
    except ValueError as error:
        raise UserError(f"--store {wanted!r} is no place for runs", f"{error}, or a path") from None


def find_place(name: str, given: str | None, environ: Mapping[str, str] = os.environ) -> Place:
    """The place of a run of this name, whether or not it is there yet."""
    return place_at(f"{base_address(given, environ)}/{PREFIX}/{name}", name, None, environ)


def place_at(
    address: str, name: str, settings: S3Settings | None, environ: Mapping[str, str]
) -> Place:
    """The place of a run at an address; without settings, S3's keys are the environment's."""
    store = open_store(address, settings)
    # Runs of one name in two stores know nothing of each other.
    key = hashlib.sha256(store.address.encode()).hexdigest()[:8]
    state = find_paths(environ).state.parent / PREFIX / name / key
    return Place(name, store, state, settings.environ() if settings else {})


def latest(environ: Mapping[str, str] = os.environ) -> str:
    """The name of the run that this machine worked on last. Raises UserError without any."""
    runs = find_paths(environ).state.parent / PREFIX
    known = sorted(
        (path for name in ("ledger.sqlite", "nodes.json") for path in runs.glob(f"*/*/{name}")),
        key=lambda path: path.stat().st_mtime,
    )
    if not known:
        raise UserError("no recipe was run here", "start one with `mayfly recipe run FILE`")
    return known[-1].parent.parent.name


def create(loaded: Loaded, place: Place) -> Run:
    """Begin a run: the recipe and its source go into the store, once.

    Raises UserError when there is a run of this name, with what differs.
    """
    source = sources.put(loaded.source, place.store)
    kept = {
        "recipe": loaded.recipe.to_json(),
        "digest": loaded.recipe.digest,
        "text": loaded.text,
        "source": source,
        "id": secrets.token_hex(8),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    if not place.store.create(names.RUN, to_bytes(kept)):
        _refuse_changes(loaded, source, place)
        raise UserError(
            f"there is a run {place.name!r} of this recipe in {place.store.address}",
            f"go on with `mayfly recipe resume {place.name}`, or choose another --name",
        )
    return _run(kept, place)


def reopen(place: Place, file: Path | None = None) -> Run:
    """The run as it began. `file` is compared with it.

    Raises UserError when there is none, and when the recipe or its source was changed since.
    """
    kept = _kept(place)
    if file is not None:
        loaded = load(file, place.name)
        _refuse_changes(loaded, sources.put(loaded.source, place.store), place)
    return _run(kept, place)


@contextmanager
def worked_on(place: Place) -> Iterator[Ledger]:
    """This machine's ledger, for the one process here that may change it and what lies beside it.

    Raises UserError while another one does.
    """
    with run_lock.held(place.state, place.name, "mayfly recipe", look="mayfly recipe status"):
        ledger = book.open_to_work(place.store, place.state)
        try:
            yield ledger
        finally:
            ledger.close()


def read_ledger(place: Place) -> Ledger:
    """What is known of a run, to look at: this machine's ledger, or the store's copy when another
    machine worked on it last. No file is changed."""
    return book.open_to_read(place.store, place.state)


def _kept(place: Place) -> dict[str, Any]:
    kept = read_json(place.store, names.RUN)
    if kept is not None:
        return dict(kept)
    known = place.state.parent.parent
    others = [path.name for path in known.iterdir()] if known.exists() else []
    if others:
        raise unknown("run", place.name, others, f"nothing is at {place.store.address}")
    where = place.store.address
    raise UserError(f"there is no run {place.name!r} at {where}", "check the name and --store")


def _run(kept: Mapping[str, Any], place: Place) -> Run:
    return book.run_of(kept, place.store, place.state)


def _refuse_changes(loaded: Loaded, source: str, place: Place) -> None:
    """Raise UserError, with the difference, when a recipe is not the one that its run began with.

    What has run would not fit what is still to run.
    """
    kept = _kept(place)
    advice = f"take the change back, or run it as another: mayfly recipe run {loaded.file} --name …"
    if kept["digest"] != loaded.recipe.digest:
        lines = difflib.unified_diff(
            kept["text"].splitlines(),
            loaded.text.splitlines(),
            "the run's",
            "now",
            n=0,
            lineterm="",
        )
        changed = [line for line in lines if not line.startswith(("---", "+++", "@@"))]
        shown = without_users("; ".join(changed[:6])) or "its experiments differ"
        raise UserError(f"recipe {place.name!r} was changed since its run began: {shown}", advice)
    if kept["source"] != source:
        raise UserError(f"the source of {place.name!r} was changed since its run began", advice)
