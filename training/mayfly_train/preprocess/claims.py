"""Who does what: claims on the items of a common work, as files in one directory of HDFS.

A claim is `<item>.<attempt>.claim`, and only one node can make it: HDFS lets one of several that
create the same new file win. Its holder renews the file's time of change. Where a claim is silent,
or its attempt has left an error, the next attempt is free, again for exactly one node. Nothing is
ever deleted or renamed to pass an item on, so there is no moment at which two could have it.

Beside the claims: `<item>.<attempt>.by.<node>` names the holder, `….error` says how an attempt has
failed, `….record` what it has made, and `<item>.done` is the record of the one that counts.
"""

from __future__ import annotations

import json
import logging
import posixpath
import re
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from mayfly_train.errors import BadInput, NodeError
from mayfly_train.hdfs import FileInfo
from mayfly_train.preprocess.store import Store
from mayfly_train.retry import with_backoff

ATTEMPTS = 3
_NAME = re.compile(r"(?P<item>.+)\.(?P<attempt>\d+)\.(?P<what>claim|error|by)(?:\.(?P<node>.+))?")
_NODE = re.compile(r"[\w.-]+")
log = logging.getLogger(__name__)


class GivenUp(NodeError):
    """An item whose last attempt has failed."""


@dataclass(frozen=True)
class Pace:
    """Seconds: between two looks, between two renewals, after which a holder is silent, and after
    which one that gets no further no longer renews."""

    look: float = 1.0
    renew: float = 2.0
    silent: float = 10.0
    stuck: float = 180.0
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


@dataclass(frozen=True)
class Claim:
    """One attempt, from 1 on, at one item."""

    item: str
    attempt: int

    def file(self, what: str) -> str:
        """The name of one of its files."""
        return f"{self.item}.{self.attempt}.{what}"


@dataclass(frozen=True)
class View:
    """What one look at the directory shows: claims with their time of change in ms since 1970."""

    renewed: Mapping[Claim, int] = field(default_factory=dict)
    errors: frozenset[Claim] = frozenset()
    done: frozenset[str] = frozenset()
    holders: Mapping[Claim, str] = field(default_factory=dict)

    def latest(self, item: str) -> Claim | None:
        """The newest claim on an item."""
        attempts = [claim.attempt for claim in self.renewed if claim.item == item]
        return Claim(item, max(attempts)) if attempts else None


def read_view(files: Iterable[FileInfo]) -> View:
    """What these files say."""
    renewed, holders = {}, {}
    errors, done = set(), set()
    for info in files:
        name = posixpath.basename(info.path)
        match = _NAME.fullmatch(name)
        if name.endswith(".done"):
            done.add(name.removesuffix(".done"))
        elif match:
            claim = Claim(match["item"], int(match["attempt"]))
            if match["what"] == "claim":
                renewed[claim] = info.modified_ms
            elif match["what"] == "error":
                errors.add(claim)
            else:
                holders[claim] = match["node"] or ""
    return View(renewed, frozenset(errors), frozenset(done), holders)


class Silence:
    """Which claims are not renewed, by this node's own clock: clocks of nodes may differ.

    Time in which nobody looked (a shard was converted, HDFS was away) counts little: a holder has
    to be silent while one looks.
    """

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._last_look: float | None = None
        self._seen: dict[Claim, tuple[int, float]] = {}  # when renewed, and for how long silent

    def after(self, view: View) -> frozenset[Claim]:
        """The claims that are silent now, after this look."""
        now = self._pace.clock()
        passed = 0.0 if self._last_look is None else now - self._last_look
        counted = min(passed, 2 * self._pace.look)
        self._last_look = now
        before, self._seen = self._seen, {}
        for claim, renewed in view.renewed.items():
            then, quiet = before.get(claim, (None, 0.0))
            self._seen[claim] = (renewed, quiet + counted if then == renewed else 0.0)
        return frozenset(
            claim for claim, (_, quiet) in self._seen.items() if quiet >= self._pace.silent
        )


def free_claims(items: Iterable[str], view: View, silent: Collection[Claim]) -> list[Claim]:
    """The claims that may be made: of items that nobody works on, and that are not given up."""
    free = []
    for item in items:
        latest = view.latest(item)
        if latest is None:
            free.append(Claim(item, 1))
        elif (latest in silent or latest in view.errors) and latest.attempt < ATTEMPTS:
            free.append(Claim(item, latest.attempt + 1))
    return free


