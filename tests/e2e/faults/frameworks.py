"""Other frameworks and data on the lab's nodes, put there as a deploy would: by role and by stage.

A run's nodes have one framework. The lab's get others one after the other, each in the place of the
one before, which is kept aside.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from machine import ROOT, mayfly

from faults.lab import Lab
from mayfly import fashion_mnist

RUNTIME = "/opt/mayfly/runtime"
IDX_URI = "s3://mayfly/datasets/fashion-mnist-idx"
IDX_DIRECTORY = "/mayfly/data-idx"
FIRST = "tensorflow"  # what the lab is deployed with
PLAY_S = 1800  # Horovod may have to be compiled
SWAP = f"""set -e
now=$(cat {RUNTIME}.name 2>/dev/null || echo {FIRST})
if [ $now != $framework ]; then
  if [ -d {RUNTIME} ]; then mv {RUNTIME} {RUNTIME}-$now; fi
  if [ -d {RUNTIME}-$framework ]; then mv {RUNTIME}-$framework {RUNTIME}; fi
  echo $framework > {RUNTIME}.name
fi"""


def stage_idx(lab: Lab) -> str:
    """Bring the IDX files of Fashion-MNIST into the lab's HDFS; their directory there."""
    source = fashion_mnist.find(Path(), lambda _text, _done: None)
    put = mayfly("data", "put", str(source), IDX_URI, "--format", "files", "--json")
    assert put.code == 0, put.messages
    first = lab.document["nodes"]["ps"][0]["address"]
    store = lab.document["model_dir"].partition("/mayfly/")[0]
    command = f"mayfly-node stage --env-file=/etc/mayfly/s3.env --namenode-http=http://{first}:9870"
    lab.sh("worker-0", f"{command} {IDX_URI} {store}{IDX_DIRECTORY}")
    return f"{store}{IDX_DIRECTORY}"


def install(lab: Lab, framework: str, horovod: str = "") -> None:
    """Have a framework at the runtime's place on each node, by playbooks/runtime.yml."""
    swap(lab, framework)
    inventory = {
        kind: {"hosts": {lab.containers[node]: {} for node in lab.containers if kind in node}}
        for kind in ("ps", "worker")
    }
    variables = {
        "ansible_connection": "community.docker.docker",
        "ansible_python_interpreter": "/usr/bin/python3",
        "ansible_become": False,  # it is root
        "runtime_framework": framework,
        "horovod_framework": horovod,
    }
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump({"all": {"children": inventory}}, file)
        file.flush()
        play(file.name, variables, lab.platform.docker_host)


def play(inventory: str, variables: dict[str, Any], docker_host: str) -> None:
    """Run the play; its output is shown when it fails."""
    command = [str(ROOT / ".venv/bin/ansible-playbook"), "-i", inventory]
    command += ["-e", json.dumps(variables), str(ROOT / "playbooks/runtime.yml")]
    environment = {**os.environ, "ANSIBLE_PIPELINING": "1", "DOCKER_HOST": docker_host}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=PLAY_S,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]


def swap(lab: Lab, framework: str) -> None:
    """Put the framework that is there aside, and take up the one wanted if it was there before."""
    for node in lab.containers:
        lab.sh(node, "systemctl stop 'mayfly-task@*' mayfly-run", check=False)
        lab.sh(node, f"framework={framework}; {SWAP}")


def put_back(lab: Lab) -> None:
    """Leave the lab as it was deployed."""
    swap(lab, FIRST)
