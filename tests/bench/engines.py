"""Each engine with one worker and with two, on one core each: rate, efficiency, accuracy, start.

Usage: engines.py [--network NAME] [--batch N] [--set NAME=VALUE …] [--beside NAME=VALUE …]
                  [REPEATS] [EPOCHS] [ENGINE …].
For each engine a kept cluster of two workers (and a parameter server where it has one, on any core)
trains its built-in program as a run of its own, supervised as always, in turn with one worker and
with two. All train the same network on the same number of samples of Fashion-MNIST, each worker in
batches of N (128): `cnn`, two convolutions and a dense layer (225,034 weights; 2.6 million
multiplications for a picture forward), or `deep`, four convolutions (65,642 weights; 9.7 million).
`--set` puts a variable into the programs' environment, such as HOROVOD_CYCLE_TIME=5; what
`--beside` names only two workers have, who are measured without it as well in each turn. Where
workers make steps together a step has as many samples as all of them take, and the learning rate is
scaled by their number (Goyal et al., https://arxiv.org/abs/1706.02677). For these engines both
nodes also train at once as runs of their own that never speak, half of the samples each, in the
same turns (`apart`): what they reach together is what this machine allows two workers,
`efficiency_apart` tells it, and `of_apart` is what is left of it when they do speak. Rates leave
out the start and the first lines of progress; `start_s` is from the units' start to the first step
told, `total_s` to the run's end. `reached` says whether two workers are as efficient as they are to
be, and at most half a point of accuracy below one. For engine torch see ddp.py.

    engines.py --table [--network NAME] [--batch N] [EPOCHS]

trains by Horovod on 1, 2 and 4 workers for 24 epochs, the shape of the published table: seconds of
an epoch and in all, accuracy, samples. What is published is of MNIST. Here every row has the same
number of samples, and `epoch_s` is all pictures once over all workers. Where there are more workers
than cores they share them, and `workers_per_core` says so.

JSON on standard output. Needs the environment of tests/testenv.py.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from kept import deploy, kept, machine, note, say

import testenv
from mayfly_train import s3
from mayfly_train.progress import Progress, after_line

BATCH, SAMPLES = 128, 60_000  # of one worker unless said; pictures in an epoch
RATE = 0.001  # of Adam, for one worker's batch
DATA = "Fashion-MNIST"
PROGRAMS = {"horovod": "mnist_horovod_keras", "keras-ps": "mnist_keras_ps", "mwms": "mnist_mwms"}
TOGETHER = ("horovod", "mwms")  # all workers make one step
APART = "apart"  # two workers at once, each a run of its own
BESIDE = "beside"  # two workers with further variables
# Two workers' rate to twice that of one; and how much lower accuracy may be.
REACH = {"horovod": 0.88, "keras-ps": 0.85, "mwms": 0.85}
REACH_ACCURACY = 0.005
PUBLISHED = {1: 0.9965, 2: 0.9956, 4: 0.9953}  # workers → accuracy, on MNIST
TABLE_EPOCHS = 24
# A line of progress often enough for a rate; checkpoints seldom enough not to be what is measured.
TOLD = {"log_steps": 20, "checkpoint_seconds": 30}
LOG = "/var/log/mayfly/chief-0.log"
PINNED = "/run/systemd/system/mayfly-task@.service.d"
LIMIT_S, TABLE_LIMIT_S = 1800, 5400


class Work(NamedTuple):
    """What is trained, on how many samples in all, in batches of how many on each worker.

    `variables` are added to the programs' environment.
    """

    engine: str
    network: str
    samples: int
    batch: int
    variables: Mapping[str, str]


def main() -> int:
    """Measure."""
    args = options(sys.argv[1:])
    before = machine()
    about = {"data": DATA, "network": args.network, "batch": args.batch, "set": dict(args.set)}
    if args.table:
        epochs = int(args.words[0]) if args.words else TABLE_EPOCHS
        work = Work("horovod", args.network, epochs * SAMPLES, args.batch, dict(args.set))
        say({**about, "epochs": epochs, "table": table(work)}, before)
        return 0
    repeats = int(args.words[0]) if args.words else 3
    samples = SAMPLES * (int(args.words[1]) if len(args.words) > 1 else 3)
    engines = {}
    for engine in args.words[2:] or PROGRAMS:
        work = Work(engine, args.network, samples, args.batch, dict(args.set))
        with deploy(engine, bucket()) as lab:
            pin(lab)
            engines[engine] = measure(lab, work, repeats, dict(args.beside))
    about["beside"] = dict(args.beside)
    say({**about, "repeats": repeats, "samples": samples, "engines": engines}, before)
    return 0


def options(words: list[str]) -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--table", action="store_true", help="the published table's shape")
    parser.add_argument("--network", choices=("mlp", "cnn", "deep"), default="cnn")
    parser.add_argument("--batch", type=int, default=BATCH, help="samples of a worker's step")
    parser.add_argument("--set", action="append", default=[], type=pair, metavar="NAME=VALUE")
    parser.add_argument("--beside", action="append", default=[], type=pair, metavar="NAME=VALUE")
    parser.add_argument("words", nargs="*", help="[REPEATS] [EPOCHS] [ENGINE …]")
    return parser.parse_args(words)


def pair(text: str) -> tuple[str, str]:
    """A variable's name and its value. Raises ArgumentTypeError when there is no `=`."""
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def bucket() -> Any:
    """A client of the tests' S3 service."""
    variables = testenv.VARIABLES
    settings = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{variables['MAYFLY_S3_PORT']}",
        "AWS_ACCESS_KEY_ID": variables["MAYFLY_S3_ACCESS_KEY_ID"],
        "AWS_SECRET_ACCESS_KEY": testenv.CANARY,
    }
    return s3.connect(s3.S3Settings.from_environ(settings))