def given_up(items: Iterable[str], view: View, silent: Collection[Claim]) -> Claim | None:
    """The last attempt at an item that nobody may try again, None when there is none."""
    for item in items:
        latest = view.latest(item)
        ended = latest is not None and (latest in silent or latest in view.errors)
        if latest and ended and latest.attempt >= ATTEMPTS:
            return latest
    return None


class Board:
    """The directory of claims, for one node."""

    def __init__(self, store: Store, directory: str, node: str, pace: Pace) -> None:
        if not _NODE.fullmatch(node):
            raise BadInput(f"not a node's name: {node!r} — use letters, digits, '.', '_' and '-'")
        self._store, self._directory, self._node = store, directory, node
        self._silence, self._pace = Silence(pace), pace

    def path(self, name: str) -> str:
        """The path of a file of the board."""
        return posixpath.join(self._directory, name)

    def look(self) -> tuple[View, frozenset[Claim]]:
        """What is there, and which claims are silent."""
        view = read_view(with_backoff(lambda _: self._store.list_directory(self._directory)))
        return view, self._silence.after(view)

    def take(self, claim: Claim) -> bool:
        """Make a claim; False when another node was quicker."""
        if not with_backoff(lambda _: self._store.create_new(self.path(claim.file("claim")))):
            return False
        with_backoff(lambda _: self._store.create_new(self.path(claim.file(f"by.{self._node}"))))
        return True

    def renewing(self, claim: Claim) -> Renewing:
        """A context in which a claim is renewed."""
        path = self.path(claim.file("claim"))
        return Renewing(lambda now_ms: self._store.touch(path, now_ms), self._pace)

    def write_record(self, claim: Claim, record: Mapping[str, Any]) -> None:
        """Say what an attempt has made, and that this node did it."""
        document = {**record, "node": self._node, "attempts": claim.attempt}
        path, data = self.path(claim.file("record")), json.dumps(document).encode()
        with_backoff(lambda _: self._store.write_bytes(path, data))

    def read_record(self, claim: Claim) -> dict[str, Any] | None:
        """What an attempt has said that it has made; None when it came to nothing."""
        path = self.path(claim.file("record"))
        if with_backoff(lambda _: self._store.status(path)) is None:
            return None
        return dict(json.loads(with_backoff(lambda _: self._store.read_bytes(path))))

    def set_done(self, claim: Claim) -> None:
        """Let this attempt's record count, unless another attempt's does."""
        record, done = self.path(claim.file("record")), self.path(f"{claim.item}.done")
        with_backoff(lambda _: self._store.rename_new(record, done))

    def read_done(self, item: str) -> dict[str, Any]:
        """The record of an item that is done."""
        path = self.path(f"{item}.done")
        return dict(json.loads(with_backoff(lambda _: self._store.read_bytes(path))))

    def write_error(self, claim: Claim, error: BaseException) -> None:
        """Say that an attempt has failed: the next one is free then."""
        text = " ".join(str(error).split()) or type(error).__name__
        log.warning("%s failed, attempt %d of %d: %s", claim.item, claim.attempt, ATTEMPTS, text)
        path = self.path(claim.file("error"))
        with_backoff(lambda _: self._store.write_bytes(path, f"{self._node}: {text}".encode()))

    def failure(self, claim: Claim, view: View) -> GivenUp:
        """The error to raise for an item that is given up."""
        holder = view.holders.get(claim, "its node")
        reason = f"{holder} went silent"
        if claim in view.errors:
            path = self.path(claim.file("error"))
            reason = with_backoff(lambda _: self._store.read_bytes(path)).decode(errors="replace")
        return GivenUp(
            f"preprocessing {claim.item} failed {claim.attempt} times, at last on {reason} — put "
            f"that right, delete {self._directory} in HDFS and run it again"
        )


class Renewing:
    """Renews a claim from a thread while its holder says, by `beat`, that it gets ahead.

    A holder that hangs for longer than the pace allows is not renewed, and loses its claim.
    """

    def __init__(self, touch: Callable[[int], None], pace: Pace) -> None:
        self._touch, self._pace = touch, pace
        self._ended = threading.Event()
        self._beat = pace.clock()
        self._thread = threading.Thread(target=self._renew_now_and_then, daemon=True)

    def beat(self) -> None:
        """Say that the work goes on."""
        self._beat = self._pace.clock()

    def __enter__(self) -> Renewing:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join(self._pace.renew)  # a call that hangs must not hold up the work

    def _renew_now_and_then(self) -> None:
        while not self._ended.wait(self._pace.renew):
            if self._pace.clock() - self._beat > self._pace.stuck:
                continue
            try:
                self._touch(int(time.time() * 1000))
            except NodeError as error:
                log.warning("cannot renew a claim: %s", error)
