"""Data that does not come, is not what it should be, or finds no room."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import pytest
from machine import mayfly

from faults.nodes import (
    LIMIT_S,
    command,
    env_file,
    in_hdfs,
    make_dataset,
    put,
    require_whole,
    stage_command,
    start,
    write_manifest,
)
from faults.proxy import Cuts, CuttingProxy

pytestmark = pytest.mark.slow
HDFS = "HADOOP_USER_NAME=hdfs /opt/mayfly/hadoop/bin/hdfs"
VICTIM = "train-00002-of-00006.tfrecords"


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("staging") / "dataset"
    make_dataset(directory)
    return directory


@pytest.fixture
def directory(lab, request):
    """A directory of HDFS for one case."""
    lab.heal()
    name = f"/mayfly/case-{request.node.name.translate({91: '-', 93: None})}"
    yield name
    lab.sh("worker-0", f"{HDFS} dfs -rm -r -f -skipTrash {name} 2>/dev/null")


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_connection_to_s3_is_cut_again_and_again(lab, dataset, directory, seed):
    source = put(lab, dataset, "whole")
    address = lab.platform.bridge_address
    with CuttingProxy(lab.platform.s3_endpoint, address, Cuts(seed, 12, 8 << 20)) as proxy:
        env = env_file(lab, "worker-0", proxy.url)
        done = command(lab, "worker-0", stage_command(lab, source, directory, env))
    assert done.code == 0, done.messages
    assert proxy.done >= 4
    require_whole(lab, directory, dataset)
    print(f"{proxy.done} cuts, staged in {done.seconds} s")


def test_an_object_is_corrupt(lab, dataset, directory):
    source = put(lab, dataset, "corrupt")
    data = bytearray((dataset / VICTIM).read_bytes())
    data[5_000_000] ^= 1
    lab.bucket.put_object(Bucket="mayfly", Key=f"faults/corrupt/{VICTIM}", Body=bytes(data))
    done = command(lab, "worker-0", stage_command(lab, source, directory))
    assert done.code == 2
    assert f"{source}/{VICTIM} does not match its manifest" in done.messages
    assert "Traceback" not in done.messages
    names = in_hdfs(lab, directory)
    assert VICTIM not in names
    assert not [name for name in names if name.endswith(".part")]


def test_a_file_was_cut_before_its_manifest_was_made(lab, dataset, directory, tmp_path):
    cut = tmp_path / "cut"
    shutil.copytree(dataset, cut)
    with (cut / VICTIM).open("r+b") as stream:
        stream.truncate(5_000_000)
    write_manifest(cut)

    refused = mayfly("data", "put", str(cut), "s3://mayfly/faults/refused/", "--json")
    assert refused.code == 2
    assert f"{VICTIM} ends within a record" in refused.messages
    listed = lab.bucket.list_objects_v2(Bucket="mayfly", Prefix="faults/refused/")
    assert listed["KeyCount"] == 0

    source = put(lab, cut, "cut")
    done = command(lab, "worker-0", stage_command(lab, source, directory))
    assert done.code == 2
    assert f"{source}/{VICTIM} ends within a record" in done.messages
    assert VICTIM not in in_hdfs(lab, directory)


def test_hdfs_has_no_room(lab, dataset, directory):
    source = put(lab, dataset, "whole")
    lab.sh(
        "worker-0", f"HADOOP_USER_NAME=mayfly /opt/mayfly/hadoop/bin/hdfs dfs -mkdir {directory}"
    )
    # Room for one open block (128 MiB, twice) at a time, so some files may arrive.
    lab.sh("worker-0", f"{HDFS} dfsadmin -setSpaceQuota 300m {directory}")
    done = command(lab, "worker-0", stage_command(lab, source, directory))
    assert done.code in (1, 2)
    assert done.seconds < LIMIT_S
    assert "HDFS is full" in done.messages
    names = in_hdfs(lab, directory)
    assert len([name for name in names if name.endswith(".tfrecords")]) < 6
    assert not [name for name in names if name.endswith(".part")]

    lab.sh("worker-0", f"{HDFS} dfsadmin -clrSpaceQuota {directory}")
    again = command(lab, "worker-0", stage_command(lab, source, directory))
    assert again.code == 0, again.messages
    require_whole(lab, directory, dataset)
    print(f"told after {done.seconds} s, resumed in {again.seconds} s")


def test_no_datanode_has_room(lab, dataset, directory):
    source = put(lab, dataset, "whole")
    # As if the disks were full: every DataNode keeps more to itself than there is.
    reserve = (
        "<property><name>dfs.datanode.du.reserved</name><value>9000000000000</value></property>"
    )
    settings = "/opt/mayfly/hadoop/etc/hadoop/hdfs-site.xml"
    edit = f"cp {settings} /run/kept.xml; sed -i 's|</configuration>|{reserve}&|' {settings}"
    for node in lab.containers:
        lab.sh(node, f"{edit}; systemctl restart hdfs-datanode")
    try:
        wait_for_datanodes(lab)
        done = command(lab, "worker-0", stage_command(lab, source, directory))
    finally:
        for node in lab.containers:
            lab.sh(node, f"cp /run/kept.xml {settings}; systemctl restart hdfs-datanode")
    assert done.code in (1, 2)
    assert done.seconds < LIMIT_S
    assert "HDFS is full" in done.messages
    assert not [name for name in in_hdfs(lab, directory) if not name.startswith("_staging")]

    wait_for_datanodes(lab)
    again = command(lab, "worker-0", stage_command(lab, source, directory))
    assert again.code == 0, again.messages
    require_whole(lab, directory, dataset)
    print(f"told after {done.seconds} s, resumed in {again.seconds} s")


def test_a_datanode_is_killed_while_data_is_staged(lab, dataset, directory):
    source = put(lab, dataset, "whole")
    slow = CuttingProxy(lab.platform.s3_endpoint, lab.platform.bridge_address, pace=1_000_000)
    with slow as proxy:
        env = env_file(lab, "worker-0", proxy.url)
        started = time.monotonic()
        staging = start(lab, "worker-0", stage_command(lab, source, directory, env))
        while not any(in_hdfs(lab, directory)) and staging.poll() is None:
            time.sleep(0.2)
        running = staging.poll() is None
        lab.stop_for_good("worker-1", "hdfs-datanode")
        output, messages = staging.communicate(timeout=LIMIT_S)
    print(f"killed while it ran: {running}; {time.monotonic() - started:.1f} s\n{messages[-1500:]}")
    assert running
    assert staging.returncode == 0, messages
    assert json.loads(output)["files"] == 6
    require_whole(lab, directory, dataset)


def wait_for_datanodes(lab, seconds: float = 60) -> None:
    """Until all DataNodes have told the NameNode of themselves anew."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        report = lab.sh("worker-0", f"{HDFS} dfsadmin -report 2>/dev/null; true")
        if f"Live datanodes ({len(lab.containers)})" in report:
            return
        time.sleep(2)
    raise AssertionError(report)
