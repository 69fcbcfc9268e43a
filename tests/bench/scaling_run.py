"""On a node: train once, alone or distributed, and print rate and accuracy as JSON.

Usage: scaling_run.py PROGRAM single|async|sync STEPS. Standard library only.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from typing import Any

DATA, JOB = "/run/mayfly-bench/data", "/run/mayfly-bench/job"
BATCH, LOG_STEPS, PORT = 128, 10, 23230
PROGRESS = re.compile(r"step = (\d+)(?: |$)")
ACCURACY = re.compile(r"Saving dict for global step \d+: accuracy = ([\d.]+)")
LIMIT_S = 600


class Task:
    """One process of a training, with the times at which it told a global step."""

    def __init__(self, command: list[str], tf_config: dict[str, Any] | None):
        environment = {**os.environ, "TF_ENABLE_ONEDNN_OPTS": "1"}  # as the nodes have it
        if tf_config:
            environment["TF_CONFIG"] = json.dumps(tf_config)
        self.told: list[tuple[float, int]] = []
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            command, env=environment, stderr=subprocess.STDOUT, stdout=subprocess.PIPE, text=True
        )
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self.lines.append(line)
            found = PROGRESS.search(line)
            if found and "loss" in line:
                self.told.append((time.monotonic(), int(found[1])))

    def end(self) -> None:
        """Wait for the process, which must end well."""
        code = self.process.wait(LIMIT_S)
        self.reader.join()
        if code:
            sys.exit("".join(self.lines[-30:]))

    def step_at(self, moment: float) -> float:
        """The global step at a moment between two that were told."""
        pairs = zip(self.told, self.told[1:])
        for (before, low), (after, high) in pairs:
            if before <= moment <= after:
                return low + (high - low) * (moment - before) / (after - before)
        return float(self.told[-1][1])


def main() -> int:
    """Train and evaluate."""
    program, way, steps = sys.argv[1:4]
    shutil.rmtree(JOB, ignore_errors=True)
    command = [
        *(sys.executable, program, "--data-dir", DATA, "--job-dir", JOB, "--train-steps", steps),
        *("--batch-size", str(BATCH), "--log-steps", str(LOG_STEPS), "--threads", "1"),
        *("--checkpoint-seconds", "3600"),
    ]
    if way == "single":
        trainers = [Task(["taskset", "-c", "0", *command], None)]
        trainers[0].end()
        evaluated = trainers[0]
    else:
        command += ["--sync"] if way == "sync" else []
        trainers, evaluated = distributed(command)
    starts = [one.told[0][0] for one in trainers]
    begin, end = max(starts), min(one.told[-1][0] for one in trainers)
    chief = trainers[0]
    samples = (chief.step_at(end) - chief.step_at(begin)) * BATCH
    accuracy = ACCURACY.findall("".join(evaluated.lines))
    result = {
        "examples_per_s": round(samples / (end - begin), 1),
        "accuracy": float(accuracy[-1]),
        "samples": int(steps) * BATCH,
        "measured_s": round(end - begin, 1),
    }
    shutil.rmtree(JOB, ignore_errors=True)
    print(json.dumps(result))
    return 0


def distributed(command: list[str]) -> tuple[list[Task], Task]:
    """Train with one parameter server and two trainers, then evaluate."""
    roles = {"ps": 0, "chief": 1, "worker": 2}
    cluster = {name: [f"127.0.0.1:{PORT + number}"] for name, number in roles.items()}
    config = {
        name: {"cluster": cluster, "task": {"type": name, "index": 0}}
        for name in (*roles, "evaluator")
    }
    server = Task(command, config["ps"])
    try:
        chief = Task(["taskset", "-c", "0", *command], config["chief"])
        worker = Task(["taskset", "-c", "1", *command], config["worker"])
        for one in (chief, worker):
            one.end()
    finally:
        server.process.kill()  # it never ends by itself
    evaluator = Task(command, config["evaluator"])
    evaluator.end()
    return [chief, worker], evaluator


if __name__ == "__main__":
    sys.exit(main())
