"""What cases of staging and export need on a node of the lab: a command's whole outcome, keys."""

from __future__ import annotations

import json
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import numpy

from faults.lab import CLUSTER, Lab
from mayfly_train import manifest, s3
from mayfly_train.convert import tfrecord

LIMIT_S = 180  # whatever ends in failure says so within this time
IMAGE_BYTES = 3 * 32 * 32
FILES = 6
RECORDS = 2600  # 8 MB a file
AGENT_PYTHON = "/opt/mayfly/agent/bin/python"
_INSTALL_CONVERTERS = f"""
{AGENT_PYTHON} -c 'import numpy, PIL, google_crc32c' 2>/dev/null && exit 0
uv=$(ls -d /opt/mayfly/lib/uv/*.data/scripts/uv | tail -n 1)
exec $uv pip install --quiet --offline --no-config --no-cache --no-index \\
  --find-links /opt/mayfly/cache/wheels --python {AGENT_PYTHON} numpy pillow google-crc32c
"""


@dataclass(frozen=True)
class Done:
    """What a command on a node left."""

    code: int
    output: str
    messages: str
    seconds: float


def command(lab: Lab, node: str, script: str, timeout: float = LIMIT_S) -> Done:
    """Run a shell script on a node to its end."""
    started = time.monotonic()
    done = start(lab, node, script)
    output, messages = done.communicate(timeout=timeout)
    seconds = round(time.monotonic() - started, 1)
    print(f"{script[:60]}… → {done.returncode} in {seconds} s\n{messages[-1500:]}")
    return Done(done.returncode, output, messages, seconds)


def start(lab: Lab, node: str, script: str) -> subprocess.Popen[str]:
    """Start a shell script on a node."""
    docker = ["docker", "-H", lab.platform.docker_host, "exec", lab.containers[node]]
    return subprocess.Popen(
        [*docker, "sh", "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def env_file(lab: Lab, node: str, endpoint: str, keys: tuple[str, str] | None = None) -> str:
    """A copy of the node's S3 settings with another endpoint, or other keys too; its path."""
    path = "/run/mayfly-fault.env"
    changes = {"AWS_ENDPOINT_URL": endpoint}
    if keys:
        changes |= {"AWS_ACCESS_KEY_ID": keys[0], "AWS_SECRET_ACCESS_KEY": keys[1]}
    script = "; ".join(f's|^{name}=.*|{name}="{value}"|' for name, value in changes.items())
    lab.sh(node, f"umask 077; sed '{script}' /etc/mayfly/s3.env > {path}")
    return path


def stage_command(lab: Lab, source: str, directory: str, env: str = "/etc/mayfly/s3.env") -> str:
    """The command that stages a dataset as role `dataset` does it, alone."""
    namenode = json.loads(lab.sh("worker-0", f"cat {CLUSTER}"))["namenode"]
    return (
        f"mayfly-node stage --env-file {env} --namenode-http {namenode['http']}"
        f" {source} {namenode['rpc']}{directory}"
    )


def install_converters(lab: Lab, node: str) -> None:
    """Give a node what role agent installs where a job asks for preprocessing."""
    done = command(lab, node, _INSTALL_CONVERTERS)
    assert done.code == 0, done.messages


def make_dataset(directory: Path, files: int = FILES, records: int = RECORDS) -> None:
    """TFRecord files of noise with a manifest that agrees."""
    directory.mkdir(parents=True)
    noise = numpy.random.default_rng(1)
    for number in range(files):
        with tfrecord.Writer(directory / f"train-{number:05d}-of-{files:05d}.tfrecords") as out:
            for label in range(records):
                out.write(tfrecord.encode_example(noise.bytes(IMAGE_BYTES), label % 10))
    write_manifest(directory)


def write_manifest(directory: Path) -> None:
    """A manifest of what the directory holds."""
    made = manifest.from_directory(directory, "dataset", format="tfrecord", name="faults")
    (directory / manifest.NAME).write_text(made.to_json())


def put(lab: Lab, directory: Path, prefix: str) -> str:
    """Upload a directory as it is, manifest and all, without the checks of `data put`."""
    target = s3.S3Uri("mayfly", f"faults/{prefix}")
    for path in sorted(directory.iterdir()):
        lab.bucket.upload_file(str(path), target.bucket, target.join(path.name).key)
    return str(target)


def in_hdfs(lab: Lab, directory: str) -> dict[str, int]:
    """Name below a directory of HDFS → size, of every file there."""
    lines = lab.sh(
        "worker-0", f"/opt/mayfly/hadoop/bin/hdfs dfs -ls -R {directory} 2>/dev/null; true"
    ).splitlines()
    rows = [line.split() for line in lines if line.startswith("-")]
    return {row[-1].removeprefix(f"{directory}/"): int(row[4]) for row in rows}


def require_whole(lab: Lab, directory: str, original: Path) -> None:
    """HDFS holds what the manifest says, each byte of it, and no part of anything."""
    names = in_hdfs(lab, directory)
    assert not [name for name in names if name.endswith(".part")], names
    script = (
        "set -e; copy=$(mktemp -d); trap 'rm -r $copy' EXIT; "
        f"/opt/mayfly/hadoop/bin/hdfs dfs -get '{directory}/*' $copy 2>/dev/null; "
        "rm -r $copy/_staging; mayfly-node verify-manifest $copy"
    )
    done = command(lab, "worker-0", f"HADOOP_USER_NAME=mayfly; export HADOOP_USER_NAME; {script}")
    assert done.code == 0, done.messages
    assert json.loads(done.output)["files"] == len(list(original.glob("*.tfrecords")))
