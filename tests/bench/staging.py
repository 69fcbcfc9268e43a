"""S3 → HDFS by `mayfly-node stage` beside the old way and the two limits, interleaved in one run.

Usage: staging.py [--files N] [--mib M] [REPEATS]. All on one node of a cluster of three, with
replication 2; five files of 64 MiB unless said. JSON on standard output. Ways, each a command of
its own on the node:
  stage      mayfly-node stage
  old        boto3's download to the node's disk, four files at a time, then `hdfs dfs -put` with
             the JVM, the sizes of packets and checksums that Hadoop has by default
  s3_read    reading from S3 to nowhere, as staging reads, as many files at a time
  hdfs_write writing to HDFS from memory, as staging writes, as many files at a time
`whole` is a command's time as its caller sees it, `work` is without its start (not for `old`).
Needs the environment of tests/testenv.py.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from kept import deploy as deploy_nodes
from kept import machine, node_command, note, say

NODE = "worker-0"
SOURCE = "s3://mayfly/bench/staging"
TARGET = "/mayfly/bench"
SCRATCH = "/var/lib/mayfly/bench"
AGENT = "/opt/mayfly/agent/bin/python -"
HDFS = "HADOOP_USER_NAME=mayfly /opt/mayfly/hadoop/bin/hdfs"
# Ours is quick to start, and has a small heap.
STOCK = "/opt/mayfly/hadoop/bin/hdfs-stock"
MAKE_STOCK = f"sed 's/-Xmx.*TieredStopAtLevel=1//' /opt/mayfly/hadoop/bin/hdfs >{STOCK}"
DEFAULTS = "-D dfs.client-write-packet-size=65536 -D dfs.bytes-per-checksum=512"
WAYS = ("stage", "old", "s3_read", "hdfs_write")

COMMON = """
import json, os, sys, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from mayfly_train import hdfs, manifest, s3
from mayfly_train.stage import PARALLEL
client = s3.connect(s3.S3Settings.from_file(Path("/etc/mayfly/s3.env")))
source = s3.parse_uri(SOURCE)
cluster = json.loads(Path("/etc/mayfly/cluster.json").read_text())
def each(action, names, parallel):
    started = time.monotonic()
    with ThreadPoolExecutor(parallel) as pool:
        list(pool.map(action, names))
    print(json.dumps({"seconds": time.monotonic() - started}))
"""
PREPARE = """
from mayfly_train.framing import SUFFIXES
import hashlib, struct
def file(number):
    size = MIB << 20
    data = struct.pack("<QI", size - 16, 0) + os.urandom(size - 16) + b"1234"
    name = f"train-{number:05d}-of-{FILES:05d}.tfrecords"
    client.put_object(Bucket=source.bucket, Key=source.join(name).key, Body=data)
    return manifest.Entry(name, size, hashlib.sha256(data).hexdigest())
s3.delete_below(client, source)
made = manifest.build("dataset", [file(n) for n in range(FILES)], name="bench")
s3.write_bytes(client, source.join(manifest.NAME), made.to_json().encode(), "application/json")
"""
NAMES = """
names = [n for n in s3.list_sizes(client, source) if n.endswith("tfrecords")]
"""
S3_READ = """
def read(name):
    for chunk in s3.read_chunks(client, source.join(name)):
        pass
each(read, names, PARALLEL)
"""
DOWNLOAD = """
os.makedirs(SCRATCH, exist_ok=True)
each(lambda n: client.download_file(source.bucket, source.join(n).key, f"{SCRATCH}/{n}"), names, 4)
"""
HDFS_WRITE = """
store = hdfs.Hdfs(cluster["namenode"]["rpc"], cluster["namenode"]["http"])
chunk = os.urandom(s3.CHUNK_BYTES)
def written(size):
    while size:
        yield chunk[:size]
        size -= len(chunk[:size])
