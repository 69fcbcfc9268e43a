"""Figures of recipes that need no cluster of nodes, each beside its limit in the same run.

Usage: recipes.py [PART …] of expand, memory, true, wait, search, kill, head; all without one.
An engine of ours on this machine (a scheduler, four workers of one slot, mutual TLS) runs tasks
under ledger and markers; "raw" is Dask alone, on the same scheduler and workers, running the same
subprocesses from one `Client.map`. The store is S3 when AWS_ENDPOINT_URL names a server with a
bucket MAYFLY_BENCH_BUCKET, else a directory. 250 ms tasks wait and do no work: a simulation of a
search, named so. JSON on standard output.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / part) for part in ("scripts", "training")]
os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:2])

from mayfly.recipe.load import load  # noqa: E402 (the path must be set before)
from mayfly_train.recipe import head as heads  # noqa: E402
from mayfly_train.recipe.dask_engine import DaskEngine  # noqa: E402
from mayfly_train.recipe.document import Experiment, Parameter, Recipe  # noqa: E402
from mayfly_train.recipe.expand import Context, Expansion  # noqa: E402
from mayfly_train.recipe.head import Head, Run  # noqa: E402
from mayfly_train.recipe.here import Machine  # noqa: E402
from mayfly_train.recipe.ledger import Ledger  # noqa: E402
from mayfly_train.recipe.store import open_store  # noqa: E402

SLOTS = 4
WAIT_S = 0.25
PARTS = ("expand", "memory", "true", "wait", "search", "kill", "head")


def main() -> int:
    """Measure the parts that are named."""
    parts = sys.argv[1:] or PARTS
    before = os.getloadavg()
    found: dict[str, Any] = {}
    if "expand" in parts:
        found["expand"] = expand()
    if "memory" in parts:
        found["memory"] = memory()
    measures = {"true": true, "wait": wait, "search": search, "kill": kill}
    if measures.keys() & set(parts):
        with lab() as here:
            found["store"] = "s3" if here.base.startswith("s3://") else "directory"
            for name in (each for each in measures if each in parts):
                found[name] = measures[name](here)
                note(f"{name}: {found[name]}")
    if "head" in parts:
        found["head"] = head()
        note(f"head: {found['head']}")
    machine = {"cores": os.cpu_count(), "load_before": before, "load_after": os.getloadavg()}
    print(json.dumps({**found, "machine": machine}))
    return 0


class Lab:
    """Scheduler, workers and a client, and a fresh run whenever one is asked for."""

    def __init__(self, directory: Path, machine: Machine, base: str) -> None:
        self.directory, self.machine, self.base = directory, machine, base
        self.engine = DaskEngine(machine.scheduler, machine.tls, alike=True)

    def run(self, experiment: Experiment) -> tuple[float, Ledger]:
        """Work on a run of one experiment; seconds and the ledger."""
        recipe = Recipe(experiment.name, (experiment,))
        run = Run(recipe, "", open_store(self.base, None), lambda _: [])
        ledger = Ledger(self.directory / f"{experiment.name}.sqlite")
        began = time.monotonic()
        outcome = Head(run, ledger, self.engine).work()
        spent = time.monotonic() - began
        run.store.delete("head.json")
        if outcome != "succeeded":
            sys.exit(f"{experiment.name} has {outcome}: {ledger.experiments()}")
        return spent, ledger

    def raw(self, words: list[str], count: int) -> float:
        """The same subprocesses by Dask alone; seconds."""
        client = self.engine._client
        began = time.monotonic()
        futures = client.map(start, range(count), words=words, pure=False)
        client.gather(futures)
        return time.monotonic() - began


def start(_: int, words: list[str]) -> int:
    """What Dask alone runs."""
    quiet = subprocess.DEVNULL
    return subprocess.run(words, stdin=quiet, stdout=quiet, stderr=quiet, check=True).returncode


@contextlib.contextmanager
def lab() -> Iterator[Lab]:
    """An engine on this machine."""
    directory = Path(tempfile.mkdtemp(prefix="mayfly-bench-"))
    bucket = os.environ.get("MAYFLY_BENCH_BUCKET")
    s3 = bucket and os.environ.get("AWS_ENDPOINT_URL")
    base = f"s3://{bucket}/bench-{os.getpid()}" if s3 else str(directory / "store")
    machine = Machine(directory / "machine", base, workers=SLOTS)
    machine.start()
    try:
        here = Lab(directory, machine, base)
        until(lambda: len(here.engine.members()) == SLOTS)
        yield here
        here.engine.close()
    finally:
        machine.stop()
        shutil.rmtree(directory)


def expand() -> dict[str, Any]:
    """A million samples of the search in tests/unit/recipes/ours.yml."""
    search = load(ROOT / "tests/unit/recipes/ours.yml").recipe.experiment("train")
    million = Experiment(**{**vars(search), "samples": 1_000_000})
    began, busy = time.monotonic(), time.process_time()
    tasks = Expansion(million, Context("s3://bucket/run/data", {}, {})).tasks()
    next(tasks)
    first, before = time.monotonic() - began, peak_mib()
    count = 1 + sum(1 for _ in tasks)
    spent = time.monotonic() - began
    return {
        "tasks": count,
        "first_s": round(first, 4),
        "tasks_per_s": round(count / spent),
        "tasks_per_cpu_s": round(count / (time.process_time() - busy)),
        "memory_grew_mib": round(peak_mib() - before, 1),
    }


def numbered(name: str, line: str, count: int) -> Experiment:
    """Tasks that differ by their number."""
    number = Parameter("n", "integers", low=0, high=count - 1)
    return Experiment(name, (line,), (number,))


def true(here: Lab, count: int = 1000) -> dict[str, Any]:
    """Tasks that do nothing: what a task costs. The raw ones run before and after ours."""
    before = here.raw(["true"], count)
    spent, _ = here.run(numbered("nothing", "true {{n}}", count))
    after = here.raw(["true"], count)
    raw = (before + after) / 2
    return {"tasks": count, "raw_s": [before, after], "mayfly_s": spent, "ratio": spent / raw}


def wait(here: Lab, count: int = 400) -> dict[str, Any]:
    """Tasks that wait for 250 ms, which is a simulation; the share of the slots' time they fill."""
    number = Parameter("n", "integers", low=0, high=count - 1)
    return waiting(here, "waiting", (number,), count)


