"""One process that has imported the engine, and forks scheduler and workers when it is asked.

`python -m mayfly_train.recipe.dask_nursery --with-parent PID` reads requests from standard input,
and answers on standard output, a line of JSON each. Importing the engine takes a second of a core,
so five processes of it, or one that has died, are started in a tenth of the time. Forking is safe
here: there is one thread, and nothing is open yet (fork(2)).

It is also who adopts what killed workers leave behind (PR_SET_CHILD_SUBREAPER), and ends it.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from mayfly_train.recipe import dask_scheduler, dask_worker, identity, process

LOOK_S, SHORT_S = 0.1, 0.02
END_S = dask_worker.END_S + 5
PROGRAMS: Mapping[str, Callable[[list[str]], int]] = {
    "scheduler": dask_scheduler.main,
    "worker": dask_worker.main,
}


def main(argv: list[str] | None = None) -> int:
    """Serve until standard input ends, or the parent; then end everything that was started."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--with-parent", type=int, required=True, metavar="PID", help="whose end")
    args = parser.parse_args(argv)
    ended: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: ended.append(number))
    process.adopt_orphans()
    process.end_with_parent(args.with_parent)
    gc.collect()
    gc.freeze()  # a collection in a child would copy every page that is shared
    children: dict[int, str] = {}
    try:
        _serve(ended, children)
    finally:
        for program in ("worker", "scheduler"):  # workers say goodbye to their scheduler
            _end([pid for pid, each in children.items() if each == program], children)
        while _reap(children):
            time.sleep(LOOK_S)
    return 0


def _serve(ended: list[int], children: dict[int, str]) -> None:
    """Answer requests, and reap what has ended."""
    waiting = b""
    while not ended:
        if select.select([0], [], [], LOOK_S)[0]:
            data = os.read(0, 1 << 16)
            if not data:
                return
            *lines, waiting = (waiting + data).split(b"\n")
            for line in lines:
                wanted = json.loads(line)
                pid = _start(wanted)
                children[pid] = wanted["program"]
                answer = {"pid": pid, "start": identity.start_time(pid)}
                os.write(1, json.dumps(answer).encode() + b"\n")
        _reap(children)


def _start(wanted: Mapping[str, Any]) -> int:
    """Fork a program of the engine; its number."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setsid()  # a terminal's Ctrl-C is for the head alone
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        log = os.open(wanted["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for descriptor, place in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(descriptor, place)
        process.name_thread(f"mayfly-{wanted['program']}")
        process.end_with_parent(parent)
        code = PROGRAMS[wanted["program"]](wanted["words"])
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:  # noqa: BLE001 (nothing of the parent's is to run here)
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _reap(children: dict[int, str]) -> bool:
    """Reap what has ended, and end what a killed worker has left: it is our child now, and what
    leaves a worker's group while it lives is the worker's. Whether there was any of that."""
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if not pid:
            break
        children.pop(pid, None)
    strangers = set(process.children()) - set(children)
    for pid in strangers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return bool(strangers)


def _end(pids: list[int], children: dict[int, str]) -> None:
    """TERM for some, and KILL for those that are left after END_S; returns when none is."""
    deadline = time.monotonic() + END_S
    number = signal.SIGTERM
    while left := [pid for pid in pids if pid in children]:
        if number == signal.SIGTERM or time.monotonic() > deadline:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            number = signal.SIGKILL
        time.sleep(SHORT_S)
        _reap(children)


if __name__ == "__main__":
    sys.exit(main())