def pin(lab: kept.Lab) -> None:
    """Give the tasks of each worker's node one core; of their own while there are enough."""
    for index in range(len(lab.document["nodes"]["worker"])):
        core = index % (os.cpu_count() or 1)
        unit = f"printf '[Service]\\nCPUAffinity={core}\\n' > {PINNED}/core.conf"
        lab.sh(f"worker-{index}", f"mkdir -p {PINNED}; {unit}; systemctl daemon-reload")


# --- one worker and two ---------------------------------------------------------------------------


def measure(lab: kept.Lab, work: Work, repeats: int, beside: Mapping[str, str]) -> dict[str, Any]:
    """Medians and their ratios, and what they are of."""
    ways: list[Any] = [1, APART, 2] if work.engine in TOGETHER else [1, 2]
    ways += [BESIDE] if beside else []
    measured: dict[Any, list[dict[str, Any]]] = {way: [] for way in ways}
    for number in range(repeats):
        for way in ways if number % 2 == 0 else reversed(ways):
            found = once(lab, work, way, beside)
            measured[way].append(found)
            note(f"{work.engine} {number + 1}/{repeats}, {way}: {found}")
    middle = {
        way: {key: round(statistics.median(one[key] for one in found), 4) for key in found[0]}
        for way, found in measured.items()
    }
    return {"median": middle, **compared(work.engine, middle), **measured}


def once(lab: kept.Lab, work: Work, way: Any, beside: Mapping[str, str]) -> dict[str, Any]:
    """Train in one of the ways: apart, with further variables, or with so many workers."""
    if way == APART:
        return apart(lab, work)
    if way == BESIDE:
        return train(lab, work._replace(variables={**work.variables, **beside}), 2, LIMIT_S)
    return train(lab, work, way, LIMIT_S)


def compared(engine: str, middle: Mapping[Any, Mapping[str, float]]) -> dict[str, Any]:
    """Two workers beside one, and whether that is what is to be reached; beside two that never
    speak, and beside two with further variables, where there are some."""
    one, two = middle[1], middle[2]
    found: dict[str, Any] = against_one(engine, one, two)
    if APART in middle:
        together = middle[APART]["examples_per_s"]
        found["efficiency_apart"] = round(together / (2 * one["examples_per_s"]), 3)
        found["of_apart"] = round(two["examples_per_s"] / together, 3)
    if BESIDE in middle:
        other = middle[BESIDE]
        times = round(other["examples_per_s"] / two["examples_per_s"], 3)
        found["with_beside"] = {**against_one(engine, one, other), "times_without": times}
    return found


def against_one(
    engine: str, one: Mapping[str, float], two: Mapping[str, float]
) -> dict[str, float | bool]:
    """Two workers beside one, and whether that is what is to be reached (before it is rounded)."""
    efficiency = two["examples_per_s"] / (2 * one["examples_per_s"])
    lower = round(two["accuracy"] - one["accuracy"], 4)
    reached = efficiency >= REACH[engine] and lower >= -REACH_ACCURACY
    return {"efficiency": round(efficiency, 3), "accuracy_difference": lower, "reached": reached}


# --- the published table --------------------------------------------------------------------------


