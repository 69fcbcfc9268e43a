"""The rendered template's own user data on real nodes: containers of the node image, with systemd,
the network of the template, a Git server behind HTTPS and wait conditions over HTTP.

There is no OpenStack here: `heat_cloud` is a test tool that makes of the template what Heat would.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from ipaddress import IPv4Interface
from pathlib import Path
from typing import Any

import pytest
from heat_cloud import git_server
from heat_cloud.cloud import Stack
from machine import ROOT

import testenv
from mayfly import fashion_mnist
from mayfly.heat.job import make_job
from mayfly.heat.template import build, dump
from mayfly.local import engine
from mayfly.local.docker import OURS, Docker
from mayfly.local.paths import find_paths

REPOSITORY = "fashion.git"
DATA = "/opt/data/fashion-mnist"
RESULTS = "/var/lib/mayfly/results"
PACKAGES = ("torch", "lightning", "jsonargparse", "numpy", "fsspec", "docstring-parser",
            "typeshed-client", "argcomplete")  # fmt: skip
BATCH = 192  # for all three nodes together
NODES = ("main", "worker_1", "worker_2")
CREATE_S, OFF_S = 420, 60
Make = Callable[..., Stack]


@dataclass(frozen=True)
class Place:
    """What all stacks of this file share."""

    docker: Docker
    image: str
    cidr: str
    git: git_server.GitServer
    labels: tuple[str, ...]


@pytest.fixture(scope="module")
def place(platform, tmp_path_factory) -> Iterator[Place]:
    docker, paths = Docker(platform.docker_host), find_paths()
    labels = (OURS, engine.label(paths))
    _, address = engine.bridge_address(docker, paths)
    # In the engine's own range, where its rules let nodes talk, above what it gives away itself.
    pool = IPv4Interface(f"{address}/16").network
    cidr = f"{pool[200 * 256]}/24"
    work = tmp_path_factory.mktemp("heat")
    (work / "www").mkdir()
    authority, certificate = git_server.make_certificates(work, address)
    git_server.publish(work / "www", REPOSITORY, repository())
    image = node_image(docker, platform.image, authority, work / "image")
    git = git_server.GitServer(address, work / "www", certificate)
    yield Place(docker, image, cidr, git, labels)
    git.close()
    docker("rmi", "-f", image)


@pytest.fixture
def make(place: Place) -> Iterator[Make]:
    """Creates a stack of a job; it is deleted at the end, and nothing of it is left."""
    made: list[Stack] = []
    keys = {
        "s3_access_key_id": testenv.VARIABLES["MAYFLY_S3_ACCESS_KEY_ID"],
        "s3_secret_access_key": testenv.CANARY,
    }

    def create(name: str, absent: frozenset[str] = frozenset(), **job: Any) -> Stack:
        asked = {
            "repository": f"{place.git.url}/{REPOSITORY}",
            "entrypoint": "heat_train.py",
            "cidr": place.cidr,
            "start_timeout": "4m",
            **job,
        }
        stack = Stack(
            docker=place.docker,
            image=place.image,
            name=f"mayfly-heat-{name}",
            text=dump(build(make_job(asked))),
            parameters={"key": "no-key", **(keys if "results" in job else {})},
            labels=place.labels,
            absent=absent,
        )
        made.append(stack)
        stack.create()
        return stack

    yield create
    for stack in made:
        for server in stack.started:
            print(f"--- {server}\n{stack.read(server, '/var/log/mayfly.log')[-3000:]}")
        stack.delete()
    shown = place.docker.lines("ps", "-aq", "--filter", "label=mayfly.heat")
    shown += place.docker.lines("network", "ls", "-q", "--filter", "label=mayfly.heat")
    assert shown == []


def training(*own: str, epochs: int = 2) -> str:
    words = f"--data-dir {DATA} --job-dir {RESULTS} --epochs {epochs} --batch-size {BATCH}"
    return " ".join([*own, words])


def test_success(make: Make):
    """Main and two workers train Fashion-MNIST, report, and power off."""
    began = time.monotonic()
    stack = make("success", arguments=training())
    state, reasons = stack.wait(CREATE_S)
    assert (state, set(reasons)) == ("CREATE_COMPLETE", set(NODES)), reasons
    assert all("trained in" in reason for reason in reasons.values())
    assert stack.wait_until_off(OFF_S) == []
    about = json.loads(stack.read("main", f"{RESULTS}/export/model.json"))
    assert about["pictures"] == 10_000
    assert about["accuracy"] > 0.75
    logs = {name: stack.read(name, "/var/log/mayfly.log") for name in NODES}
    for rank, name in enumerate(NODES):
        assert f"node {rank} words" in logs[name], "torchrun's rank is the node's"
    print("heat:", json.dumps({"total_s": round(time.monotonic() - began, 1), **about}))


@pytest.mark.slow
def test_an_entrypoint_that_fails_on_one_worker(make: Make):
    """Heat is told at once; the others would wait for it in the rendezvous, and are ended."""
    stack = make("fails", arguments=training("--fail-on-node", "1"))
    state, reasons = stack.wait(CREATE_S)
    assert state == "CREATE_FAILED"
    error = "RuntimeError: this node was told to fail"
    cause = f"worker-1: running heat_train.py on node 1 of 3: {error}"
    assert reasons["worker_1"] == cause
    for node in ("main", "worker_2"):
        assert reasons[node].endswith(f"ended, since another node failed: {cause}")
    assert stack.wait_until_off(OFF_S) == []


@pytest.mark.slow
def test_a_repository_that_answers_404(make: Make, place: Place, platform, bucket):
    """The log of what failed is in the bucket, and the keys are nowhere that anybody reads."""
    url = f"{place.git.url}/nothing.git"
    prefix = "heat/no-repository/"
    to = {"results": f"s3://mayfly/{prefix}", "s3_endpoint": platform.s3_endpoint}
    stack = make("no-repository", repository=url, arguments=training(), **to)
    state, reasons = stack.wait(CREATE_S)
    assert state == "CREATE_FAILED"
    for node in NODES:
        assert f"cloning {url}" in reasons[node]
        assert "not found" in reasons[node]
    assert stack.wait_until_off(OFF_S) == []
    for node in NODES:
        own = f"{prefix}{stack.name}/{node.replace('_', '-')}"
        log = bucket.get_object(Bucket="mayfly", Key=f"{own}/mayfly.log")["Body"].read().decode()
        assert f"cloning {url}" in log
        assert testenv.CANARY not in log + stack.read(node, "/var/log/mayfly.log")
        outcome = json.loads(
            bucket.get_object(Bucket="mayfly", Key=f"{own}/outcome.json")["Body"].read()
        )
        assert outcome["status"] == "FAILURE"


@pytest.mark.slow
def test_a_main_node_that_never_comes_up(make: Make):
    absent = frozenset({"main"})
    stack = make("no-main", absent, arguments=training(), start_timeout="20s", max_duration="4m")
    state, reasons = stack.wait(CREATE_S)
    assert state == "CREATE_FAILED"
    assert reasons["main"] == "no signal"
    for node in NODES[1:]:
        assert "waiting for the main node" in reasons[node]
        assert "did not answer within 20 s" in reasons[node]
    assert stack.wait_until_off(OFF_S) == []


@pytest.mark.slow
def test_the_plain_launcher(make: Make):
    """Lightning's own way: one process a node, found by the variables alone."""
    stack = make("plain", arguments=training(epochs=1), launcher="plain", workers=1)
    state, reasons = stack.wait(CREATE_S)
    assert state == "CREATE_COMPLETE", reasons
    assert stack.wait_until_off(OFF_S) == []
    assert json.loads(stack.read("main", f"{RESULTS}/export/model.json"))["pictures"] == 10_000


