"""A cluster that is kept for many trainings, with the tools to break it and to mend it.

Making nodes takes minutes, a training seconds: so the nodes are deployed once and each case trains
on them anew, as a run of its own with its own URI, model and notice board.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from machine import ROOT, docker, mayfly, nodes

from mayfly.engines import ESTIMATOR
from mayfly.local.platform import LocalPlatform
from mayfly_train import topology
from mayfly_train.cluster import parse_cluster
from mayfly_train.lifecycle import CHIEF_TASK
from mayfly_train.progress import Progress, after_lines

CLUSTER = "/etc/mayfly/cluster.json"
DEPLOYED = "/etc/mayfly/deployed.json"  # the same as it was before a further run, on all nodes
COORDINATOR = "/etc/systemd/system/mayfly-run.service"
ENDED = ("succeeded", "failed", "stopped")
PROGRAMS = "/opt/mayfly/programs"
DEPLOY_S = 3600  # the engine's part of the node image may have to be compiled first
STEPS_S = 600  # to some step, beside other work; a run that makes none is failed long before
SOURCES = ROOT / "training/programs"
# What a small training still tells: a line of progress and a checkpoint every few seconds.
TOLD = {"log_steps": 5, "checkpoint_seconds": 5, "batch_size": 32}
QUICK = {**TOLD, "eval_seconds": 20}  # of the estimator's program

# On a node: disks below /var that `fill` has mounted, and units that `stop_for_good` has masked.
HEAL = """
for unit in $(find /run/systemd/system -maxdepth 1 -lname /dev/null -printf '%f '); do
  systemctl unmask --runtime $unit; systemctl reset-failed $unit || true
done
for directory in $(awk '$3 == "tmpfs" && $2 ~ "^/var/" { print $2 }' /proc/mounts); do
  case $directory in */hdfs*) systemctl stop hdfs-datanode ;; esac
  umount -l $directory