def table(work: Work) -> list[dict[str, Any]]:
    """Its rows."""
    measured = {}
    with deploy(work.engine, bucket(), workers=max(PUBLISHED)) as lab:
        pin(lab)
        for workers in PUBLISHED:
            measured[workers] = train(lab, work, workers, TABLE_LIMIT_S)
            note(f"table, {workers}: {measured[workers]}")
    return rows(measured, os.cpu_count() or 1)


def rows(measured: Mapping[int, Mapping[str, float]], cores: int) -> list[dict[str, Any]]:
    """The table's rows of what was measured with so many workers."""
    alone = measured[1]["examples_per_s"]
    return [
        {
            "workers": workers,
            "workers_per_core": max(1.0, workers / cores),
            "epoch_s": round(SAMPLES / found["examples_per_s"], 1),
            "total_s": found["total_s"],
            "start_s": found["start_s"],
            "times_one_worker": round(found["examples_per_s"] / alone, 2),
            "accuracy": found["accuracy"],
            "published_accuracy": PUBLISHED[workers],
            "samples": found["samples"],
        }
        for workers, found in measured.items()
    ]


# --- a run ----------------------------------------------------------------------------------------


def train(lab: kept.Lab, work: Work, workers: int, limit: int) -> dict[str, Any]:
    """Train once with so many workers; figures from the chief's own lines."""
    members = lab.document["nodes"]
    if len(members["worker"]) < workers:
        sys.exit(f"{workers} workers are asked for, and the cluster has {len(members['worker'])}")
    nodes = {**members, "worker": members["worker"][:workers]}
    changed = changes(lab, work, workers)
    began = time.monotonic()
    run = lab.train(**changed, nodes=nodes)
    while "step=" not in lab.sh("worker-0", f"grep -m 1 'progress: step=' {LOG}", check=False):
        if time.monotonic() - began > limit:
            sys.exit(f"{work.engine} told no step: see {LOG}")
        time.sleep(0.5)
    started = time.monotonic() - began
    status = succeeded(run, limit)
    total = time.monotonic() - began
    return {
        "examples_per_s": examples_per_s(lab, "worker-0", work, workers),
        "start_s": round(started, 1),
        "total_s": round(total, 1),
        "samples": status["samples_seen"],
        "accuracy": status["accuracy"],
    }


def apart(lab: kept.Lab, work: Work) -> dict[str, Any]:
    """Train once on each worker's node by itself, at the same time: their rates' sum."""
    nodes = [name for name in lab.containers if name.startswith("worker-")]
    half = work._replace(samples=work.samples // len(nodes))
    runs = lab.train_apart(**changes(lab, half, 1))
    for run in runs:
        succeeded(run, LIMIT_S)
    each = [examples_per_s(lab, node, half, 1) for node in nodes]
    return {"examples_per_s": round(sum(each), 1), "slower": min(each)}


def changes(lab: kept.Lab, work: Work, workers: int) -> dict[str, Any]:
    """What `Lab.train` is told for so many workers that make these samples."""
    batch, learning_rate = step_of(work.engine, work.batch, workers)
    told = {**TOLD, "network": work.network, "batch_size": batch, "learning_rate": learning_rate}
    return {
        "steps": work.samples // batch,
        "mode": lab.document["mode"],
        "program": lab.program(PROGRAMS[work.engine], **told),
        "program_args": {"batch_size": batch},
        "environment": {**lab.document["environment"], **work.variables},
    }


def step_of(engine: str, batch: int, workers: int) -> tuple[int, float]:
    """Samples in a global step, and the learning rate for it."""
    together = workers if engine in TOGETHER else 1
    return batch * together, RATE * together


def succeeded(run: Any, limit: int) -> dict[str, Any]:
    """The status of a run's end; ends the bench when it has failed."""
    status: dict[str, Any] = run.end(limit)
    if status["state"] != "succeeded":
        sys.exit(f"{run.run_id} failed: {status['error']}")
    return status


def examples_per_s(lab: kept.Lab, node: str, work: Work, workers: int) -> float:
    """The rate that a node's chief has told in its lines."""
    batch, _ = step_of(work.engine, work.batch, workers)
    return round(batch * rate(lab.sh(node, f"cat {LOG}").splitlines()), 1)


def rate(lines: list[str]) -> float:
    """Steps per second of all lines of progress but the first."""
    last, spent, steps = Progress(), 0.0, 0
    for line in lines:
        now = after_line(last, line)
        if now.step and last.step and now.step > last.step and now.steps_per_second:
            spent += (now.step - last.step) / now.steps_per_second
            steps += now.step - last.step
        last = now
    return steps / spent


if __name__ == "__main__":
    sys.exit(main())
