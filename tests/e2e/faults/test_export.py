"""Models that do not reach the bucket, and how they reach it in the end."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import testenv
from faults.lab import CLUSTER
from faults.nodes import LIMIT_S, Done, command, env_file
from faults.proxy import Cuts, CuttingProxy
from mayfly_train import s3
from mayfly_train.verify import verify_s3

pytestmark = pytest.mark.slow
LARGE = 40 << 20  # three parts of an upload
MAY_WRITE = ("status", "events.jsonl", "logs/")  # what a run tells of itself, not its model


@pytest.fixture(scope="module")
def trained(lab):
    """A run that has succeeded, whose model in HDFS has got a large file."""
    run = lab.train(steps=20)
    status = run.end(300)
    assert status["state"] == "succeeded", status["error"]
    model = json.loads(lab.sh("worker-0", f"cat {CLUSTER}"))["model_dir"]
    large = f"{model}/events.out.tfevents.1.large"
    lab.sh(
        "worker-0",
        f"head -c {LARGE} /dev/urandom | HADOOP_USER_NAME=mayfly "
        f"/opt/mayfly/hadoop/bin/hdfs dfs -put -f - {large} 2>/dev/null",
    )
    return run


def export(lab, uri: str, env: str = "/etc/mayfly/s3.env") -> Done:
    """Export the model of the lab's last run to an address, as a person on the node would."""
    document = json.loads(lab.sh("worker-0", f"cat {CLUSTER}"))
    text = json.dumps({**document, "run_uri": uri})
    lab.sh("worker-0", f"cat > /run/mayfly-fault.json <<'END'\n{text}\nEND")
    script = f"mayfly-node export --cluster /run/mayfly-fault.json --env-file {env}"
    return command(lab, "worker-0", script)


@contextlib.contextmanager
def identity(actions: list[str]) -> Iterator[tuple[str, str]]:
    """Keys of somebody who may do only this, known to the S3 server while the context lasts."""
    directory = testenv.STATE / "local/s3"
    path = directory / "identities.json"
    pid = json.loads((directory / "weed.pid").read_text())["pid"]
    kept = path.read_text()
    keys = (secrets.token_hex(8), secrets.token_hex(16))
    document = json.loads(kept)
    credentials = [{"accessKey": keys[0], "secretKey": keys[1]}]
    document["identities"].append({"name": "few", "credentials": credentials, "actions": actions})
    try:
        reload(path, json.dumps(document), pid)
        yield keys
    finally:
        reload(path, kept, pid)


def reload(path: Path, text: str, pid: int) -> None:
    """Write the server's identities and have it read them."""
    path.write_text(text)
    os.kill(pid, signal.SIGHUP)
    time.sleep(2)


def exists(lab, uri: str, name: str) -> bool:
    return s3.size_of(lab.bucket, s3.parse_uri(uri).join(name)) is not None


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_upload_is_cut_again_and_again(lab, trained, seed):
    uri = f"{trained.uri}-cut-{seed}"
    address = lab.platform.bridge_address
    with CuttingProxy(lab.platform.s3_endpoint, address, Cuts(seed, 12, 6 << 20)) as proxy:
        done = export(lab, uri, env_file(lab, "worker-0", proxy.url))
    assert done.code == 0, done.messages
    assert proxy.done >= 4
    made = verify_s3(lab.bucket, s3.parse_uri(uri))
    written = {
        item["Key"].rpartition("/")[2]: item["LastModified"]
        for item in lab.bucket.list_objects_v2(Bucket="mayfly", Prefix=s3.parse_uri(uri).prefix)[
            "Contents"
        ]
    }
    assert written["manifest.json"] == max(written.values())
    assert sum(entry.size for entry in made.files) > LARGE
    print(f"{proxy.done} cuts, exported in {done.seconds} s")


def test_the_keys_may_only_read(lab, trained):
    uri = f"{trained.uri}-read"
    with identity(["Read:mayfly", "List:mayfly"]) as keys:
        done = export(lab, uri, env_file(lab, "worker-0", lab.platform.s3_endpoint, keys))
    assert done.code == 2
    assert "S3 access denied" in done.messages
    assert "Traceback" not in done.messages
    assert not exists(lab, uri, "manifest.json")

    again = export(lab, uri)
    assert again.code == 0, again.messages
    verify_s3(lab.bucket, s3.parse_uri(uri))
    print(f"told after {done.seconds} s, exported afterwards in {again.seconds} s")


def test_the_keys_may_write_a_run_s_status_but_not_its_model(lab):
    lab.sh("worker-0", "cp -p /etc/mayfly/s3.env /run/s3.env.kept")
    actions = ["Read:mayfly", "List:mayfly"]
    actions += [f"Write:mayfly/{lab.run_id}*/{name}*" for name in MAY_WRITE]
    try:
        with identity(actions) as keys:
            few = env_file(lab, "worker-0", lab.platform.s3_endpoint, keys)
            lab.sh("worker-0", f"cp {few} /etc/mayfly/s3.env")
            run = lab.train(steps=20)
            exporting = None
            status = run.status()
            started = time.monotonic()
            while (status or {}).get("state") not in ("succeeded", "failed"):
                assert time.monotonic() - started < 300, status
                time.sleep(0.5)
                status = run.status()
                if exporting is None and (status or {}).get("state") == "exporting":
                    exporting = time.monotonic()
            told = time.monotonic() - (exporting or time.monotonic())
    finally:
        lab.sh("worker-0", "cp -p /run/s3.env.kept /etc/mayfly/s3.env")
    assert status["state"] == "failed"
    assert "export failed: S3 access denied" in status["error"]["message"]
    assert told < LIMIT_S
    assert not exists(lab, run.uri, "manifest.json")

    again = export(lab, run.uri)
    assert again.code == 0, again.messages
    verify_s3(lab.bucket, s3.parse_uri(run.uri))
    print(f"told {told:.1f} s after the export began, exported afterwards in {again.seconds} s")