done
"""

# On a node: the process that a task's supervisor runs, and the last one in the line of its
# children. A unit that is not running has 0 for its main process, whose children are all others'.
PROCESSES = """
main=$(systemctl show -P MainPID mayfly-task@{task})
test "$main" -gt 0 || exit 0
first=$(pgrep -P $main | head -n 1)
test -n "$first" || exit 0
last=$first
while next=$(pgrep -P $last | head -n 1); test -n "$next"; do last=$next; done
echo $first $last
"""

Document = dict[str, Any]


def options_of(program: Path) -> set[str]:
    """The options that a program takes, as keys of `args`: what it gives to `add_argument`."""
    parts = ast.walk(ast.parse(program.read_text()))
    calls = [node for node in parts if isinstance(node, ast.Call)]
    added = [call for call in calls if getattr(call.func, "attr", "") == "add_argument"]
    words = [word.value for call in added for word in call.args if isinstance(word, ast.Constant)]
    return {str(word).lstrip("-").replace("-", "_") for word in words}


def told(name: str) -> Document:
    """What of TOLD a built-in program takes; one that is told more ends with exit code 2."""
    known = options_of(SOURCES / f"{name}.py")
    return {key: value for key, value in TOLD.items() if key in known}


def deploy(
    platform: LocalPlatform, bucket: Any, engine: str = ESTIMATOR, *more: str, workers: int = 2
) -> Lab:
    """Deploy workers with a training of a few steps, and keep the nodes."""
    before = set(nodes(platform))
    outcome = mayfly(
        *("deploy", "--cloud", "local", "--engine", engine, "--workers", str(workers), "--keep"),
        *("--json", "--name", "faults", "--set", "trainer.steps=20"),
        *("--set", "limits.idle=4h", *more),
        timeout=DEPLOY_S,
    )
    run_id = outcome.document.get("run")
    try:
        assert outcome.code == 0, outcome.messages[-3000:]
        return attach(platform, bucket, str(run_id), set(nodes(platform)) - before)
    except BaseException:
        if run_id:
            mayfly("destroy", str(run_id), "--json")
        raise


def attach(platform: LocalPlatform, bucket: Any, run_id: str, made: Iterable[str]) -> Lab:
    """The lab on nodes that were deployed for a run and kept; `made` are their containers."""
    lab = Lab(platform, bucket, run_id, f"s3://mayfly/{run_id}", {})
    lab.find_containers(made)
    return lab


@dataclass
class Lab:
    """The kept cluster.

    Nodes are called ps-0, worker-0, worker-1 here; `containers` maps them to their container,
    `names` to what the run calls them.
    """

    platform: LocalPlatform
    bucket: Any
    run_id: str
    uri: str
    containers: dict[str, str]
    names: dict[str, str] = field(default_factory=dict)
    document: Document = field(default_factory=dict)
    tasks: dict[str, list[str]] = field(default_factory=dict)
    trainings: int = 0
    cut: dict[str, list[Document]] = field(default_factory=dict)

    def find_containers(self, made: Iterable[str]) -> None:
        """Match containers to the nodes of the topology document by their address."""
        for container in made:
            if not self._exec(container, f"grep {self.run_id} {CLUSTER}", check=False):
                continue  # another cluster's
            # A further run may be on some of the nodes only, and its document tells of no others.
            found = self._exec(container, f"cp -n {CLUSTER} {DEPLOYED}; cat {DEPLOYED}")
            document = self.document = json.loads(found)
            own = self._exec(container, "hostname -I").split()
            for kind in ("ps", "worker"):
                for index, node in enumerate(document["nodes"][kind]):
                    if node["address"] in own:
                        self.containers[f"{kind}-{index}"] = container
                        self.names[f"{kind}-{index}"] = node["name"]
        count = sum(len(members) for members in self.document["nodes"].values())
        assert len(self.containers) == count, self.containers

    def sh(self, node: str, script: str, check: bool = True, user: str = "root") -> str:
        """Run a shell script on a node; its standard output."""
        return self._exec(self.containers[node], script, check, user)

    def _exec(self, name: str, script: str, check: bool = True, user: str = "root") -> str:
        command = ["docker", "-H", self.platform.docker_host, "exec", "-u", user, name, "sh", "-c"]
        done = subprocess.run(
            [*command, script], capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0 or not check, f"{name}: {script}: {done.stderr or done.stdout}"
        return done.stdout

    def destroy(self) -> None:
        """Destroy the nodes."""
        self.heal()
        gone = mayfly("destroy", self.run_id, "--json")
        assert gone.code == 0, gone.messages[-2000:]

    # --- training ---

    def train(self, steps: int = 300, mode: str = "async", **cluster_changes: Any) -> Training:
        """Start a further run on these nodes; `cluster_changes` are keys of cluster.json."""
        self._quiet()
        return self._begin(self.containers, {"steps": steps, "mode": mode, **cluster_changes})

    def train_apart(self, steps: int, mode: str, **cluster_changes: Any) -> list[Training]:
        """Start on each worker's node a run of its own that knows of no other node, all at once."""
        self._quiet()
        runs = []
        unit = self.sh("worker-0", f"cat {COORDINATOR}")  # which is the chief's, usually
        for index, worker in enumerate(self.document["nodes"]["worker"]):
            alone = {"nodes": {"ps": [], "worker": [worker]}}
            changes = {"steps": steps, "mode": mode, **cluster_changes, **alone}
            node = f"worker-{index}"
            self.sh(node, f"cat > {COORDINATOR} <<'END'\n{unit}END\nsystemctl daemon-reload")
            runs.append(self._begin([node], changes))
        return runs

    def _quiet(self) -> None:
        """Mend all, and stop the last run's tasks."""
        self.heal()
        for node in self.containers:
            self.sh(node, "systemctl stop 'mayfly-task@*' mayfly-run", check=False)

    def _begin(self, where: Iterable[str], cluster_changes: Document) -> Training:
        """Start a run on some of the nodes."""
        self.trainings += 1
        run = f"{self.run_id[:32]}-f{self.trainings}-{int(time.time()) % 100_000}"
        uri = f"{self.uri.rpartition('/')[0]}/{run}"
        for node in where:
            self._prepare(node, {"run": run, "run_uri": uri, **cluster_changes})
            self.sh(node, "systemctl reset-failed", check=False)
        self.tasks = self._tasks(cluster_changes)
        for node, tasks in self.tasks.items():
            if not tasks:
                continue
            units = [f"mayfly-task@{task}" for task in tasks]
            units += ["mayfly-run"] if CHIEF_TASK in tasks else []
            self.sh(node, f"systemctl start --no-block {' '.join(units)}")
        return Training(self, run, uri)

    def _tasks(self, changes: Document) -> dict[str, list[str]]:
        """The tasks by the lab's nodes; a run may be on some of them."""
        placed = topology.placement(parse_cluster({**self.document, **changes}))
        return {
            node: [str(task) for task, where in placed.items() if where.name == name]
            for node, name in self.names.items()
        }

    def node_of(self, task: str) -> str:
        """The node that runs a task."""
        return next(node for node, tasks in self.tasks.items() if task in tasks)

    def program(self, name: str, **args: Any) -> Document:
        """A built-in program, put on all nodes, as the topology document has it."""
        for container in self.containers.values():
            self._exec(container, f"mkdir -p {PROGRAMS}/shared")
            for file in (f"{name}.py", "shared/__init__.py", "shared/sigterm.py"):
                own = SOURCES / file
                docker(self.platform, "cp", str(own), f"{container}:/var")
                self._exec(container, f"mv /var/{own.name} {PROGRAMS}/{file}")
        args = {**told(name), **args}
        return {"path": f"{PROGRAMS}/{name}.py", "directory": PROGRAMS, "args": args}

    def _prepare(self, node: str, changes: Document) -> None:
        """Write the topology document of a further run, and forget the last one's tasks and logs.

        A task removes the last run's log when it starts, and who waits for a line looks earlier.
        """
        document = self.document  # the nodes' own is an earlier run's by now
        name = document["model_dir"].split("/mayfly/")[0]
        run = changes["run"]
        new = {
            "model_dir": f"{name}/mayfly/{run}/model",
            "status_dir": f"/mayfly/{run}/status",
            **changes,
        }
        args = {**document["program"]["args"], **QUICK, **new.pop("program_args", {})}
        new.setdefault("program", {**document["program"], "args": args})
        new["batch_size"] = args["batch_size"]
        text = json.dumps({**document, **new})
        self.sh(node, f"cat > {CLUSTER} <<'END'\n{text}\nEND")
        logs = " ".join(f"/var/log/mayfly/{kind}-*.log" for kind in topology.KINDS)
        self.sh(node, f"rm -rf /var/lib/mayfly/tasks/* /var/lib/mayfly/ended {logs}")

    # --- breaking ---

    def stop_for_good(self, node: str, unit: str, signal: str = "KILL") -> None:
        """Kill a unit's processes and keep systemd from starting it again."""
        self.sh(node, f"systemctl mask --runtime {unit}")
        self.sh(node, f"systemctl kill --signal={signal} {unit}; systemctl stop {unit}")

    def link(self, node: str, up: bool) -> None:
        """Take a node's network links down or up, from outside."""
        interfaces = [link["ifname"] for link in self._ip(node, "link", "show", "type", "veth")]
        if up == (node not in self.cut):
            return
        if not up:
            self.cut[node] = self._ip(node, "route", "show", "default")
        for name in interfaces:
            self._ip(node, "link", "set", name, "up" if up else "down")
        if up:  # the default route has gone with its link
            for route in self.cut.pop(node):
                words = ["default", "via", route["gateway"], "dev", route["dev"]]
                self._ip(node, "route", "replace", *words)

    def _ip(self, node: str, *words: str) -> list[Document]:
        """The JSON answer of `ip` in a node's network namespace, run on this machine."""
        inspect = ["inspect", "-f", "{{.State.Pid}}", self.containers[node]]
        pid = docker(self.platform, *inspect).strip()
        command = ["nsenter", "-t", pid, "-n", "ip", "-j", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return json.loads(done.stdout or "[]")

    def fill(self, node: str, directory: str, megabytes: int = 4) -> None:
        """Give a directory a small file system of its own that is full. Never the disk itself.

        It starts with what the directory holds, so that only space is missing.
        """
        self.sh(
            node,
            f"set -e; cp -a {directory} /run/mayfly-kept; "
            f"size=$(du -sm {directory} | cut -f1); "
            f"own=$(stat -c uid=%u,gid=%g,mode=%a {directory}); "
            f"mount -t tmpfs -o size=$((size + {megabytes}))m,$own tmpfs {directory}; "
            f"cp -a /run/mayfly-kept/. {directory}/; rm -rf /run/mayfly-kept; "
            f"dd if=/dev/zero of={directory}/filler bs=64k 2>/dev/null || true",
        )

    def heal(self) -> None:
        """Undo all that was broken: links, masked units, full disks, stopped daemons."""
        for node in self.containers:
            self.link(node, up=True)
            self.sh(node, HEAL)
        first = "ps-0" if "ps-0" in self.containers else "worker-0"
        self.sh(first, "systemctl start hdfs-namenode")
        for node in self.containers:
            self.sh(node, "systemctl start hdfs-datanode")


@dataclass(frozen=True)
class Training:
    """One run on the lab's nodes."""

    lab: Lab
    run_id: str
    uri: str

    def read(self, name: str) -> bytes | None:
        """A document below the run's URI, None when there is none."""
        bucket, _, prefix = self.uri.removeprefix("s3://").partition("/")
        try:
            found = self.lab.bucket.get_object(Bucket=bucket, Key=f"{prefix.strip('/')}/{name}")
        except self.lab.bucket.exceptions.NoSuchKey:
            return None
        return bytes(found["Body"].read())

    def status(self) -> Document | None:
        """The run's status, None while there is none."""
        data = self.read("status.json")
        return json.loads(data) if data else None

    def events(self) -> list[Document]:
        """What has happened, oldest first."""
        return [json.loads(line) for line in (self.read("events.jsonl") or b"").splitlines()]

    def wait_until(self, predicate: Callable[[Document], bool], seconds: float) -> Document:
        """The first status that satisfies the predicate; the last one seen is told if none does."""
        end, status = time.monotonic() + seconds, None
        while time.monotonic() < end:
            status = self.status()
            if status is not None and predicate(status):
                return status
            assert status is None or status["state"] not in ENDED, f"over too early: {status}"
            time.sleep(1)
        raise AssertionError(f"waited {seconds} s in vain: {json.dumps(status)}")

    def end(self, seconds: float) -> Document:
        """The status of the run's end."""
        return self.wait_until(lambda status: status["state"] in ENDED, seconds)

    def over_on_all_nodes(self, seconds: float) -> None:
        """Wait until each node knows that this run is over."""
        end = time.monotonic() + seconds
        for node in self.lab.containers:
            while self.run_id not in self.lab.sh(node, "cat /var/lib/mayfly/ended", check=False):
                assert time.monotonic() < end, f"{node} does not know that the run is over"
                time.sleep(1)

    def at_step(self, step: int) -> Document:
        """The status once the training has come to a step."""
        return self.wait_until(lambda status: status["global_step"] >= step, STEPS_S)

    def at_told_step(self, step: int) -> None:
        """Return once the chief's own log tells a step; the status is seconds older."""
        end, log = time.monotonic() + STEPS_S, f"tail -n 40 /var/log/mayfly/{CHIEF_TASK}.log"
        chief = self.lab.node_of(CHIEF_TASK)
        while True:
            lines = self.lab.sh(chief, log, check=False).splitlines()
            if (after_lines(Progress(), lines).step or 0) >= step:
                return
            status = self.status()
            assert status is None or status["state"] not in ENDED, f"over too early: {status}"
            assert time.monotonic() < end, f"waited {STEPS_S} s in vain: {lines[-3:]}"
            time.sleep(0.3)

    def checkpoints(self) -> tuple[list[int], list[int]]:
        """The steps at which the estimator's chief has told that it saves, and that it restores.

        What is saved last may not be whole yet.
        """
        log = self.lab.sh(self.lab.node_of(CHIEF_TASK), f"cat /var/log/mayfly/{CHIEF_TASK}.log")
        found = (r"Saving checkpoints for (\d+) into", r"Restoring parameters from \S+ckpt-(\d+)")
        saved, restored = ([int(step) for step in re.findall(one, log)] for one in found)
        return saved, restored

    def process(self, task: str, rank: bool = False) -> int | None:
        """The process id, on its node, of the program that a task runs now.

        `rank` asks for what that has started itself, such as torchrun or Horovod's launcher has.
        """
        found = self.lab.sh(self.lab.node_of(task), PROCESSES.format(task=task)).split()
        if not found or (rank and len(set(found)) == 1):
            return None
        return int(found[-1] if rank else found[0])

    def pid(self, task: str, seconds: float = 60) -> int:
        """The process id, on its node, of the program that a task runs or will run soon."""
        end = time.monotonic() + seconds
        while (found := self.process(task)) is None:
            assert time.monotonic() < end, f"{task} runs no program"
            time.sleep(0.2)
        return found

    def kill(self, task: str, signal: str = "KILL") -> None:
        """Send a signal to the program that a task runs, not to its supervisor."""
        self.lab.sh(self.lab.node_of(task), f"kill -{signal} {self.pid(task)}")

    def kill_once_told(self, task: str, text: str) -> None:
        """Kill a task's program as soon as its log has this text; its node itself looks for it."""
        log, victim = f"/var/log/mayfly/{task}.log", self.pid(task)
        wait = f"until grep -qsF '{text}' {log}; do kill -0 {victim}; sleep 0.05; done"
        self.lab.sh(self.lab.node_of(task), f"set -e; {wait}; kill -KILL {victim}")
