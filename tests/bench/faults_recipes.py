"""Random faults over a recipe, on machines in network namespaces; needs root.

Usage: N=40 SEED=1 TASKS=500 faults_recipes.py. A head with its scheduler and four workers, each in
a namespace with an address of its own, run tasks that wait for TASK_S seconds and leave a file.
Meanwhile N faults happen, one after another and some at a time: a worker is killed, or stopped for
HOLD_S (SIGSTOP), or its link is down for HOLD_S, or its disk, a small tmpfs, is full for DISK_S, or
the head and its scheduler are killed. Whatever ends is started again, as systemd would.

The last line is JSON: how many tasks have exactly one accepted result, how many were lost, how many
ran again after they had finished, and after how long each fault's tasks had run again elsewhere or
were done. The store is a directory that a machine without a link still reaches: its late attempts
compete for their markers.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / part) for part in ("scripts", "training", ".")]

from tests.netns import Network, addresses  # noqa: E402 (the path must be set before)

from mayfly_train.recipe import process, tls  # noqa: E402

WORKERS = 4
HOLD_S, DISK_S = 25.0, 8.0
GAP_S = (5.0, 9.0)
LIMIT_S = 1500.0
PORT = 8786
LATE_S = 1.0  # a start this soon after the marker had looked before it was there
KINDS = ("kill", "link", "freeze", "head", "disk")


@dataclass
class Fault:
    """What happened, to which node (0: the head), and when."""

    kind: str
    node: int
    at: float
    affected: list[int] = field(default_factory=list)
    """Tasks that ran there."""
    given_up_s: float | None = None
    """After how long the head counted an attempt there as lost."""


class Site:
    """All that runs, and what starts it again."""

    def __init__(self, directory: Path, network: Network, tasks: int, task_s: float) -> None:
        self.directory, self.network = directory, network
        self.tasks, self.task_s = tasks, task_s
        self.store, self.began = directory / "store", directory / "began"
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self.ended = threading.Event()
        tls.make(directory / "tls", "faults")
        for node in range(1, WORKERS + 1):
            self.scratch(node).mkdir()
            words = ["-t", "tmpfs", "-o", "size=24m", "mayfly-faults", str(self.scratch(node))]
            subprocess.run(["mount", *words], check=True)
        self.keeper = threading.Thread(target=self._keep)

    def scratch(self, node: int) -> Path:
        """A worker's disk."""
        return self.directory / f"disk-{node}"

    def start(self) -> None:
        """Start everything."""
        self.keeper.start()

    def _keep(self) -> None:
        while not self.ended.wait(0.2):
            for node in range(WORKERS + 1):
                code = self.processes[node].poll() if node in self.processes else 1
                if code is not None and (code or node):  # a head that has ended well is not needed
                    self.processes[node] = self._start(node)

    def _start(self, node: int) -> subprocess.Popen[bytes]:
        if node == 0:
            words = [sys.executable, __file__, "--head", str(self.directory)]
            words += ["--tasks", str(self.tasks), "--task-s", str(self.task_s)]
        else:
            words = [
                *(sys.executable, "-m", "mayfly_train.recipe.dask_worker"),
                *("--scheduler", f"tls://{addresses(9)[0]}:{PORT}", "--slots", "1"),
                *("--host", addresses(9)[node], "--tls", str(self.directory / "tls")),
                *("--store", str(self.store), "--scratch", str(self.scratch(node))),
                *("--name", f"n{node}", "--with-parent", str(os.getpid())),
            ]
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "training")}
        with (self.directory / f"log-{node}").open("ab") as log:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.network.names[node], *words],
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def stop(self) -> None:
        """End everything, and what tasks have left."""
        self.ended.set()
        self.keeper.join()
        for each in self.processes.values():
            each.send_signal(signal.SIGCONT)
            each.kill()
            each.wait()
        for node in range(1, WORKERS + 1):
            process.kill_orphans(self.scratch(node))
            subprocess.run(["umount", "-l", str(self.scratch(node))], check=False)

    def done(self) -> dict[int, float]:
        """When each finished task's marker was written."""
        found = {}
        for path in (self.store / "done/only").glob("*.json"):
            found[int(path.stem)] = path.stat().st_mtime
        return found

    def starts(self) -> list[tuple[int, float, int]]:
        """Task, time and node of each start so far."""
        if not self.began.exists():
            return []
        lines = (line.split() for line in self.began.read_text().splitlines())
        return [(int(n), float(at), int(where[len("disk-") :])) for n, at, where in lines]

    def running_on(self, node: int) -> list[int]:
        """Tasks whose newest start was there and that have no marker."""
        newest = {number: where for number, _, where in self.starts()}
        done = self.done()
        return [number for number, where in newest.items() if where == node and number not in done]


