"""Each engine with one worker and with two, on one core each: rate, efficiency, accuracy, start.

Usage: engines.py [REPEATS] [EPOCHS] [ENGINE …]. For each engine a kept cluster of two workers (and
a parameter server where it has one, on any core) trains its built-in program as a run of its own,
supervised as always, in turn with one worker and with two. All see the same samples of
Fashion-MNIST: a network of two convolutions where the program has one, else the MLP, in batches of
128. Rates leave out the start and the first lines of progress; `start_s` is from the units' start
to the first step told. For engine torch see ddp.py. JSON on standard output. Needs the environment
of tests/testenv.py.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

from kept import deploy, kept, machine, note, say

import testenv
from mayfly_train import s3
from mayfly_train.progress import Progress, after_line

BATCH, SAMPLES = 128, 60_000
PROGRAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "horovod": ("mnist_horovod_keras", {}),
    "keras-ps": ("mnist_keras_ps", {"network": "cnn"}),
    "mwms": ("mnist_mwms", {"network": "cnn"}),
}
LOG = "/var/log/mayfly/chief-0.log"
PINNED = "/run/systemd/system/mayfly-task@.service.d"
LIMIT_S = 1800


def main() -> int:
    """Measure."""
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    epochs = int(sys.argv[2]) if len(sys.argv) > 2 else 3
    steps = epochs * SAMPLES // BATCH
    before, engines = machine(), {}
    for engine in sys.argv[3:] or PROGRAMS:
        with deploy(engine, bucket()) as lab:
            pin(lab)
            engines[engine] = measure(lab, engine, repeats, steps)
    say({"repeats": repeats, "samples": steps * BATCH, "engines": engines}, before)
    return 0


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
    """Give the tasks of each worker's node one core of their own."""
    for core in (0, 1):
        unit = f"printf '[Service]\\nCPUAffinity={core}\\n' > {PINNED}/core.conf"
        lab.sh(f"worker-{core}", f"mkdir -p {PINNED}; {unit}; systemctl daemon-reload")


def measure(lab: kept.Lab, engine: str, repeats: int, steps: int) -> dict[str, Any]:
    """Medians and their ratio, and what they are of."""
    measured: dict[int, list[dict[str, Any]]] = {1: [], 2: []}
    for number in range(repeats):
        for workers in (1, 2) if number % 2 == 0 else (2, 1):
            measured[workers].append(train(lab, engine, workers, steps))
            note(f"{engine} {number + 1}/{repeats}, {workers}: {measured[workers][-1]}")
    middle = {
        workers: {key: round(statistics.median(one[key] for one in found), 4) for key in found[0]}
        for workers, found in measured.items()
    }
    rates = {workers: found["examples_per_s"] for workers, found in middle.items()}
    return {"median": middle, "efficiency": round(rates[2] / (2 * rates[1]), 3), **measured}


def train(lab: kept.Lab, engine: str, workers: int, steps: int) -> dict[str, Any]:
    """Train once with so many workers; figures from the chief's own lines."""
    name, options = PROGRAMS[engine]
    program = lab.program(name, **{"log_steps": 20, "batch_size": BATCH, **options})
    members = lab.document["nodes"]
    nodes = {**members, "worker": members["worker"][:workers]}
    mode = lab.document["mode"]
    began = time.monotonic()
    run = lab.train(steps, mode, program=program, nodes=nodes, program_args={"batch_size": BATCH})
    while "step=" not in lab.sh("worker-0", f"grep -m 1 'progress: step=' {LOG}", check=False):
        if time.monotonic() - began > LIMIT_S:
            sys.exit(f"{engine} told no step: see {LOG}")
        time.sleep(0.5)
    started = time.monotonic() - began
    status = run.end(LIMIT_S)
    if status["state"] != "succeeded":
        sys.exit(f"{engine} failed: {status['error']}")
    return {
        "examples_per_s": round(BATCH * rate(lab.sh("worker-0", f"cat {LOG}").splitlines()), 1),
        "start_s": round(started, 1),
        "samples": status["samples_seen"],
        "accuracy": status["accuracy"],
    }


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
