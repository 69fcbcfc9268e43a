"""One parameter server with two trainers beside one trainer alone, and how many trainers it feeds.

Usage: scaling.py [REPEATS] [STEPS]. All processes on one node of a cluster of three, whose other
daemons rest: the built-in cifar10.py on the default data in the tmpfs /run, batch 128, a trainer on
one core of its own (taskset), the parameter server on any, no evaluator. Every way sees STEPS x 128
samples; accuracy is taken once, after training. Rates count the time in which all trainers were
at work. JSON on standard output.

`ps_limit` is a SIMULATION: real variables of ResNet-8 on a real parameter server, but a trainer
waits for as long as one trainer alone computed per step, then hands in a ready gradient.
Needs the environment of tests/testenv.py.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

from kept import deploy, machine, node_command, note, say

NODE = "worker-0"
WAYS = ("single", "async", "sync")
BATCH = 128
DATA = "/run/mayfly-bench/data"  # as in scaling_run.py
FEEDS = 0.8  # a parameter server feeds n trainers when they get at least this part of n times one
HERE = Path(__file__).parent
ENVIRONMENT = "set -a; . /etc/mayfly/hadoop.env; HADOOP_USER_NAME=mayfly; TF_CPP_MIN_LOG_LEVEL=3"


def main() -> int:
    """Measure."""
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    steps = int(sys.argv[2]) if len(sys.argv) > 2 else 400
    with deploy() as lab:
        cluster = json.loads(lab.sh(NODE, "cat /etc/mayfly/cluster.json"))
        get = f"/opt/mayfly/hadoop/bin/hdfs dfs -get '{cluster['data_dir']}/*.tfrecords' {DATA}/"
        lab.sh(NODE, f"rm -rf {DATA}; mkdir -p {DATA}; HADOOP_USER_NAME=mayfly {get} 2>&1")
        before = machine()
        measured: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
        for number in range(repeats):
            turn = number % len(WAYS)
            for way in WAYS[turn:] + WAYS[:turn]:
                measured[way].append(on_node(lab, cluster, "scaling_run.py", way, str(steps)))
                note(f"{number + 1}/{repeats} {way}: {measured[way][-1]}")
        rates = {way: median(measured[way], "examples_per_s") for way in WAYS}
        wait_ms = 1000 * BATCH / rates["single"]
        limit = on_node(lab, cluster, "ps_limit_run.py", f"{wait_ms:.1f}")
        document = {
            "repeats": repeats,
            "samples": steps * BATCH,
            "median_examples_per_s": rates,
            "times_single": {way: round(rates[way] / rates["single"], 2) for way in WAYS[1:]},
            "median_accuracy": {way: median(measured[way], "accuracy") for way in WAYS},
            "ps_limit": summary(limit, wait_ms),
            "measured": measured,
        }
        lab.sh(NODE, f"rm -rf {DATA}")
        say(document, before)
    return 0


def on_node(lab: Any, cluster: dict[str, Any], name: str, *arguments: str) -> Any:
    """Run a program of this directory in the node's training environment; its JSON document."""
    words = " ".join((cluster["program"]["path"], *arguments))
    script = f"{ENVIRONMENT}; {cluster['python']} - {words}"
    output = node_command(lab, NODE, script, (HERE / name).read_text())
    return json.loads(output.splitlines()[-1])


def median(found: list[dict[str, Any]], key: str) -> float:
    """The median of one figure."""
    return round(statistics.median(one[key] for one in found), 4)


def summary(rates: dict[str, float], wait_ms: float) -> dict[str, Any]:
    """The most trainers that one parameter server feeds, by the simulation."""
    parts = {int(n): rate / (int(n) * rates["1"]) for n, rate in rates.items()}
    return {
        "simulation": "computation replaced by waiting",
        "wait_ms": round(wait_ms, 1),
        "steps_per_s": rates,
        "part_of_linear": {n: round(part, 2) for n, part in parts.items()},
        "trainers_fed": max(n for n, part in parts.items() if part >= FEEDS),
    }


if __name__ == "__main__":
    sys.exit(main())
