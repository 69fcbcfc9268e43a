"""One node's part in preprocessing: takes shard after shard until all are done, by whomever.

A shard is written to a temporary name, its length and the number of its examples are compared with
what they have to be, and only then it is renamed; a name that is there is never written again.
"""

from __future__ import annotations

import hashlib
import posixpath
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from mayfly_train import manifest
from mayfly_train.convert.dataset import METADATA
from mayfly_train.errors import BadInput
from mayfly_train.hdfs import PART_SUFFIX, HdfsFailure
from mayfly_train.manifest import Manifest
from mayfly_train.preprocess.claims import Board, Claim, Pace, free_claims, given_up
from mayfly_train.preprocess.encode import Batch, encode
from mayfly_train.preprocess.options import Options
from mayfly_train.preprocess.result import documents
from mayfly_train.preprocess.shards import Shard, plan
from mayfly_train.preprocess.source import (
    Source,
    open_source,
    read_manifest,
    sizes_below,
    wait_until_whole,
)
from mayfly_train.preprocess.store import Store
from mayfly_train.retry import with_backoff
from mayfly_train.staging_progress import StagingProgress

# Programs and Hadoop's input formats skip names that start with "_".
STATE_DIRECTORY = "_preprocess"
FINISH = "result"  # the last item: metadata and manifest
_PLAN = "plan-"


@dataclass(frozen=True)
class Work:
    """From which directory of HDFS to which other one, in what form, and who this node is."""

    store: Store
    source: str
    destination: str
    options: Options
    node: str
    pace: Pace = Pace()

    def path(self, *parts: str) -> str:
        """A path below the destination."""
        return posixpath.join(self.destination, *parts)


@dataclass(frozen=True)
class Result:
    """What this node did: shards, examples and bytes; of how many shards; in how many seconds."""

    changed: bool
    shards: int = 0
    of: int = 0
    examples: int = 0
    bytes: int = 0
    seconds: float = 0.0


def preprocess(work: Work, progress: StagingProgress) -> Result:
    """Convert shards that nobody else converts, and return when all of them are done.

    Raises BadInput when source or destination are not what they should be, GivenUp when a shard
    has failed at its last attempt, at whichever node.
    """
    started = time.monotonic()
    dataset = wait_until_whole(work.store, work.source, sleep=work.pace.sleep)
    _require_one_plan(work, work.options.digest(dataset.digest()))
    if with_backoff(lambda _: work.store.status(work.path(manifest.NAME))) is not None:
        sizes = with_backoff(lambda _: sizes_below(work.store, work.destination))
        made = read_manifest(work.store, work.destination)
        manifest.require_match(made, sizes, work.destination)
        return Result(changed=False)
    source = open_source(work.store, work.source, dataset, work.options)
    shards = plan(source.counts, work.options.shards)
    _require_no_strangers(work, shards)
    progress.set_total(len(shards), 0)
    done = _Worker(work, dataset, source, shards, progress).work_until_all_is_done()
    return Result(
        changed=bool(done),
        shards=len(done) - (FINISH in done),
        of=len(shards),
        examples=sum(record["examples"] for record in done.values()),
        bytes=sum(record["size"] for record in done.values()),
        seconds=round(time.monotonic() - started, 2),
    )


