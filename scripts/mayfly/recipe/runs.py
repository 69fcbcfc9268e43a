"""Runs of recipes: where one lies, how it begins, and how another machine finds it again."""

from __future__ import annotations

import difflib
import hashlib
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mayfly.errors import UserError, unknown
from mayfly.local.paths import find_paths
from mayfly.recipe.load import Loaded, load
from mayfly.spec import s3_uri, without_users
from mayfly_train.recipe import document, globs, names, sources
from mayfly_train.recipe.head import Run
from mayfly_train.recipe.ledger import Ledger, last_head
from mayfly_train.recipe.store import S3Store, Store, open_store, read_json, to_bytes

PREFIX = "recipes"


@dataclass(frozen=True)
class Place:
    """A run's objects, and this machine's files about it."""

    name: str
    store: Store
    state: Path

    @property
    def ledger_file(self) -> Path:
        """Where the head's ledger is on this machine."""
        return self.state / "ledger.sqlite"


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
    store = open_store(f"{base_address(given, environ)}/{PREFIX}/{name}", None)
    # Runs of one name in two stores know nothing of each other.
    key = hashlib.sha256(store.address.encode()).hexdigest()[:8]
    return Place(name, store, find_paths(environ).state.parent / PREFIX / name / key)


def latest(environ: Mapping[str, str] = os.environ) -> str:
    """The name of the run that this machine worked on last. Raises UserError without any."""
    known = sorted(
        (find_paths(environ).state.parent / PREFIX).glob("*/*/ledger.sqlite"),
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


def open_ledger(place: Place) -> Ledger:
    """The ledger: this machine's, or the store's copy when another machine worked on it last, or
    when this machine's is of an earlier run of this name, which was removed from the store."""
    head = read_json(place.store, names.HEAD)
    elsewhere = head is not None and head["id"] != last_head(place.ledger_file)
    run = hashlib.sha256(place.store.read(names.RUN) or b"").hexdigest()
    place.state.mkdir(parents=True, exist_ok=True, mode=0o700)
    note = place.state / "run"
    known = note.read_text() if note.exists() else ""
    if elsewhere or known != run or not place.ledger_file.exists():
        _fetch_ledger(place)
        note.write_text(run)
    return Ledger(place.ledger_file)


def _fetch_ledger(place: Place) -> None:
    """The store's copy instead of what is here; nothing when there is none."""
    fetched = place.state / "fetched.sqlite"
    fetched.unlink(missing_ok=True)
    if names.LEDGER in place.store.names(names.LEDGER):
        place.store.download(names.LEDGER, fetched)
    for path in place.state.glob("ledger.sqlite*"):
        path.unlink()
    if fetched.exists():
        fetched.rename(place.ledger_file)


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
    client = place.store.client if isinstance(place.store, S3Store) else None

    def find(pattern: str) -> list[str]:
        return globs.find(pattern, client, _source(kept["source"], place))

    return Run(
        recipe=document.from_json(kept["recipe"]),
        source=kept["source"],
        store=place.store,
        find=find,
    )


def _source(digest: str, place: Place) -> Path | None:
    """What tasks get a copy of, unpacked here: this may be another machine than the run began on,
    and the directory may have changed since. None without one."""
    return sources.unpacked(digest, place.state / "sources", place.store) if digest else None


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
