"""Mayfly's start of Horovod beside `horovodrun`'s, and of torchrun by a unit beside one by hand.

Usage: launchers.py [REPEATS] [STEPS] [ENGINE …]. On a kept cluster of two workers, each task on a
core of its own, the same program makes the same steps on the same samples, in turn as a run of
Mayfly (`ours`: supervised, no SSH) and by the framework's own launcher (`own`: for Horovod from the
first node over SSH, with a key that lives as long as the cluster). Rates leave out the start and
the first lines of progress; `start_s` is from the start to the first step told; `ratio` is ours to
own, and `reached` says whether ours is slower by a tenth at most.
JSON on standard output. Needs the environment of tests/testenv.py.
"""

from __future__ import annotations

import json
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from engines import BATCH, LIMIT_S, LOG, bucket, pin, rate
from kept import deploy, kept, machine, node_command, note, say

PROGRAMS = {"horovod": "mnist_horovod_keras", "torch": "mnist_lightning"}
BENCH = "/run/mayfly-bench"
TASKS = {"worker-0": "chief-0", "worker-1": "worker-0"}  # by the lab's nodes
SSH = "/root/.ssh"
TOLD = "progress: step="
STEPS = 4680  # ten epochs: the rate of a run that is over in seconds is mostly chance
REACH = 0.9  # of the rate under the framework's own launcher


def main() -> int:
    """Measure."""
    words = sys.argv[1:]
    repeats = int(words[0]) if words else 5
    steps = int(words[1]) if len(words) > 1 else STEPS
    before, engines = machine(), {}
    for engine in words[2:] or PROGRAMS:
        with deploy(engine, bucket()) as lab:
            pin(lab)
            engines[engine] = measure(lab, engine, repeats, steps)
    say({"repeats": repeats, "steps": steps, "batch": BATCH, "engines": engines}, before)
    return 0


def measure(lab: kept.Lab, engine: str, repeats: int, steps: int) -> dict[str, Any]:
    """Medians of both ways, and their ratio."""
    measured: dict[str, list[dict[str, float]]] = {"ours": [], "own": []}
    ways = {"ours": ours, "own": own}
    for number in range(repeats):
        for name in list(ways) if number % 2 == 0 else reversed(ways):
            measured[name].append(ways[name](lab, engine, steps))
            note(f"{engine} {number + 1}/{repeats} {name}: {measured[name][-1]}")
    middle = {
        name: {key: round(statistics.median(one[key] for one in found), 2) for key in found[0]}
        for name, found in measured.items()
    }
    return {"median": middle, **compared(middle), **measured}


