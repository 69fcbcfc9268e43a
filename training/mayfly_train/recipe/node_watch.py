"""The watch of a node: `python -m mayfly_train.recipe.node_watch`.

It samples what the node is busy with, ships the samples and the system's journal to the run's
store, and tells the dead-man timer whether the run goes on: the file `alive` is touched while its
head works, and `ended` is left when it has ended.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from mayfly_train.errors import NodeError
from mayfly_train.recipe import names, signs, utilisation
from mayfly_train.recipe.shipping import Tail
from mayfly_train.recipe.store import Store, open_store, read_json

SAMPLE_S, SHIP_S, LOOK_S = 5.0, 15.0, 30.0
UTILISATION, JOURNAL = KINDS = ("utilisation", "journal")


def main(argv: list[str] | None = None) -> int:
    """Watch until TERM, or until the run has ended."""
    args = _parser().parse_args(argv)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    args.logs.mkdir(parents=True, exist_ok=True)
    store = open_store(args.store, None)
    session = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
    with (args.logs / JOURNAL).open("wb") as journal:
        follower = _follow_journal(journal.fileno())
        try:
            Watch(args.node, session, args.logs, args.signs, store).run(stop)
        finally:
            if follower is not None:
                follower.terminate()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", required=True, help="the run's address")
    parser.add_argument("--node", required=True, help="the node's name")
    parser.add_argument("--logs", type=Path, required=True, help="directory for what is shipped")
    signs.add_option(parser)
    return parser


def _follow_journal(output: int) -> subprocess.Popen[bytes] | None:
    """The system's journal since the boot, as it grows; None on a system that has none."""
    words = ["journalctl", "--boot", "--follow", "--lines=all", "--no-pager", "--output=short-iso"]
    try:
        return subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.DEVNULL
        )
    except OSError as error:
        print(f"mayfly: no system journal is collected: {error}", file=sys.stderr)
        return None


class Watch:
    """One node's samples, logs and signs of life."""

    def __init__(self, node: str, session: str, logs: Path, directory: Path, store: Store) -> None:
        self._samples, self._signs, self._store = logs / UTILISATION, directory, store
        self._samples.write_bytes(b"")
        self._beat: object = None
        self._tails = [
            Tail(logs / kind, names.node_log(node, session, kind), store) for kind in KINDS
        ]

    def run(self, stop: threading.Event) -> None:
        """Sample, ship and look, each at its own pace, until told to stop or the run has ended."""
        shipped = looked = 0.0
        while True:
            self.take_sample()
            now = time.monotonic()
            if now - looked >= LOOK_S:
                looked = now
                if self.look():
                    break
            if now - shipped >= SHIP_S:
                shipped = now
                self.ship()
            if stop.wait(SAMPLE_S):
                break
        self.ship()

    def take_sample(self) -> None:
        """Add one line; a node without room for it has other cares."""
        with contextlib.suppress(OSError), self._samples.open("a") as stream:
            stream.write(f"{json.dumps(utilisation.sample())}\n")

    def ship(self) -> None:
        """Put what is new into the store; what it does not take is tried again."""
        for tail in self._tails:
            with contextlib.suppress(NodeError, OSError):
                tail.ship()

    def look(self) -> bool:
        """Leave the signs that the dead-man timer looks for; whether the run has ended."""
        try:
            ended = self._store.read(names.ENDED) is not None
            beat = (read_json(self._store, names.HEAD) or {}).get("beat")
        except NodeError:
            return False
        # A beat that has changed is of a head that works; its own clock does not matter.
        alive, self._beat = beat != self._beat, beat
        if ended or alive:
            signs.leave(self._signs, signs.ENDED if ended else signs.ALIVE)
        return ended


if __name__ == "__main__":
    sys.exit(main())
