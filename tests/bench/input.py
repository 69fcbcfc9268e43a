"""Training fed from HDFS beside the same training with its data in memory, interleaved.

Usage: input.py [REPEATS] [STEPS]. One trainer alone on one node of a cluster of three: the built-in
cifar10.py without TF_CONFIG, the default data, batch 128. JSON on standard output. Ways:
  hdfs    data_dir on hdfs://, `--cache-mb 0`: each record of each epoch comes from HDFS, as with
          data larger than memory
  memory  the same files in the tmpfs /run and `--cache-mb 4096`: parsed records stay in the
          process
Only steps count, from the first progress line to the last: no start, no evaluation.
Needs the environment of tests/testenv.py.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from typing import Any

from kept import deploy, machine, node_command, note, say

NODE = "worker-0"
MEMORY = "/run/mayfly-bench/data"
BATCH = 128
LOG_STEPS = 20
PROGRESS = re.compile(r"step = (\d+) \(([\d.]+) sec\)")
WAYS = ("hdfs", "memory")


def main() -> int:
    """Measure."""
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    steps = int(sys.argv[2]) if len(sys.argv) > 2 else 500
    with deploy() as lab:
        cluster = json.loads(lab.sh(NODE, "cat /etc/mayfly/cluster.json"))
        copy_to_memory(lab, cluster["data_dir"])
        sources = {"hdfs": (cluster["data_dir"], 0), "memory": (MEMORY, 4096)}
        before = machine()
        measured: dict[str, list[float]] = {way: [] for way in WAYS}
        for number in range(repeats):
            for way in WAYS if number % 2 == 0 else reversed(WAYS):
                rate = train(lab, cluster, *sources[way], steps)
                measured[way].append(rate)
                note(f"{number + 1}/{repeats} {way}: {rate} examples/s")
        lab.sh(NODE, f"rm -rf {MEMORY}")
        medians = {way: statistics.median(measured[way]) for way in WAYS}
        document = {
            "repeats": repeats,
            "steps": steps,
            "batch": BATCH,
            "median_examples_per_s": medians,
            "of_memory": round(medians["hdfs"] / medians["memory"], 3),
            "measured": measured,
        }
        say(document, before)
    return 0


def copy_to_memory(lab: Any, data_dir: str) -> None:
    """The data set's files, out of HDFS."""
    get = f"/opt/mayfly/hadoop/bin/hdfs dfs -get '{data_dir}/*.tfrecords' {MEMORY}/"
    lab.sh(NODE, f"rm -rf {MEMORY}; mkdir -p {MEMORY}; HADOOP_USER_NAME=mayfly {get} 2>/dev/null")


def train(lab: Any, cluster: dict[str, Any], data: str, cache_mb: int, steps: int) -> float:
    """Train once; examples per second."""
    job = "/run/mayfly-bench/job"
    program = (
        f"{cluster['python']} {cluster['program']['path']} --data-dir {data} --job-dir {job}"
        f" --train-steps {steps} --batch-size {BATCH} --log-steps {LOG_STEPS}"
        f" --cache-mb {cache_mb} --checkpoint-seconds 3600"
    )
    variables = "TF_ENABLE_ONEDNN_OPTS=1; MAYFLY_TASK=bench; HADOOP_USER_NAME=mayfly"
    environment = f"set -a; . /etc/mayfly/hadoop.env; {variables}"
    script = f"{environment}; rm -rf {job}; {program} 2>&1; code=$?; rm -rf {job}; exit $code"
    lines = PROGRESS.findall(node_command(lab, NODE, script))
    seconds = sum(float(took) for _, took in lines)
    return round(len(lines) * LOG_STEPS * BATCH / seconds, 1)


if __name__ == "__main__":
    sys.exit(main())