def compared(middle: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """Our rate to that of the framework's own launcher, and whether it is what is to be reached."""
    ratio = round(middle["ours"]["examples_per_s"] / middle["own"]["examples_per_s"], 3)
    return {"ratio": ratio, "reached": ratio >= REACH}


def ours(lab: kept.Lab, engine: str, steps: int) -> dict[str, float]:
    """A run of Mayfly."""
    began = time.monotonic()
    run = lab.train(
        steps,
        lab.document["mode"],
        program=lab.program(PROGRAMS[engine], **options(engine)),
        program_args={"batch_size": BATCH},
    )
    started = None
    while not (status := run.status()) or status["state"] not in kept.ENDED:
        if started is None and TOLD in lab.sh("worker-0", f"cat {LOG}", check=False):
            started = time.monotonic() - began
        if time.monotonic() - began > LIMIT_S:
            sys.exit(f"{engine} did not end: see {LOG}")
        time.sleep(0.3 if started is None else 2.0)  # each look costs the nodes some of their time
    if status["state"] != "succeeded" or started is None:
        sys.exit(f"{engine} failed: {status['error']}")
    return figures(lab.sh("worker-0", f"cat {LOG}").splitlines(), started)


def options(engine: str) -> dict[str, Any]:
    """What the program is told: lines of progress often enough for a rate, where it has a say."""
    told = {"batch_size": BATCH, "log_steps": 20}
    return told if engine == "horovod" else {"batch_size": BATCH}


def figures(lines: list[str], started: float) -> dict[str, float]:
    return {"examples_per_s": round(BATCH * rate(lines), 1), "start_s": round(started, 1)}


def own(lab: kept.Lab, engine: str, steps: int) -> dict[str, float]:
    """The framework's own launcher; the nodes know how from the run before."""
    if not lab.trainings:
        ours(lab, engine, steps)
    suffix = f"-own-{time.time_ns()}"
    told = {node: explained(lab, node, suffix) for node in TASKS}
    for core, node in enumerate(told):
        lab.sh(node, f"mkdir -p {BENCH}")
        text = f'#!/bin/sh\ncd {told[node]["directory"]}\nexec taskset -c {core} "$@"\n'
        node_command(lab, node, f"cat > {BENCH}/pinned; chmod 755 {BENCH}/pinned", text)
    nodes = list(told) if engine == "torch" else [next(iter(told))]
    if engine == "horovod":
        allow_ssh(lab)
    began = time.monotonic()
    running = [start(lab, node, told[node], launcher(engine, told, node)) for node in nodes]
    lines: list[str] = []
    started = None
    for line in running[0].stdout or ():
        line = line.partition("<stdout>:")[2] or line  # horovodrun says whose line it is
        lines.append(line)
        if started is None and TOLD in line:
            started = time.monotonic() - began
    codes = [process.wait(timeout=LIMIT_S) for process in running]
    if any(codes) or started is None:
        sys.exit(f"{engine}'s own launcher failed: {''.join(lines[-20:])}")
    return figures(lines, started)


def explained(lab: kept.Lab, node: str, suffix: str) -> dict[str, Any]:
    """What the node's task of the last run was given, with a job directory of its own."""
    found = dict(json.loads(lab.sh(node, f"mayfly-node explain {TASKS[node]} --json"))["tasks"][0])
    run = f"/mayfly/{found['environment']['MAYFLY_RUN']}"
    found["command"] = [word.replace(run, f"{run}{suffix}") for word in found["command"]]
    return found


def launcher(engine: str, told: dict[str, dict[str, Any]], node: str) -> list[str]:
    """The command line on a node: the task's own with the launcher of the framework."""
    command, environment = told[node]["command"], told[node]["environment"]
    if engine == "torch":
        return [f"{BENCH}/pinned", *command]
    python, program = command[0], command[command.index("--") + 1 :]
    hosts = ",".join(f"{one['address']}:1" for one in told.values())
    words = [
        f"{python.rpartition('/')[0]}/horovodrun",
        "--gloo",
        "-np",
        str(len(told)),
        "-H",
        hosts,
    ]
    words += ["--network-interfaces", environment["HOROVOD_GLOO_IFACE"]]
    return [*words, f"{BENCH}/pinned", *program]


def start(
    lab: kept.Lab, node: str, task: dict[str, Any], words: list[str]
) -> subprocess.Popen[str]:
    """Start a command on a node in its task's environment, which its unit has from a file, too."""
    variables = task["environment"].items()
    environment = [word for key, value in variables for word in ("-e", f"{key}={value}")]
    docker = ["docker", "-H", lab.platform.docker_host, "exec", *environment]
    script = f"set -a; . /etc/mayfly/hadoop.env; exec {shlex.join(words)} 2>&1"
    return subprocess.Popen(
        [*docker, lab.containers[node], "sh", "-c", script], stdout=subprocess.PIPE, text=True
    )


def allow_ssh(lab: kept.Lab) -> None:
    """Let the first node log in to the second, as horovodrun must and Mayfly never does."""
    make = f"mkdir -pm 700 {SSH}; test -e {SSH}/id_ed25519 || ssh-keygen -qt ed25519 -N '' -f "
    key = lab.sh("worker-0", f"{make} {SSH}/id_ed25519; cat {SSH}/id_ed25519.pub")
    for node in TASKS:
        add = f'mkdir -pm 700 {SSH}; k=$(cat); grep -qF "$k" {SSH}/authorized_keys 2>/dev/null'
        node_command(lab, node, f'{add} || echo "$k" >> {SSH}/authorized_keys', key)


if __name__ == "__main__":
    sys.exit(main())