each(lambda n: store.write_chunks(f"{TARGET}/{n}", written(MIB << 20)), names, PARALLEL)
"""


def main() -> int:
    """Measure; 1 when a way failed."""
    args = options(sys.argv[1:])
    repeats = args.repeats
    with deploy_nodes() as lab:
        note("preparing the data")
        node_command(lab, NODE, AGENT, script(PREPARE, args))
        ways = commands(lab, args)
        before = machine()
        measured: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
        for number in range(repeats):
            turn = number % len(WAYS)
            for way in WAYS[turn:] + WAYS[:turn]:
                clear(lab)
                measured[way].append(ways[way]())
                note(f"{number + 1}/{repeats} {way}: {measured[way][-1]}")
        clear(lab)
        about = {"files": args.files, "mib_per_file": args.mib}
        say({**about, **summary(measured, args.files * args.mib)}, before)
    return 0


def options(words: list[str]) -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--files", type=int, default=5)
    parser.add_argument("--mib", type=int, default=64, help="of each file")
    parser.add_argument("repeats", type=int, nargs="?", default=5)
    return parser.parse_args(words)


def script(text: str, args: argparse.Namespace) -> str:
    """A program for the node with this file's constants, and the data's size, in it."""
    size = {"FILES": args.files, "MIB": args.mib}
    values = {"SOURCE": SOURCE, "TARGET": TARGET, "SCRATCH": SCRATCH, **size}
    head = "".join(f"{name} = {value!r}\n" for name, value in values.items())
    return head + COMMON + text


def commands(lab: Any, args: argparse.Namespace) -> dict[str, Callable[[], dict[str, float]]]:
    """Way → what does it once and says how long it took."""
    namenode = json.loads(lab.sh(NODE, "cat /etc/mayfly/cluster.json"))["namenode"]
    stage = (
        f"mayfly-node stage --env-file /etc/mayfly/s3.env --namenode-http {namenode['http']}"
        f" {SOURCE} {namenode['rpc']}{TARGET}"
    )
    lab.sh(NODE, f"{MAKE_STOCK}; chmod +x {STOCK}; ! grep -E 'Xmx|XX:' {STOCK}")
    stock = f"HADOOP_USER_NAME=mayfly {STOCK} dfs"
    put = f"{stock} -mkdir -p {TARGET} && {stock} {DEFAULTS} -put {SCRATCH}/* {TARGET}/"
    return {
        "stage": lambda: timed(lab, stage),
        "old": lambda: timed(lab, f"{AGENT} && {put}", script(NAMES + DOWNLOAD, args)),
        "s3_read": lambda: timed(lab, AGENT, script(NAMES + S3_READ, args)),
        "hdfs_write": lambda: timed(lab, AGENT, script(NAMES + HDFS_WRITE, args)),
    }


def timed(lab: Any, command: str, text: str = "") -> dict[str, float]:
    """Seconds of a command on the node: as a whole, and of its work by its own account."""
    started = time.monotonic()
    output = node_command(lab, NODE, command, text)
    whole = time.monotonic() - started
    return {"whole": round(whole, 2), "work": round(json.loads(output)["seconds"], 2)}


def clear(lab: Any) -> None:
    """Nothing staged, nothing downloaded, and nothing left to be written to the disks."""
    lab.sh(NODE, f"rm -rf {SCRATCH}; {HDFS} dfs -rm -r -f -skipTrash {TARGET} >/dev/null 2>&1")
    time.sleep(6)  # DataNodes delete blocks with their next heartbeat
    lab.sh(NODE, "sync")


def summary(measured: dict[str, list[dict[str, float]]], mib: int) -> dict[str, Any]:
    """Medians, MiB/s and the two ratios that are asked for."""
    whole = {
        way: statistics.median(one["whole"] for one in found) for way, found in measured.items()
    }
    work = {way: statistics.median(one["work"] for one in found) for way, found in measured.items()}
    slower = max(work["s3_read"], work["hdfs_write"])
    return {
        "mib": mib,
        "repeats": len(measured["stage"]),
        "median_whole_s": whole,
        "median_work_s": {way: work[way] for way in WAYS if way != "old"},
        "mib_per_s": {way: round(mib / (whole if way == "old" else work)[way], 1) for way in WAYS},
        "times_the_old_way": round(whole["old"] / whole["stage"], 2),
        "of_the_slower_limit": round(slower / work["stage"], 2),
        "measured": measured,
    }


if __name__ == "__main__":
    sys.exit(main())
