"""The head of a run on a node of its own: `python -m mayfly_train.recipe.node_head`.

It has nothing but the run's store: recipe and source are there, and the ledger's copy of an
earlier head. Scheduler and head run here; whoever started the run may be gone.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from mayfly_train.errors import BadInput, NodeError
from mayfly_train.recipe import book, lock, names, shape, signs
from mayfly_train.recipe.dask_engine import DaskEngine
from mayfly_train.recipe.head import CANCELLED, FAILED, SUCCEEDED, Head, Run
from mayfly_train.recipe.ledger import Ledger
from mayfly_train.recipe.progress import Progress
from mayfly_train.recipe.store import Store, open_store, to_bytes
from mayfly_train.s3 import S3Error

START_S = 60.0
FREE_S = 2 * lock.STALE_S  # the lease of a head that died elsewhere runs out in half of it
LOOK_S = 0.1


def main(argv: list[str] | None = None) -> int:
    """Run to the end, which is written into the store; 2 for a recipe that cannot be run, 1 for
    what may be better the next time."""
    args = _parser().parse_args(argv)
    args.host = socket.gethostbyname(args.host)  # a name may also lead to loopback elsewhere
    signal.signal(signal.SIGTERM, _interrupt)
    store = open_store(args.store, None)
    try:
        if store.read(names.ENDED) is not None:  # this node was booted again, or is one too many
            signs.leave(args.signs, signs.ENDED)
            return 0
        outcome, message = _work(args, store)
        code = 0
    except BadInput as error:
        if isinstance(error, S3Error):  # keys that are refused now may be taken later
            return _fail(error)
        outcome, message, code = FAILED, str(error), error.exit_code
    except NodeError as error:
        return _fail(error)
    except KeyboardInterrupt:
        return 0  # the unit was stopped: the run can go on
    if message:
        print(f"mayfly: {message}", file=sys.stderr)
    ended = {"outcome": outcome, "message": message, "time": time.time()}
    store.write(names.ENDED, to_bytes(ended))
    signs.leave(args.signs, signs.ENDED)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", required=True, help="the run's address")
    parser.add_argument("--host", required=True, help="address to listen at, and no other")
    parser.add_argument("--port", type=int, default=0, help="port of the scheduler")
    parser.add_argument("--tls", type=Path, required=True, help="directory of the certificates")
    parser.add_argument("--state", type=Path, required=True, help="directory of the ledger")
    signs.add_option(parser)
    return parser


def _fail(error: NodeError) -> int:
    """Say why this head ends, and not that the run has: systemd starts another."""
    print(f"mayfly: {error}", file=sys.stderr)
    return NodeError.exit_code


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _work(args: argparse.Namespace, store: Store) -> tuple[str, str]:
    """How the run has ended, and why, when that is no good end."""
    if store.read(names.CANCEL) is not None:
        return CANCELLED, ""
    _wait_until_free(store)
    run = book.open_run(store, args.state)
    ledger = book.open_to_work(store, args.state)
    file = args.state / "scheduler"
    scheduler = _start_scheduler(args, file)
    try:
        address = _address(scheduler, file)
        store.write(names.SCHEDULER, to_bytes({"address": address}))
        outcome = _run(run, ledger, address, args.tls)
        whys = [f"{e['name']}: {e['message']}" for e in ledger.experiments() if e["message"]]
        return outcome, "" if outcome == SUCCEEDED else "; ".join(whys)
    finally:
        scheduler.terminate()
        ledger.close()


def _wait_until_free(store: Store) -> None:
    """Let the lease of a head that has died elsewhere run out. Raises NodeError when it works:
    the run is in its hands, and has not ended."""
    deadline = time.monotonic() + FREE_S
    while lock.is_held(store):
        if time.monotonic() > deadline:
            raise NodeError(f"another head works on {store.address} — this one waits for its end")
        time.sleep(1)


def _start_scheduler(args: argparse.Namespace, file: Path) -> subprocess.Popen[bytes]:
    file.unlink(missing_ok=True)
    words = ["--host", args.host, "--port", str(args.port), "--tls", str(args.tls)]
    words += ["--store", args.store, "--address-file", str(file)]
    words += ["--with-parent", str(os.getpid())]
    command = [sys.executable, "-m", "mayfly_train.recipe.dask_scheduler", *words]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL)


def _address(scheduler: subprocess.Popen[bytes], file: Path) -> str:
    deadline = time.monotonic() + START_S
    while not file.exists():
        if scheduler.poll() is not None or time.monotonic() > deadline:
            raise NodeError("the engine's scheduler did not start — its messages are above")
        time.sleep(LOOK_S)
    return file.read_text()


def _run(run: Run, ledger: Ledger, address: str, tls: Path) -> str:
    engine = DaskEngine(address, tls, alike=shape.alike(run.recipe))
    try:
        progress = Progress(run.recipe, run.store, ledger, engine.members)
        return Head(run, ledger, engine, progress.show).work()
    finally:
        engine.close()


if __name__ == "__main__":
    sys.exit(main())
