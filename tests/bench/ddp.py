"""DDP on one and two nodes, one core each: the published table done fairly, and a larger network.

Usage: ddp.py [REPEATS] [EPOCHS]. On a kept cluster of two workers, each on a core of its own
(taskset), on Fashion-MNIST in the tmpfs /run, in turn:

  one             mnist_lightning.py (the published MLP), one node, batches of 64
  equal_batch     two nodes, the same batches of 64, half of each on a node: as many steps
  equal_per_node  two nodes, 64 on each: half as many steps with twice the batch
  resnet_one      cifar10_torch.py (ResNet-8), one node, one epoch in batches of 128
  resnet_two      two nodes, the same batches, half of each on a node
  mlp_apart, resnet_apart
                  both nodes at once, each by itself with the half batches of `equal_batch` and
                  `resnet_two`: what is left without any communication, the ceiling of DDP here

A step of the MLP takes about as long as its all-reduce, one of the ResNet a hundred times as long.
Rates leave out the start and the first lines of progress; `efficiency` is examples/s over twice
those of one node, accuracy is over the whole test set. `start_s` is from torchrun's start to the
first steps told, `torchrun_s` the whole of torchrun around a program that only meets. JSON on
standard output. Needs the environment of tests/testenv.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from kept import machine, note, say
from machine import ROOT, docker, mayfly, nodes

import testenv
from mayfly.local import platform as local
from mayfly_train.progress import Progress, after_line

PORT = 29500
BENCH = "/run/mayfly-bench"
PYTHON = "/opt/mayfly/runtime/bin/python"
PROGRAMS = ROOT / "training/programs"
NOTHING = "import torch.distributed as d; d.init_process_group('gloo'); d.destroy_process_group()"


@dataclass(frozen=True)
class Way:
    """What is trained on how many nodes, in steps of `batch` samples."""

    nodes: int
    batch: int = 64
    program: str = "mnist_lightning.py"
    per_process: bool = False  # each process takes its own batch, a step all of them
    epochs: int | None = None  # None: as many as the bench is told
    beside: str = "one"  # the way on one node that it is compared with
    apart: bool = False  # each node trains by itself, in steps of half the batch

    def batch_flags(self, batch: int) -> str:
        """The program's flags for steps of `batch` samples in all."""
        if self.per_process:
            return f"--batch-size {batch // self.nodes} --batch-per-process"
        return f"--batch-size {batch}"


RESNET = "cifar10_torch.py"
WAYS = {
    "one": Way(1),
    "equal_batch": Way(2),
    "equal_per_node": Way(2, batch=128, per_process=True),
    "resnet_one": Way(1, batch=128, program=RESNET, epochs=1),
    "resnet_two": Way(2, batch=128, program=RESNET, epochs=1, beside="resnet_one"),
    "mlp_apart": Way(2, apart=True),
    "resnet_apart": Way(2, batch=128, program=RESNET, epochs=1, beside="resnet_one", apart=True),
}


def main() -> int:
    """Measure."""
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    epochs = int(sys.argv[2]) if len(sys.argv) > 2 else 10
    os.environ.update(testenv.environment())
    platform = local.up(note)
    before = machine()
    with deploy(platform) as cluster:
        measured: dict[str, list[dict[str, Any]]] = {name: [] for name in WAYS}
        starts = [cluster.start_alone() for _ in range(repeats)]
        for number in range(repeats):
            turn = number % len(WAYS)
            names = list(WAYS)
            for name in names[turn:] + names[:turn]:
                way = WAYS[name]
                measured[name].append(cluster.train(way, way.epochs or epochs))
                note(f"{number + 1}/{repeats} {name}: {measured[name][-1]}")
    middle = {
        name: {key: round(statistics.median(one[key] for one in found), 4) for key in found[0]}
        for name, found in measured.items()
    }
    rates = {name: found["examples_per_s"] for name, found in middle.items()}
    document = {
        "repeats": repeats,
        "epochs": epochs,
        "median": middle,
        "efficiency": {
            name: round(rates[name] / (way.nodes * rates[way.beside]), 3)
            for name, way in WAYS.items()
            if way.nodes > 1
        },
        "torchrun_s": round(statistics.median(starts), 2),
        "measured": measured,
    }
    say(document, before)
    return 0