@pytest.mark.slow
def test_a_worker_that_is_killed_and_restarted(make: Make, place: Place):
    """The machine loses power in the middle of training, and comes back."""
    stack = make("killed", arguments=training(epochs=3))
    wait_for_step(stack, "main", 400)  # a checkpoint is there: after 312
    place.docker("kill", stack.container("worker_1"))
    place.docker("start", stack.container("worker_1"))
    state, reasons = stack.wait(CREATE_S)
    assert state == "CREATE_COMPLETE", reasons
    assert stack.wait_until_off(OFF_S) == []
    assert "restored_step=" in stack.read("worker_1", "/var/log/mayfly.log")
    about = json.loads(stack.read("main", f"{RESULTS}/export/model.json"))
    assert about["global_step"] == 3 * (60_000 // BATCH)


# --- helpers ----------------------------------------------------------------------------------


def wait_for_step(stack: Stack, server: str, step: int) -> None:
    end = time.monotonic() + CREATE_S
    while time.monotonic() < end:
        steps = re.findall(r" step=(\d+)", stack.read(server, "/var/log/mayfly.log"))
        if steps and int(steps[-1]) >= step:
            return
        time.sleep(1)
    raise AssertionError(f"{server} did not reach step {step}")


def repository() -> dict[str, str]:
    """A user's repository: the built-in program, and requirements that the nodes' wheels meet."""
    pinned = (ROOT / "roles/runtime/files/requirements-torch-cpu.txt").read_text().splitlines()
    wanted = [line for line in pinned if line.split("==")[0] in PACKAGES]
    return {
        "requirements.txt": "\n".join(["--no-index", *wanted]) + "\n",
        "heat_train.py": (ROOT / "tests/e2e/programs/heat_train.py").read_text(),
        **{
            name: (ROOT / "training/programs" / name).read_text()
            for name in ("mnist_lightning.py", "shared/__init__.py", "shared/sigterm.py")
        },
    }


def node_image(docker: Docker, base: str, authority: Path, context: Path) -> str:
    """The node image with the test's certificate authority and the data in it."""
    data = fashion_mnist.find(find_paths().cache, lambda text, _: print(text))
    (context / "data").mkdir(parents=True)
    for path in data.glob("*.gz"):
        (context / "data" / path.name).write_bytes(path.read_bytes())
    (context / "authority.crt").write_text(authority.read_text())
    (context / "Dockerfile").write_text(
        f"FROM {base}\n"
        "COPY authority.crt /usr/local/share/ca-certificates/mayfly-test.crt\n"
        f"COPY data {DATA}\n"
        "RUN update-ca-certificates\n"
    )
    docker("build", "-q", "-t", "mayfly-heat-test:latest", str(context))
    return "mayfly-heat-test:latest"