def search(here: Lab) -> dict[str, Any]:
    """The same for all 4,096 combinations of twelve parameters with two choices."""
    twelve = tuple(Parameter(f"p{n}", "values", values=("a", "b")) for n in range(12))
    return waiting(here, "search", twelve, 2 ** len(twelve))


def waiting(here: Lab, name: str, parameters: tuple[Parameter, ...], count: int) -> dict[str, Any]:
    """Ours between two raw runs of a tenth, running the same program: parameters are in its
    environment. `held` is the share of the slots' time in which a slot had a task."""
    words = ["sleep", str(WAIT_S)]
    some = max(400, count // 10)
    before = here.raw(words, some) / some
    environment = tuple((each.name, f"{{{{{each.name}}}}}") for each in parameters)
    experiment = Experiment(name, (" ".join(words),), parameters, environment=environment)
    spent, ledger = here.run(experiment)
    after = here.raw(words, some) / some
    raw = (before + after) / 2 * count
    return {
        "tasks": count,
        "raw_busy": [round(WAIT_S / (SLOTS * each), 3) for each in (before, after)],
        "mayfly_s": spent,
        "ratio": spent / raw,
        "slots_busy": count * WAIT_S / (SLOTS * spent),
        "slots_held": ledger.node_seconds(name) / (SLOTS * spent),
    }


def kill(here: Lab, count: int = 60) -> dict[str, Any]:
    """Kill -9 of one of four workers with 40 attempts handed out; when each lost one runs again."""
    began_file = here.directory / "began"
    line = f"sh -c 'echo $0 $(date +%s.%N) >> {began_file}; exec sleep 2' {{{{n}}}}"
    died: list[float] = []
    heads.WINDOW = 40 // SLOTS

    def end_one() -> None:
        until(lambda: began_file.exists() and len(began_file.read_text().splitlines()) >= 2 * SLOTS)
        time.sleep(0.5)
        os.kill(here.machine.processes[0].pid, signal.SIGKILL)
        died.append(time.time())

    killer = threading.Thread(target=end_one)
    killer.start()
    _, ledger = here.run(numbered("killed", line, count))
    killer.join()
    starts: dict[str, list[float]] = {}
    for number, when in (each.split() for each in began_file.read_text().splitlines()):
        starts.setdefault(number, []).append(float(when))
    again = [max(times) - died[0] for times in starts.values() if len(times) > 1]
    rows = list(ledger.rows("killed"))
    return {
        "tasks": count,
        "window": heads.WINDOW * SLOTS,
        "lost_while_running": len(again),
        "running_again_after_s": [round(each, 2) for each in again],
        "counted_losses": sum(row.node_losses for row in rows),
        "finished": sum(row.state == "done" for row in rows),
        "finished_ones_run_again": sum(len(times) - 1 for times in starts.values()) - len(again),
    }


def head() -> dict[str, Any]:
    """Kill -9 of `mayfly recipe run`, and `resume` at once: when a task starts again, and how
    often those that had finished did."""
    directory = Path(tempfile.mkdtemp(prefix="mayfly-bench-"))
    began, ended = directory / "began", directory / "ended"
    line = f"sh -c 'echo $0 >> {began}; sleep 0.5; echo $0 >> {ended}' {{{{n}}}}"
    (directory / "killed.yml").write_text(
        f"source: null\ncommand: {json.dumps(line)}\nparameters: {{n: {{range: 0-59}}}}\n"
    )
    environment = {**os.environ, "MAYFLY_STATE_DIR": str(directory / "state")}
    words = [sys.executable, "-m", "mayfly.entry", "recipe"]
    options = ["--store", str(directory / "store"), "--workers", str(SLOTS)]
    silent: dict[str, Any] = {"env": environment, "stderr": subprocess.DEVNULL}
    first = subprocess.Popen([*words, "run", str(directory / "killed.yml"), *options], **silent)
    until(lambda: ended.exists() and len(ended.read_text().split()) >= 3 * SLOTS)
    first.kill()
    first.wait()
    died, known = time.time(), len(began.read_text().split())
    again = subprocess.Popen([*words, "resume", "killed", *options], **silent)
    until(lambda: len(began.read_text().split()) > known)
    back = time.time() - died
    again.wait()
    starts = began.read_text().split()
    finished = set(ended.read_text().split()[: 3 * SLOTS])
    shutil.rmtree(directory)
    return {
        "tasks": len(set(starts)),
        "running_again_after_s": round(back, 2),
        "exit_code": again.returncode,
        "finished_ones_run_again": sum(starts.count(each) - 1 for each in finished),
    }


def memory(count: int = 100_000) -> dict[str, Any]:
    """This process' memory, with the engine's client in it and so many tasks in its ledger."""
    with tempfile.TemporaryDirectory() as name:
        experiment = numbered("many", "true {{n}}", count)
        ledger = Ledger(Path(name) / "ledger.sqlite")
        with ledger.batch():
            ledger.set_experiment("many", "running", count)
            ledger.freeze(Expansion(experiment, Context("", {}, {})).tasks())
        known = ledger.states("many")["waiting"]
        return {"tasks_known": known, "peak_mib": round(peak_mib())}


def peak_mib() -> float:
    """Most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def until(true: Callable[[], bool], limit_s: float = 300) -> None:
    """Wait for something to come true."""
    end = time.monotonic() + limit_s
    while not true():
        if time.monotonic() > end:
            sys.exit("gave up waiting")
        time.sleep(0.05)


def note(message: str) -> None:
    """Tell whoever waits."""
    print(message, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
