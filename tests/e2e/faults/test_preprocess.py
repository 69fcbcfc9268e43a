"""Two nodes preprocess Fashion-MNIST together; one of them is killed while it has a shard."""

from __future__ import annotations

import json
import time

import numpy
import pytest
from machine import mayfly

from faults.lab import CLUSTER
from faults.nodes import AGENT_PYTHON, LIMIT_S, command, install_converters, stage_command, start
from mayfly import fashion_mnist
from mayfly_train.convert.idx import PARTS, read_array

SHARDS = 48
SCALE = (0.1307, 0.3081)
# On a node: the state of the work, and sums over what was made, as the client of HDFS sees them.
LOOK = """
import io, json, sys
from pathlib import Path
from mayfly_train.hdfs import Hdfs
cluster = json.loads(Path("/etc/mayfly/cluster.json").read_text())
store = Hdfs(cluster["namenode"]["rpc"], cluster["namenode"]["http"])
directory = sys.argv[1]
"""
# The shards that a node is just writing: no record of them is there yet.
HOLDS = """
names = {info.path.rpartition("/")[2] for info in store.list_directory(directory + "/_preprocess")}
for claim, _, node in [name.partition(".by.") for name in names if ".by." in name]:
    if node == sys.argv[2] and claim + ".part" in names and claim + ".record" not in names:
        print(claim.rpartition(".")[0])
"""
SUMS = """
import hashlib
import numpy
made = json.loads(store.read_bytes(directory + "/manifest.json"))
about = json.loads(store.read_bytes(directory + "/metadata.json"))
here = {info.path.rpartition("/")[2]: info.size for info in store.list_directory(directory)}
here.pop("_preprocess")
assert set(here) == {entry["path"] for entry in made["files"]} | {"manifest.json"}, here
entries = {entry["path"]: entry for entry in made["files"]}
sums = {}
for split, files in about["files"].items():
    rows = []
    for name, count in files:
        data = store.read_bytes(directory + "/" + name)
        found = {"path": name, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        assert found == entries[name], found
        part = numpy.load(io.BytesIO(data))
        image = part["image"].astype("f8")
        assert len(part) == count and image.shape[1:] == (1, 28, 28), (name, image.shape)
        rows.append([count, image.sum(), (image * image).sum(), part["label"].sum()])
    sums[split] = numpy.array(rows).sum(0).tolist()
print(json.dumps({"sums": sums, "shards": made["shards"]}))
"""


def preprocess_command(lab, node: str, source: str, directory: str) -> str:
    """The command that role `dataset` runs on a node."""
    namenode = json.loads(lab.sh(node, f"cat {CLUSTER}"))["namenode"]
    return (
        f"exec mayfly-node preprocess --namenode-http {namenode['http']} --worker {node}"
        f" --to tensors --shards {SHARDS} --normalise {SCALE[0]} {SCALE[1]}"
        f" {namenode['rpc']}{source} {namenode['rpc']}{directory}"
    )


def ask(lab, program: str, *words: str) -> str:
    """What a program over HDFS prints on a node."""
    text = f"{AGENT_PYTHON} - {' '.join(words)} <<'END'\n{LOOK}{program}\nEND"
    return lab.sh("worker-0", text)


@pytest.fixture
def staged(lab):
    """Fashion-MNIST's IDX files in HDFS, and a directory for the result; both are removed."""
    lab.heal()
    idx = fashion_mnist.find(None, lambda text, fraction: None)
    uri = "s3://mayfly/faults/fashion-mnist-idx/"
    put = mayfly("data", "put", str(idx), uri, "--format", "files", "--json")
    assert put.code == 0, put.messages
    source, directory = "/mayfly/case-idx", "/mayfly/case-tensors"
    for node in ("worker-0", "worker-1"):
        install_converters(lab, node)
    done = command(lab, "worker-0", stage_command(lab, uri.rstrip("/"), source))
    assert done.code == 0, done.messages
    yield idx, source, directory
    remove = f"HADOOP_USER_NAME=hdfs /opt/mayfly/hadoop/bin/hdfs dfs -rm -r -f -skipTrash {source}"
    lab.sh("worker-0", f"{remove} {directory} 2>/dev/null")


def kill_with_a_shard(lab, node: str, directory: str) -> str:
    """Kill a node's process at a moment when it has a shard that is not done; the shard's name."""
    find = "pgrep -f '[m]ayfly_train preprocess' || true"
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        pid = (lab.sh(node, find).split() or [""])[-1]
        if pid:
            lab.sh(node, f"kill -STOP {pid}", check=False)
            held = ask(lab, HOLDS, directory, node).split()
            if held:
                lab.sh(node, f"kill -KILL {pid}")
                return held[0]
            lab.sh(node, f"kill -CONT {pid}", check=False)
        time.sleep(0.3)
    raise AssertionError(f"{node} never had a shard")


def expected_sums(idx) -> dict[str, list[float]]:
    """Number, sum and sum of squares of the pixels, and sum of the labels, of each split."""
    sums = {}
    for split, pair in PARTS.items():
        pixels, labels = (read_array(idx / f"{name}.gz") for name in pair)
        values = ((numpy.arange(256, dtype="f4") / 255 - SCALE[0]) / SCALE[1]).astype("f8")
        often = numpy.bincount(pixels.ravel(), minlength=256)
        squares = float(often @ values**2)
        sums[split] = [len(labels), float(often @ values), squares, int(labels.astype("i8").sum())]
    return sums


def test_a_shard_of_a_killed_node_is_done_by_the_other(lab, staged):
    idx, source, directory = staged
    started = time.monotonic()
    nodes = {
        node: start(lab, node, preprocess_command(lab, node, source, directory))
        for node in ("worker-0", "worker-1")
    }
    shard = kill_with_a_shard(lab, "worker-1", directory)
    killed = time.monotonic()
    output, messages = nodes["worker-0"].communicate(timeout=LIMIT_S)
    print(f"killed after {killed - started:.1f} s, done {time.monotonic() - killed:.1f} s later")
    nodes["worker-1"].communicate(timeout=LIMIT_S)
    assert nodes["worker-0"].returncode == 0, messages
    result = json.loads(output)
    assert result["changed"] is True

    found = json.loads(ask(lab, SUMS, directory))
    made = found["shards"]
    assert result["of"] == len(made) == SHARDS + 8  # 1,250 examples each
    assert {name: said["attempts"] for name, said in made.items()} == dict.fromkeys(made, 1) | {
        shard: 2
    }
    assert made[shard]["node"] == "worker-0"
    assert sum(said["node"] == "worker-0" for said in made.values()) == result["shards"]
    assert sum(said["examples"] for said in made.values()) == 70_000
    expected = expected_sums(idx)
    for split, sums in found["sums"].items():
        assert sums == pytest.approx(expected[split], rel=1e-6)

    again = command(lab, "worker-1", preprocess_command(lab, "worker-1", source, directory))
    assert again.code == 0, again.messages
    assert json.loads(again.output)["changed"] is False
