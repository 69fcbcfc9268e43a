"""Machines of the user's own, reached by SSH: containers that nobody but this file has made.

The first test interrupts a deployment, so that the second one also shows that machines can be used
again. They are not nodes of CLOUD=local: only its engine, image, network and S3 server are used.
"""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import yaml
from machine import ONE_RUN_S, ROOT, CanaryWatch, Outcome, docker, mayfly
from PIL import Image

import testenv

pytestmark = pytest.mark.slow

GROUPS = {"ps": ("own-ps-0",), "worker": ("own-worker-0", "own-worker-1")}
NAMES = tuple(name for names in GROUPS.values() for name in names)
SOURCE = "s3://mayfly/datasets/faces-static/"
CLASSES = ("kid", "young", "adult", "elder")
SSH_S = 60
ACTIVE = (
    "systemctl list-units --plain --no-legend --state=active 'mayfly-*' 'hdfs-*' | cut -d' ' -f1"
)
ENABLED = "ls /etc/systemd/system/multi-user.target.wants"
OF_THE_RUN = "ls -d /run/mayfly-run /etc/mayfly/s3.env /var/lib/mayfly/tasks/* 2>/dev/null; true"
IN_HDFS = "HADOOP_USER_NAME=mayfly /opt/mayfly/hadoop/bin/hdfs dfs -ls -C /mayfly 2>/dev/null"


@dataclass(frozen=True)
class Own:
    """The machines, and how a user reaches them."""

    platform: object
    inventory: Path

    def sh(self, name: str, script: str) -> str:
        """What a script prints on one machine, however it ends."""
        return docker(self.platform, "exec", name, "sh", "-c", script)

    def env(self) -> dict[str, str]:
        return {"MAYFLY_S3_ENDPOINT": self.platform.s3_endpoint}

    def words(self, *more: str) -> list[str]:
        return [
            *("deploy", "--cloud", "static", "--inventory", str(self.inventory)),
            *("--bucket", "mayfly", "--name", "own", "--set", f"data.source={SOURCE}"),
            *("--set", "trainer.steps=30", "--set", f"trainer.args.classes={len(CLASSES)}"),
            *("--set", "trainer.args.batch_size=8", "--json", *more),
        ]

    def deploy(self, *more: str) -> Outcome:
        return mayfly(*self.words(*more), env=self.env())

    def require_free(self, run: str) -> None:
        """Nothing of a run is on any machine; HDFS goes on if it ever began."""
        for name in NAMES:
            units = self.sh(name, ACTIVE).split()
            assert [unit for unit in units if unit.startswith("mayfly-")] == [], name
            assert "mayfly-" not in self.sh(name, ENABLED), name
            assert self.sh(name, OF_THE_RUN) == "", name
        assert f"/mayfly/{run}" not in self.sh(NAMES[0], IN_HDFS).split()


@pytest.fixture(scope="module")
def own(platform, tmp_path_factory) -> Iterator[Own]:
    """Three containers of the node image with an SSH server that takes a key of ours."""
    directory = tmp_path_factory.mktemp("own")
    key = directory / "id_ed25519"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    try:
        for name in NAMES:
            start(platform, name, key.with_suffix(".pub").read_text())
        inventory = directory / "hosts.yml"
        inventory.write_text(yaml.safe_dump(describe(platform, key)))
        yield Own(platform, inventory)
    finally:
        docker(platform, "rm", "--force", "--volumes", *NAMES)
    assert docker(platform, "ps", "-aq", "--filter", "label=owner=e2e-static") == ""


