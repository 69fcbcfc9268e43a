"""A recipe on nodes, as a new user types it: two workers on CLOUD=local, one of which is killed.

Slow: making and configuring three nodes, and another one for the lost one, takes eight minutes on
two busy cores.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import time
from typing import Any

import pytest
from machine import ROOT, docker, mayfly, networks, nodes, start

import testenv
from mayfly.local import platform as local

pytestmark = pytest.mark.slow
NAME = f"e2e-nodes-{secrets.token_hex(3)}"  # the bucket outlives the tests
TASKS = 120  # they last until the node has come that replaces the killed one
RECIPE = f"""
name: {NAME}
experiments:
  wait:
    command: python3 wait.py {{{{number}}}} {{{{output}}}}
    parameters: {{number: {{range: 1-{TASKS}}}}}
    search: {{objective: value}}
  merge:
    needs: [wait]
    command: python3 merge.py {{{{wait.all.output}}}} {{{{output}}}}
"""
WAIT = """
import json, pathlib, sys, time
time.sleep(8)
pathlib.Path(sys.argv[2], "number").write_text(sys.argv[1])
print(json.dumps({"value": int(sys.argv[1])}))
"""
MERGE = """
import pathlib, sys
found = sorted(int(path.read_text()) for path in pathlib.Path(sys.argv[1]).glob("*/number"))
pathlib.Path(sys.argv[2], "all").write_text(" ".join(map(str, found)))
"""


@pytest.fixture(scope="module")
def job(platform: local.LocalPlatform, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The run, one of whose workers was killed while its tasks ran."""
    directory = tmp_path_factory.mktemp("recipe")
    file = directory / "recipe.yml"
    for name, text in {"recipe.yml": RECIPE, "wait.py": WAIT, "merge.py": MERGE}.items():
        (directory / name).write_text(text)
    process = start("recipe", "run", str(file), "--cloud", "local", "--workers", "2", "--json")
    seen: dict[str, Any] = {}
    try:
        wait_for(lambda: done_tasks() >= 2, process, 600)
        seen["before"] = nodes(platform)
        seen["listens"] = listening(platform)
        victim = next(name for name in seen["before"] if "-worker-" in name)
        docker(platform, "kill", victim)
        seen["killed"] = victim
        out, said = process.communicate(timeout=1500)
    finally:
        process.kill()
    print(said[-6000:])
    return {**seen, "document": json.loads(out or "{}"), "said": said, "code": process.returncode}


def done_tasks() -> int:
    status = mayfly("recipe", "status", NAME, "--json")
    if status.code:
        return 0
    return int(status.document["experiments"][0]["states"].get("done", 0))


def wait_for(condition: Any, process: subprocess.Popen[str], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()[1][-3000:]
        assert time.monotonic() < deadline, "no task has ended"
        time.sleep(5)


def listening(platform: local.LocalPlatform) -> list[str]:
    """The addresses at which the head's node listens, but for SSH's port."""
    head = next(name for name in nodes(platform) if "-head-" in name)
    shown = docker(platform, "exec", head, "ss", "-Hltn")
    return sorted({line.split()[3] for line in shown.splitlines() if ":22" not in line})


def results(bucket: Any) -> dict[str, Any]:
    pages = bucket.get_paginator("list_objects_v2").paginate(
        Bucket="mayfly", Prefix=f"recipes/{NAME}/"
    )
    return {item["Key"]: item["Size"] for page in pages for item in page.get("Contents", [])}


def test_it_ends_well_and_nothing_is_left(job, platform):
    assert job["code"] == 0, job["said"][-3000:]
    assert job["document"]["outcome"] == "succeeded"
    assert job["document"]["leftovers"] == 0
    assert nodes(platform) == [] and networks(platform) == []
    run = job["document"]["run"]
    assert mayfly("verify-clean", run, "--json").code == 0
    states = {each["run"]: each["state"] for each in mayfly("ls", "--json").document["runs"]}
    assert states[run] == "destroyed"


def test_every_task_has_one_accepted_result(job, bucket):
    found = results(bucket)
    markers = [name for name in found if "/done/wait/" in name]
    assert len(markers) == TASKS
    merged = next(name for name in found if "/outputs/merge/" in name and name.endswith("/all"))
    text = bucket.get_object(Bucket="mayfly", Key=merged)["Body"].read().decode()
    assert text.split() == [str(number) for number in range(1, TASKS + 1)]


def test_the_killed_worker_was_replaced(job):
    assert len(job["before"]) == 3
    assert "removing worker-" in job["said"] and "adding 1 nodes" in job["said"]
    table = mayfly("recipe", "results", NAME, "--json", "--all").document["experiments"][0]
    used = {task["node"].rpartition(".")[0] for task in table["tasks"]}
    assert len(used) == 3, f"two workers and the one that came later: {used}"


def test_the_engine_listens_on_the_private_network_only(job):
    outside = [address for address in job["listens"] if not address.startswith("127.")]
    assert len(outside) == 1 and outside[0].endswith(":8786"), job["listens"]
    assert not outside[0].startswith(("0.0.0.0", "*", "[::]"))


def test_logs_of_three_kinds_are_there(job):
    said = subprocess.run(
        [ROOT / ".venv/bin/mayfly", "recipe", "logs", "wait/3", "--run", NAME],
        cwd=ROOT, env=testenv.environment(), capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert json.loads(said.stdout) == {"value": 4}
    for kind, word in (("utilisation", '"cpu_percent"'), ("journal", "systemd")):
        shown = subprocess.run(
            [ROOT / ".venv/bin/mayfly", "recipe", "logs", "--run", NAME, "--node", "head-0"]
            + ["--kind", kind],
            cwd=ROOT, env=testenv.environment(), capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert word in shown.stdout


def test_no_secret_is_in_the_run_or_its_radl(job, bucket):
    run = job["document"]["run"]
    radl = (ROOT / "build" / f"{run}.radl").read_text()
    assert testenv.CANARY not in radl + job["said"]
    assert "PRIVATE KEY" not in radl and "@input.engine_tls@" in radl
    for name in results(bucket):
        body = bucket.get_object(Bucket="mayfly", Key=name)["Body"].read()
        assert testenv.CANARY.encode() not in body and b"PRIVATE KEY" not in body, name
    assert os.environ["MAYFLY_STATE_DIR"]