@dataclass(frozen=True)
class Cluster:
    """Two kept workers: containers and addresses, the chief's first."""

    host: str
    containers: list[str]
    addresses: list[str]

    def train(self, way: Way, epochs: int) -> dict[str, Any]:
        """Train once; figures of the first node, rates of all."""
        for name in self.containers:
            self._command(name, f"rm -rf {BENCH}/job")
        ranks = list(range(way.nodes))
        if not way.apart:
            return self._measure(ranks, way, way.batch, epochs)
        with ThreadPoolExecutor() as pool:
            alone = pool.map(
                lambda rank: self._measure([rank], way, way.batch // way.nodes, epochs), ranks
            )
            found = list(alone)
        return {**found[0], "examples_per_s": sum(one["examples_per_s"] for one in found)}

    def _measure(self, ranks: list[int], way: Way, batch: int, epochs: int) -> dict[str, Any]:
        """One training of these nodes in steps of `batch` samples; figures of the first."""
        words = f"{BENCH}/{way.program} --data-dir {BENCH}/data --job-dir {BENCH}/job"
        words += f" --epochs {epochs} {way.batch_flags(batch)}"
        began = time.monotonic()
        started, progress, spent, steps = None, Progress(), 0.0, 0
        for line in self._torchrun(ranks, words):
            last, progress = progress, after_line(progress, line)
            if progress.step is None or progress.step == last.step:
                continue
            if started is None:
                started = time.monotonic() - began
            elif last.step is not None and progress.steps_per_second:
                spent += (progress.step - last.step) / progress.steps_per_second
                steps += progress.step - last.step
        if progress.accuracy is None or started is None or not progress.evaluated_step:
            sys.exit("the program ended without an accuracy: see the output above")
        return {
            "seconds": round(time.monotonic() - began, 2),
            "start_s": round(started, 2),
            "examples_per_s": round(steps * batch / spent, 1),
            "samples": progress.evaluated_step * batch,
            "steps": progress.evaluated_step,
            "accuracy": progress.accuracy,
        }

    def start_alone(self) -> float:
        """Seconds of torchrun around a program of two nodes that only meet."""
        for name in self.containers:
            self._command(name, f'mkdir -p {BENCH}; echo "{NOTHING}" > {BENCH}/nothing.py')
        began = time.monotonic()
        for _ in self._torchrun([0, 1], f"{BENCH}/nothing.py"):
            pass
        return time.monotonic() - began

    def _torchrun(self, ranks: list[int], program: str) -> Iterator[str]:
        """Run a program by torchrun on these nodes, each on one core; the first one's lines."""
        options = f"--nnodes {len(ranks)} --nproc-per-node 1 --rdzv-backend c10d"
        options += f" --rdzv-id bench-{time.time_ns()}"
        options += f" --rdzv-endpoint {self.addresses[ranks[0]]}:{PORT}"
        running = [
            self._start(
                rank, rank == ranks[0], f"{options} --local-addr {self.addresses[rank]} {program}"
            )
            for rank in ranks
        ]
        lines = []
        assert running[0].stdout is not None
        for line in running[0].stdout:
            lines.append(line)
            yield line
        codes = [process.wait(timeout=600) for process in running]
        if any(codes):
            sys.exit(f"torchrun failed: {''.join(lines[-20:])}")

    def _start(self, rank: int, first: bool, words: str) -> subprocess.Popen[str]:
        listed = f"ip -o -4 address | grep -F ' {self.addresses[rank]}/' | cut -d ' ' -f 2"
        script = (
            f"export OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=$({listed}); "
            f"exec taskset -c {rank} {PYTHON} -m torch.distributed.run "
            f"--rdzv-conf is_host={str(first).lower()} {words} 2>&1"
        )
        pipe = subprocess.PIPE if first else subprocess.DEVNULL
        command = ["docker", "-H", self.host, "exec", self.containers[rank], "sh", "-c", script]
        return subprocess.Popen(command, stdout=pipe, text=True)

    def _command(self, container: str, script: str) -> str:
        command = ["docker", "-H", self.host, "exec", container, "sh", "-c", script]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{script[:80]} on {container}: {done.stderr[-2000:]}")
        return done.stdout


@contextlib.contextmanager
def deploy(platform: local.LocalPlatform) -> Iterator[Cluster]:
    """Two workers of engine torch after a training of a few steps, destroyed at the end."""
    before = set(nodes(platform))
    done = mayfly(
        *("deploy", "--cloud", "local", "--engine", "torch", "--workers", "2", "--keep", "--json"),
        *("--name", "ddp", "--set", "trainer.steps=20", "--set", "limits.idle=4h"),
    )
    run = str(done.document.get("run"))
    try:
        if done.code:
            sys.exit(done.messages[-3000:])
        yield find(platform, run, sorted(set(nodes(platform)) - before))
    finally:
        mayfly("destroy", run, "--json")


def find(platform: local.LocalPlatform, run: str, made: list[str]) -> Cluster:
    """The run's two workers, with the data in their memory."""
    fetch = f"rm -rf {BENCH}; mkdir -p {BENCH}/data; HADOOP_USER_NAME=mayfly "
    by_address = {}
    for name in made:
        text = docker(platform, "exec", name, "cat", "/etc/mayfly/cluster.json")
        if run not in text:
            continue  # another run's
        cluster = json.loads(text)
        own = docker(platform, "exec", name, "hostname", "-I").split()
        address = next(n["address"] for n in cluster["nodes"]["worker"] if n["address"] in own)
        by_address[address] = name
        get = f"/opt/mayfly/hadoop/bin/hdfs dfs -get '{cluster['data_dir']}/*ubyte.gz' {BENCH}/data"
        docker(platform, "exec", name, "sh", "-c", fetch + get)
        for program in {way.program for way in WAYS.values()}:
            docker(platform, "cp", str(PROGRAMS / program), f"{name}:/tmp/{program}")
            docker(platform, "exec", name, "mv", f"/tmp/{program}", BENCH)
        docker(platform, "cp", str(PROGRAMS / "shared"), f"{name}:/tmp/shared")
        docker(platform, "exec", name, "cp", "-r", "/tmp/shared", BENCH)
    order = [node["address"] for node in cluster["nodes"]["worker"]]
    return Cluster(platform.docker_host, [by_address[address] for address in order], order)


if __name__ == "__main__":
    sys.exit(main())