def start(platform, name: str, public_key: str) -> None:
    """Start one machine as tests/molecule/create.yml does, and let the key in."""
    docker(platform, "rm", "--force", "--volumes", name)  # of a test that was killed
    version_2 = Path("/sys/fs/cgroup/cgroup.controllers").exists()
    groups = ["--cgroupns", "private"]
    if not version_2:
        groups = ["--cgroupns", "host", "--volume", "/sys/fs/cgroup:/sys/fs/cgroup:ro"]
    command = [
        *("docker", "-H", platform.docker_host, "run", "--detach", "--pull", "never"),
        *("--name", name, "--hostname", name, "--network", platform.network),
        *("--label", "mayfly=1", "--label", "owner=e2e-static", "--cap-add", "SYS_ADMIN"),
        *("--security-opt", "seccomp=unconfined", "--security-opt", "apparmor=unconfined"),
        *("--tmpfs", "/run:exec", "--tmpfs", "/run/lock", *groups, platform.image),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    # The SSH server is up a moment after systemd; it has the last word of this.
    script = (
        "mkdir -p -m 700 /root/.ssh && cat >/root/.ssh/authorized_keys"
        " && chmod 600 /root/.ssh/authorized_keys"
        " && until systemctl is-active --quiet ssh; do sleep 0.5; done"
    )
    execute = ["docker", "-H", platform.docker_host, "exec", "-i", name, "sh", "-c", script]
    subprocess.run(execute, input=public_key, text=True, check=True, timeout=SSH_S)


def describe(platform, key: Path) -> dict[str, object]:
    """The inventory as a user would write it."""
    form = "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}"
    address = {n: docker(platform, "inspect", "--format", form, n).strip() for n in NAMES}
    return {
        "all": {
            "children": {
                group: {"hosts": {name: {"ansible_host": address[name]} for name in names}}
                for group, names in GROUPS.items()
            },
            "vars": {
                "ansible_user": "root",
                "ansible_ssh_private_key_file": str(key),
                # Containers of one hour: their keys are nobody's acquaintances.
                "ansible_ssh_common_args": "-o UserKnownHostsFile=/dev/null"
                " -o StrictHostKeyChecking=no -o LogLevel=ERROR",
            },
        }
    }


@pytest.fixture(scope="module")
def data(own, tmp_path_factory) -> str:
    """A small dataset of images in the bucket."""
    directory = tmp_path_factory.mktemp("faces")
    random = np.random.default_rng(7)
    for index, label in enumerate(CLASSES):
        (directory / label).mkdir()
        for number in range(24):
            pixels = random.integers(0, 60, (32, 32, 3), dtype=np.uint8) + np.uint8(index * 60)
            Image.fromarray(pixels).save(directory / label / f"{number}.png")
    words = ["data", "put", str(directory), SOURCE, "--cloud", "local", "--image-size", "32"]
    put = mayfly(*words, "--json")
    assert put.code == 0, put.messages
    return SOURCE


def test_ctrl_c_while_ansible_works_frees_the_machines(own, data):
    command = [str(ROOT / ".venv/bin/mayfly"), *own.words()]
    environment = {**testenv.environment(), **own.env()}
    process = subprocess.Popen(
        command,
        env=environment,
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    said = []
    for line in process.stderr:
        said.append(line)
        if line.startswith("contextualization ") and "…" not in line and "preparing" not in line:
            break
    claims = {own.sh(name, "cat /run/mayfly-run") for name in NAMES}
    process.send_signal(signal.SIGINT)
    output, messages = process.communicate(timeout=ONE_RUN_S)
    assert process.returncode == 130, "".join(said) + messages
    document = json.loads(output)
    assert document["error"]["kind"] == "Interrupted"
    assert document["leftovers"] == 0
    assert claims == {document["run"]}
    own.require_free(document["run"])


def test_a_run_from_the_first_look_to_the_proof(own, data, bucket):
    with CanaryWatch(own.platform) as watch:
        outcome = own.deploy("--keep")
    document, run = outcome.document, str(outcome.document.get("run"))
    try:
        assert outcome.code == 0, outcome.messages[-5000:]
        assert document["ok"] is True and document["global_step"] >= 30
        assert document["phases"]["contextualization"] > 0
        assert watch.found == set() and watch.looked_at_processes
        assert testenv.CANARY not in outcome.messages
        uri = document["model_uri"].removeprefix("s3://").removesuffix("model")
        name, _, prefix = uri.partition("/")
        body = bucket.get_object(Bucket=name, Key=f"{prefix}manifest.json")["Body"].read()
        assert any(each["path"].endswith("saved_model.pb") for each in json.loads(body)["files"])
        require_reachable(own, run)
        require_refused(own, run)
        require_told_while_it_is_there(own, run)
    finally:
        ended = mayfly("destroy", run, "--json", env=own.env())
    assert ended.code == 0, ended.messages[-3000:]
    proof = ended.document["proof"]
    assert (proof["ok"], proof["count"], proof["left"], proof["im"]) == (True, 0, [], None)
    own.require_free(run)
    for name in NAMES:
        assert "hdfs-datanode.service" in own.sh(name, ACTIVE).split(), "HDFS is left alone"
    assert "/mayfly/data" in own.sh(NAMES[0], IN_HDFS).split()
    again = mayfly("verify-clean", run, "--json", env=own.env())
    assert (again.code, again.document["count"]) == (0, 0)
    assert mayfly("destroy", run, "--json", env=own.env()).document["already_destroyed"] is True


def require_reachable(own: Own, run: str) -> None:
    """Logins by the inventory: a command, the state of all, and a log of the chief."""
    for node, name in zip(("ps-0", "worker-0", "worker-1"), NAMES, strict=True):
        done = mayfly("ssh", run, node, "--json", "--", "hostname", env=own.env())
        assert done.code == 0, done.messages
        assert done.document["output"].strip() == name
    status = mayfly("status", run, "--json", env=own.env()).document
    assert set(status["nodes"]) == {"ps-0", "worker-0", "worker-1"}
    log = mayfly("logs", run, "chief-0", "--json", env=own.env())
    assert log.code == 0 and log.document["lines"], log.messages


def require_refused(own: Own, run: str) -> None:
    """Another run finds the machines taken, and learns by whom, before anything is changed."""
    refused = own.deploy()
    assert refused.code == 2
    assert f"in use by run {run}" in refused.document["error"]["message"]
    assert {own.sh(name, "cat /run/mayfly-run") for name in NAMES} == {run}


def require_told_while_it_is_there(own: Own, run: str) -> None:
    """The proof is not clean while the run is there, nor while a machine does not answer."""
    found = mayfly("verify-clean", run, "--json", env=own.env())
    assert found.code == 1 and found.document["count"] >= len(NAMES)
    docker(own.platform, "pause", NAMES[2])
    try:
        silent = mayfly("verify-clean", run, "--json", env=own.env())
    finally:
        docker(own.platform, "unpause", NAMES[2])
    assert silent.code == 1
    assert any(f"not listed: {NAMES[2]}: " in each for each in silent.document["left"])


def test_a_machine_that_is_not_there_is_named_and_nothing_is_changed(own, data, tmp_path):
    content = yaml.safe_load(own.inventory.read_text())
    gone = content["all"]["children"]["worker"]["hosts"]
    gone["own-worker-2"] = {"ansible_host": own.platform.bridge_address, "ansible_port": 1}
    inventory = tmp_path / "hosts.yml"
    inventory.write_text(yaml.safe_dump(content))
    refused = Own(own.platform, inventory).deploy()
    assert refused.code == 1, refused.messages
    assert "machine own-worker-2 cannot be used" in refused.document["error"]["message"]
    assert refused.document["run"] is None
    for name in NAMES:
        assert own.sh(name, "ls /run/mayfly-run 2>/dev/null") == ""