def head(directory: Path, tasks: int, task_s: float) -> int:
    """The head's process, with its scheduler; both end together."""
    from mayfly_train.recipe.dask_engine import DaskEngine  # noqa: PLC0415 (a second of a core)
    from mayfly_train.recipe.document import Experiment, Parameter, Recipe  # noqa: PLC0415
    from mayfly_train.recipe.head import Head, Run  # noqa: PLC0415
    from mayfly_train.recipe.ledger import Ledger  # noqa: PLC0415
    from mayfly_train.recipe.store import open_store  # noqa: PLC0415

    file = directory / "address"
    file.unlink(missing_ok=True)
    words = ["--host", addresses(9)[0], "--port", str(PORT), "--tls", str(directory / "tls")]
    words += ["--address-file", str(file), "--store", str(directory / "store")]
    words += ["--with-parent", str(os.getpid())]
    scheduler = subprocess.Popen(
        [sys.executable, "-m", "mayfly_train.recipe.dask_scheduler", *words]
    )
    until(lambda: file.exists() or scheduler.poll() is not None)
    where = '"${PWD%/slots/*}"'
    line = (
        f"sh -c 'echo $0 $(date +%s.%N) $(basename {where}) >> {directory}/began; sleep {task_s};"
        " echo $0 > ../output/left' {{n}}"
    )
    number = Parameter("n", "integers", low=0, high=tasks - 1)
    recipe = Recipe("faults", (Experiment("only", (line,), (number,)),))
    run = Run(recipe, "", open_store(str(directory / "store"), None), lambda _: [])
    engine = DaskEngine(file.read_text(), directory / "tls", alike=True)
    try:
        ledger = Ledger(directory / "ledger/ledger.sqlite")
        return 0 if Head(run, ledger, engine).work() == "succeeded" else 3
    finally:
        engine.close()
        scheduler.kill()
        scheduler.wait()


def inject(site: Site, kinds: list[str], chance: random.Random, hold_s: float) -> list[Fault]:
    """Let faults happen, until there were that many or no task is left."""
    found: list[Fault] = []
    busy: dict[int, float] = {}
    for kind in kinds:
        time.sleep(chance.uniform(*GAP_S))
        free = [n for n in range(1, WORKERS + 1) if busy.get(n, 0) < time.monotonic()]
        while kind != "head" and len(free) < WORKERS - 1:  # half of the nodes are well, always
            time.sleep(0.5)
            free = [n for n in range(1, WORKERS + 1) if busy.get(n, 0) < time.monotonic()]
        if len(site.done()) >= site.tasks:
            break
        node = 0 if kind == "head" else chance.choice(free)
        if kind == "link":  # a silent node's tasks can be given up only where it has some
            wait_for_tasks(site, node)
        fault = Fault(kind, node, time.time(), site.running_on(node) if node else [])
        hold = {"link": hold_s, "freeze": hold_s, "disk": DISK_S}.get(kind, 5.0)
        busy[node] = time.monotonic() + hold
        there = f", {len(fault.affected)} tasks ran there" if node else ""
        note(f"{len(found) + 1}: {kind} of node {node}{there}, {len(site.done())} tasks are done")
        happen(site, fault, hold)
        found.append(fault)
    return found


def wait_for_tasks(site: Site, node: int) -> None:
    """Wait until the node has something to do, or nothing is left."""
    until(lambda: bool(site.running_on(node)) or len(site.done()) >= site.tasks)


def happen(site: Site, fault: Fault, hold: float) -> None:
    """One fault, and its end after a while."""
    network, victim = site.network, site.processes[fault.node]
    name = network.names[fault.node]
    if fault.kind in ("kill", "head"):
        victim.kill()
        return
    if fault.kind == "link":
        if fault.affected:
            threading.Thread(target=watch, args=(site, fault), daemon=True).start()
        network.inside(name, "ip", "link", "set", "eth0", "down")
        mend = lambda: network.inside(name, "ip", "link", "set", "eth0", "up")  # noqa: E731
    elif fault.kind == "freeze":
        victim.send_signal(signal.SIGSTOP)
        mend = lambda: victim.send_signal(signal.SIGCONT)  # noqa: E731
    else:
        file = site.scratch(fault.node) / "full"
        subprocess.run(["dd", "if=/dev/zero", f"of={file}"], check=False, capture_output=True)
        mend = lambda: file.unlink(missing_ok=True)  # noqa: E731
    timer = threading.Timer(hold, mend)
    timer.daemon = True
    timer.start()


