"""Preprocessing by one node beside all nodes together, interleaved in one run.

Usage: preprocess.py [REPEATS] [idx|images] [SHARDS]. Two workers of a cluster of three (replication
2), each with one core, convert to tensors: `idx` twice Fashion-MNIST's pictures, from unpacked IDX
files; `images` 2,000 JPEG files of 320x240, resized to 64. JSON on standard output: `whole` is the
time from the first command's start to the last one's end, `work` the longest of the nodes' own
accounts, without the start of Python. DataNodes are not held to a core, and all nodes share one
disk: see `machine`. Needs the environment of tests/testenv.py.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kept import deploy as deploy_nodes
from kept import kept as lab_module
from kept import machine, node_command, node_tools, note, say

NODES = ("worker-0", "worker-1")
SOURCE, TARGET = "/mayfly/bench-idx", "/mayfly/bench-tensors"
AGENT = f"{node_tools.AGENT_PYTHON} -"
HDFS = "HADOOP_USER_NAME=mayfly /opt/mayfly/hadoop/bin/hdfs"
WAYS = {"one_node": NODES[:1], "all_nodes": NODES}
# On a node: the files are made there, as nothing of it is about S3.
COMMON = """
import hashlib, io, json, math, os, struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from mayfly_train import hdfs, manifest
cluster = json.loads(Path("/etc/mayfly/cluster.json").read_text())
store = hdfs.Hdfs(cluster["namenode"]["rpc"], cluster["namenode"]["http"])
def put(name, content):
    store.write_chunks(f"{SOURCE}/{name}", [content])
    return manifest.Entry(name, len(content), hashlib.sha256(content).hexdigest())
def finish(entries):
    made = manifest.build("dataset", entries, name="bench", format="files")
    store.write_bytes(f"{SOURCE}/{manifest.NAME}", made.to_json().encode())
"""
IDX = """
def content(shape):
    head = struct.pack(">HBB", 0, 8, len(shape)) + struct.pack(f">{len(shape)}I", *shape)
    size = math.prod(shape)
    return head + (os.urandom(size) if len(shape) > 1 else bytes(range(10)) * (size // 10))
split = {"train": 120_000, "t10k": 20_000}
shapes = {f"{n}-images-idx3-ubyte": (count, 28, 28) for n, count in split.items()}
shapes |= {f"{n}-labels-idx1-ubyte": (count,) for n, count in split.items()}
finish([put(name, content(shape)) for name, shape in shapes.items()])
"""
IMAGES = """
import numpy
from PIL import Image
def picture(number):
    noise = numpy.random.default_rng(number).integers(0, 256, (12, 16, 3), numpy.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).resize((320, 240)).save(file, "JPEG")
    return put(f"class-{number % 10}/{number:05d}.jpg", file.getvalue())
with ThreadPoolExecutor(8) as pool:
    finish(list(pool.map(picture, range(2000))))
"""
KINDS = {"idx": IDX, "images": IMAGES}


def main() -> int:
    """Measure; not 0 when a way failed."""
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    kind = sys.argv[2] if len(sys.argv) > 2 else "idx"
    shards = int(sys.argv[3]) if len(sys.argv) > 3 else 16
    with deploy_nodes() as lab:
        note("preparing the nodes and the data")
        for node in NODES:
            node_tools.install_converters(lab, node)
        prepare = f"SOURCE = {SOURCE!r}\n{COMMON}{KINDS[kind]}"
        node_command(lab, NODES[0], AGENT, prepare)
        before = machine()
        measured: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
        for number in range(repeats):
            order = list(WAYS) if number % 2 == 0 else list(WAYS)[::-1]
            for way in order:
                clear(lab)
                measured[way].append(once(lab, WAYS[way], shards))
                note(f"{number + 1}/{repeats} {way}: {measured[way][-1]}")
        clear(lab)
        lab.sh(NODES[0], f"{HDFS} dfs -rm -r -f -skipTrash {SOURCE} >/dev/null 2>&1")
        say({"kind": kind, "shards": shards, **summary(measured)}, before)
    return 0


def once(lab: Any, nodes: tuple[str, ...], shards: int) -> dict[str, Any]:
    """Preprocess on these nodes at the same time: seconds, and the shards that each node made."""
    namenode = json.loads(lab.sh(nodes[0], f"cat {lab_module.CLUSTER}"))["namenode"]

    def run(node: str) -> dict[str, Any]:
        script = (
            f"taskset -c {NODES.index(node)} mayfly-node preprocess --worker {node}"
            f" --namenode-http {namenode['http']}"
            f" --to tensors --shards {shards} --normalise 0.1307 0.3081 --image-size 64"
            f" {namenode['rpc']}{SOURCE} {namenode['rpc']}{TARGET}"
        )
        return dict(json.loads(node_command(lab, node, script)))

    started = time.monotonic()
    with ThreadPoolExecutor(len(nodes)) as pool:
        results = list(pool.map(run, nodes))
    whole = time.monotonic() - started
    shares = [result["shards"] for result in results]
    if sum(shares) != results[0]["of"]:
        sys.exit(f"{shares} shards of {results[0]['of']}: some were done twice or not at all")
    return {
        "whole": round(whole, 2),
        "work": max(result["seconds"] for result in results),
        "shards": shares,
        "examples": sum(result["examples"] for result in results),
    }


def clear(lab: Any) -> None:
    """Nothing made, and nothing left to be written to the disks."""
    lab.sh(NODES[0], f"{HDFS} dfs -rm -r -f -skipTrash {TARGET} >/dev/null 2>&1")
    time.sleep(6)  # DataNodes delete blocks with their next heartbeat
    for node in NODES:
        lab.sh(node, "sync")


def summary(measured: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Medians, examples a second, and how many times faster all nodes were."""
    whole, work = (
        {way: statistics.median(one[key] for one in found) for way, found in measured.items()}
        for key in ("whole", "work")
    )
    examples = measured["one_node"][0]["examples"]
    return {
        "nodes": len(NODES),
        "repeats": len(measured["one_node"]),
        "examples": examples,
        "median_whole_s": whole,
        "median_work_s": work,
        "examples_per_s": {way: round(examples / seconds) for way, seconds in work.items()},
        "times_one_node": round(work["one_node"] / work["all_nodes"], 2),
        "times_one_node_whole": round(whole["one_node"] / whole["all_nodes"], 2),
        "measured": measured,
    }


if __name__ == "__main__":
    sys.exit(main())