class _Worker:
    """Takes items and does them."""

    def __init__(
        self,
        work: Work,
        dataset: Manifest,
        source: Source,
        shards: tuple[Shard, ...],
        progress: StagingProgress,
    ):
        self._work, self._dataset, self._source, self._progress = work, dataset, source, progress
        self._shards = {shard.name: shard for shard in shards}
        self._board = Board(work.store, work.path(STATE_DIRECTORY), work.node, work.pace)

    def work_until_all_is_done(self) -> dict[str, dict[str, Any]]:
        """The records of the items that this node has done. Raises GivenUp."""
        made: dict[str, dict[str, Any]] = {}
        while True:
            view, silent = self._board.look()
            wanted = [name for name in self._shards if name not in view.done]
            self._progress.set_done(len(self._shards) - len(wanted))
            if not wanted and self._is_finished():
                return made
            wanted = wanted or [FINISH]
            if last := given_up(wanted, view, silent):
                raise self._board.failure(last, view)
            free = free_claims(wanted, view, silent)
            if not free:
                self._work.pace.sleep(self._work.pace.look)
                continue
            # By chance, so that nodes that look at the same time seldom want the same.
            claim = random.choice(free)
            if self._board.take(claim) and (record := self._do(claim)):
                made[claim.item] = record

    def _is_finished(self) -> bool:
        path = self._work.path(manifest.NAME)
        return with_backoff(lambda _: self._work.store.status(path)) is not None

    def _do(self, claim: Claim) -> dict[str, Any] | None:
        """Do an item; its record, None when that failed, which is then told to all."""
        try:
            with self._board.renewing(claim) as renewing:
                if claim.item == FINISH:
                    return self._finish()
                return self._convert(claim, self._shards[claim.item], renewing.beat)
        except Exception as error:  # whatever it is, another node may have more luck
            self._board.write_error(claim, error)
            return None

    def _convert(self, claim: Claim, shard: Shard, beat: Callable[[], None]) -> dict[str, Any]:
        store, started = self._work.store, time.monotonic()
        final = self._work.path(shard.name + self._work.options.suffix)
        if with_backoff(lambda _: store.status(final)) is None:
            part = self._board.path(claim.file(PART_SUFFIX.strip(".")))
            record = with_backoff(lambda attempt: self._write(shard, part, attempt > 0, beat))
            record["seconds"] = round(time.monotonic() - started, 2)
            self._board.write_record(claim, record)
            if with_backoff(lambda _: store.rename_new(part, final)):
                self._board.set_done(claim)
                return record
            with_backoff(lambda _: store.delete(part))
        self._settle(claim, final)
        return {"examples": 0, "size": 0}

    def _write(
        self, shard: Shard, part: str, web: bool, beat: Callable[[], None]
    ) -> dict[str, Any]:
        """Write a shard to a temporary name, and say what was written once it is known whole."""
        content = _Content(self._source, shard, self._work.options, web, beat)
        self._work.store.write_chunks(part, content, web=web)
        found = self._work.store.status(part)
        stored = found.size if found else 0
        if (stored, content.examples) != (content.size, shard.examples):
            raise HdfsFailure(
                f"{part} has {stored} bytes of {content.size}, {content.examples} examples of "
                f"{shard.examples} — write it again"
            )
        return content.record()

    def _settle(self, claim: Claim, final: str) -> None:
        """Let the record of the attempt count that wrote this file: its node was lost after it.

        Raises BadInput when none did.
        """
        digest = with_backoff(lambda attempt: self._sha256(final, attempt > 0))
        for attempt in range(1, claim.attempt + 1):
            earlier = Claim(claim.item, attempt)
            record = self._board.read_record(earlier)
            if record and record["sha256"] == digest:
                self._board.set_done(earlier)
                return
        if claim.item not in self._board.look()[0].done:
            raise BadInput(f"{final} in HDFS was written by somebody else — delete it")

    def _sha256(self, path: str, web: bool) -> str:
        digest = hashlib.sha256()
        for chunk in self._work.store.read_chunks(path, web):
            digest.update(chunk)
        return digest.hexdigest()

    def _finish(self) -> dict[str, Any]:
        """Write metadata.json and, last, the manifest; remove what broken attempts have left."""
        work = self._work
        shards = tuple(self._shards.values())
        records = {shard.name: self._board.read_done(shard.name) for shard in shards}
        made = documents(self._source, self._dataset, shards, records, work.options)
        for info in with_backoff(lambda _: work.store.list_directory(work.path(STATE_DIRECTORY))):
            if info.path.endswith(PART_SUFFIX):
                work.store.delete(info.path)
        with_backoff(lambda _: work.store.write_bytes(work.path(METADATA), made.metadata))
        text = made.manifest.to_json().encode()
        with_backoff(lambda _: work.store.write_bytes(work.path(manifest.NAME), text))
        return {"examples": 0, "size": 0}


class _Content:
    """A shard's file in pieces, hashed and counted on the way."""

    def __init__(
        self, source: Source, shard: Shard, options: Options, web: bool, beat: Callable[[], None]
    ):
        self._source, self._shard, self._options = source, shard, options
        self._web, self._beat = web, beat
        self._digest = hashlib.sha256()
        self.size = self.examples = 0
        self._label_max = -1

    def __iter__(self) -> Iterator[bytes]:
        shard = self._shard
        for chunk in encode(self._batches(), shard.examples, self._source.shape, self._options):
            self._digest.update(chunk)
            self.size += len(chunk)
            self._beat()
            yield chunk

    def _batches(self) -> Iterator[Batch]:
        shard = self._shard
        for images, labels in self._source.batches(shard.split, shard.start, shard.stop, self._web):
            self.examples += len(labels)
            self._label_max = max(self._label_max, int(labels.max()))
            yield images, labels

    def record(self) -> dict[str, Any]:
        """What was written."""
        return {
            "examples": self.examples,
            "size": self.size,
            "sha256": self._digest.hexdigest(),
            "label_max": self._label_max,
        }


def _require_one_plan(work: Work, digest: str) -> None:
    """Files of two preprocessings in one directory would be taken for one another's."""
    own = work.path(STATE_DIRECTORY, f"{_PLAN}{digest}")
    with_backoff(lambda _: work.store.create_new(own))
    names = with_backoff(lambda _: work.store.list_directory(work.path(STATE_DIRECTORY)))
    plans = [info.path for info in names if posixpath.basename(info.path).startswith(_PLAN)]
    if plans != [own]:
        raise BadInput(
            f"{work.destination} in HDFS has been made from other data or with other options — "
            "name another directory or delete it"
        )


def _require_no_strangers(work: Work, shards: tuple[Shard, ...]) -> None:
    """Programs would train on whatever else lies there."""
    ours = {shard.name + work.options.suffix for shard in shards} | {METADATA, manifest.NAME}
    state = work.path(STATE_DIRECTORY, "")
    for info in with_backoff(lambda _: work.store.walk(work.destination)):
        name = posixpath.relpath(info.path, work.destination)
        if not info.path.startswith(state) and name not in ours and PART_SUFFIX not in name:
            raise BadInput(
                f"{info.path} in HDFS is not of this preprocessing — name another directory"
            )