def judge(site: Site, faults: list[Fault]) -> dict[str, Any]:
    """The counts, and how long each fault kept its tasks."""
    done, starts = site.done(), site.starts()
    again: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for fault in faults:
        later = [(number, at) for number, at, _ in starts if at > fault.at]
        if fault.kind == "head":
            again["head"] += [min(at for _, at in later) - fault.at] if later else []
            continue
        back = []
        for number in fault.affected:
            times = [at for n, at in later if n == number]
            back.append(min([*times, done.get(number, time.time())]) - fault.at)
        again[fault.kind] += [max(back)] if back else []
    accepted = sum(1 for number in done if left_once(site, number))
    counts: dict[str, int] = {}
    for fault in faults:
        counts[fault.kind] = counts.get(fault.kind, 0) + 1
    return {
        "faults": len(faults),
        "kinds": counts,
        "tasks": site.tasks,
        "accepted": accepted,
        "lost": site.tasks - accepted,
        "reruns_of_finished": sum(at > done.get(n, at) + LATE_S for n, at, _ in starts),
        "starts": len(starts),
        "affected": sum(len(fault.affected) for fault in faults),
        "recovery_s": {
            kind: {"median": round(statistics.median(times), 1), "max": round(max(times), 1)}
            for kind, times in again.items()
            if times
        },
        "silent_given_up_s": sorted(f.given_up_s for f in faults if f.given_up_s is not None),
    }


def left_once(site: Site, number: int) -> bool:
    """Whether a task's marker and the ledger name one attempt, whose output is there."""
    marker = json.loads((site.store / f"done/only/{number:06d}.json").read_text())
    output = site.store / f"outputs/only/{number:06d}/{marker['attempt']}/left"
    with sqlite3.connect(site.directory / "ledger/ledger.sqlite") as db:
        rows = db.execute(
            "SELECT state, accepted FROM tasks WHERE number = ?", (number,)
        ).fetchall()
    return rows == [("done", marker["attempt"])] and output.read_text() == f"{number}\n"


def watch(site: Site, fault: Fault) -> None:
    """See when an attempt on a silent node is given up; later the ledger may know better, for its
    marker may still come. It is broken instead of lost where its worker, who had missed the
    scheduler as well, recorded that in the store before the head looked there."""
    query = (
        "SELECT COUNT(*) FROM attempts"
        " WHERE state IN ('lost', 'broken') AND node LIKE ? AND ended > ?"
    )
    while not site.ended.wait(0.2) and time.time() < fault.at + 60:
        with sqlite3.connect(site.directory / "ledger/ledger.sqlite", timeout=30) as db:
            ((ended,),) = db.execute(query, (f"n{fault.node}-%", fault.at)).fetchall()
        if ended:
            fault.given_up_s = round(time.time() - fault.at, 1)
            return


def measure(
    kinds: list[str], chance: random.Random, tasks: int, task_s: float, hold_s: float = HOLD_S
) -> dict[str, Any]:
    """A whole run with its faults; links are down, and workers stopped, for `hold_s`."""
    directory = Path(tempfile.mkdtemp(prefix="mayfly-faults-"))
    began = time.monotonic()
    with Network(WORKERS + 1) as network:
        for name in network.names:
            network.inside(name, "sysctl", "-qw", "net.ipv4.tcp_syn_retries=3")
        site = Site(directory, network, tasks, task_s)
        try:
            site.start()
            until(lambda: len({node for *_, node in site.starts()}) == WORKERS)
            faults = inject(site, kinds, chance, hold_s)
            until(lambda: site.processes[0].poll() == 0)
            found = {**judge(site, faults), "seconds": round(time.monotonic() - began)}
        finally:
            site.stop()
            keep = os.environ.get("KEEP")
            if not keep:
                shutil.rmtree(directory)
    return found


def until(true: Callable[[], bool]) -> None:
    """Wait for something to come true."""
    end = time.monotonic() + LIMIT_S
    while not true():
        if time.monotonic() > end:
            sys.exit("gave up waiting")
        time.sleep(0.2)


def note(message: str) -> None:
    """Tell whoever waits."""
    print(message, file=sys.stderr, flush=True)


def main() -> int:
    """Measure, or be the head."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--head", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--tasks", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--task-s", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.head:
        return head(args.head, args.tasks, args.task_s)
    count, seed = int(os.environ.get("N", "40")), int(os.environ.get("SEED", "1"))
    chance = random.Random(seed)
    kinds = [KINDS[n % len(KINDS)] for n in range(count)]
    chance.shuffle(kinds)
    tasks = int(os.environ.get("TASKS", "500"))
    found = measure(kinds, chance, tasks, float(os.environ.get("TASK_S", "2")))
    print(json.dumps({"seed": seed, **found, "load": os.getloadavg()}))
    return 0 if not found["lost"] and not found["reruns_of_finished"] else 1


if __name__ == "__main__":
    sys.exit(main())
