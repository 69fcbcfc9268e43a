"""From `create` to the first training step: ours against the old way, interleaved in one run.

Usage: deploy.py [REPEATS] [SVG]. One ps and two workers, the node image present, the default job.
JSON on standard output (medians of seconds by phase, ratio, machine and load), and a bar chart.
Needs the environment of tests/testenv.py, and no other run beside it: it changes IM's playbooks.

The old way is how such a cluster is contextualized without this project's shortcuts. The roles and
their variables are the same but for what is named here:
  * IM's own playbooks for preparing nodes, as its package ships them, instead of our short ones,
    and the one task of ours that gives a container's name to its private address;
  * one contextualize step for each kind of node, one after the other (ps, then workers), instead
    of both kinds in the same step. The ps' HDFS then cannot wait for the workers' datanodes, so
    there `hadoop_datanodes` names the ps alone;
  * nothing of the roles' software in the image: no wheels, no assembled HDFS set, no Java, git or
    python3-venv. Each node takes them from the package indexes that it is configured for.
What stays in the image for both, to the old way's advantage: Debian, sshd, Python, and Ansible,
which IM would otherwise fetch from conda on the first node.

Phases begin when IM's messages first name them; IM renews its messages every 5 s, so a phase's
seconds are good to that. The whole is not affected. After each of our clusters, IM configures it a
second time: tasks that report `changed` are counted, in the roles and in all that IM runs.
"""

from __future__ import annotations

import os
import re
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bars import stacked_bars
from kept import ROOT, machine, note, say, testenv
from rich.console import Console

from mayfly import inputs
from mayfly.clouds import load_job
from mayfly.destroy import Destroyer
from mayfly.display import Phases, PlainDisplay
from mayfly.errors import RemoteError
from mayfly.job import Job, Ready, Tools
from mayfly.ledger import Ledger
from mayfly.local import imservice, venvs
from mayfly.local.docker import Docker
from mayfly.local.paths import find_paths
from mayfly.prepare import prepare
from mayfly.watch import Broken, Pace, Status, wait_for_nodes, wait_until_configured

WAYS = ("ours", "old")
STAGES = ("hdfs", "dataset", "runtime", "train")
PHASES = ("infrastructure", "IM's preparation", *STAGES, "first step")
LAUNCHED = re.compile(rf"^Launch task: ({'|'.join(STAGES)})_", re.MULTILINE)
TASK = re.compile(r"^TASK \[(?P<name>[^\]]+)\]")
STEP = re.compile(r"^(  system \w+ configure \w+ step )\d+$", re.MULTILINE)
OLD_IMAGE = "mayfly-bench:old"
# Ansible takes the time of apt's directory for that of the last update: an image's is old.
OLD_DOCKERFILE = """\
FROM {image}
RUN rm -rf /opt/mayfly/cache && apt-get -y -q purge openjdk-17-jre-headless git python3-venv \
 && apt-get -y -q autoremove --purge && rm -rf /var/lib/apt/lists/* \
 && touch -d 2020-01-01 /var/lib/apt/lists
"""
NODE_NAME = re.compile(r"^    - name: Leave the node's name .*?\n\n", re.MULTILINE | re.DOTALL)
BOOTED = "    # Some OSs does not have python by default\n"  # in IM's playbook
NODES = 3
STEPS = 60  # training is over soon, and does not compete with the second contextualization
LONGEST_S = 1500.0


def main() -> int:
    """Measure; 1 when a cluster failed."""
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    chart = Path(sys.argv[2]) if len(sys.argv) > 2 else ROOT / "build/bench-deploy.svg"
    os.environ.update(testenv.environment())
    before, runs, again = machine(), {way: [] for way in WAYS}, []
    for number in range(repeats):
        for way in WAYS:
            note(f"{way}, {number + 1} of {repeats}")
            seconds, second = measure(way)
            runs[way].append(seconds)
            again += [second] if second else []
            note(f"{way}: {seconds} {second or ''}")  # what was measured outlives a failure
    document = summary(runs, again)
    chart.parent.mkdir(exist_ok=True)
    chart.write_text(stacked_bars("Seconds from create to the first step", document["phases_s"]))
    say({**document, "chart": str(chart)}, before)
    return 0


def summary(
    runs: Mapping[str, list[dict[str, float]]], again: list[dict[str, Any]]
) -> dict[str, Any]:
    """Medians by way and phase, of the whole, their ratio, and the second contextualization."""
    whole = {way: statistics.median(sum(run.values()) for run in runs[way]) for way in WAYS}
    medians = {
        way: {phase: round(statistics.median(r[phase] for r in runs[way]), 1) for phase in PHASES}
        for way in WAYS
    }
    return {
        "repeats": len(runs["ours"]),
        "phases_s": medians,
        "whole_s": {way: round(seconds, 1) for way, seconds in whole.items()},
        "each_whole_s": {way: [round(sum(r.values()), 1) for r in runs[way]] for way in WAYS},
        "ratio": round(whole["ours"] / whole["old"], 3),
        "second_contextualization": {
            "seconds": round(statistics.median(a["seconds"] for a in again), 1),
            "changed_in_roles": max(len(a["changed_in_roles"]) for a in again),
            "changed": again[-1]["changed_in_roles"] + again[-1]["changed_in_im"],
        },
    }


def measure(way: str) -> tuple[dict[str, float], dict[str, Any] | None]:
    """Make one cluster and remove it: seconds by phase, and what its second configuration was."""
    wanted = {"cloud": "local", "name": f"bench-{way}", "steps": STEPS}
    spec, profile = load_job(None, wanted, os.environ)
    ledger = Ledger(find_paths().state.parent / "ledger.sqlite")
    with PlainDisplay(Console(stderr=True)) as display:
        tools = Tools(ledger, display, os.environ, find_paths().cache)
        ready = prepare(Job(spec, profile), tools, Phases(display))
    radl = old_radl(ready.radl, old_image(ready)) if way == "old" else ready.radl
    ledger.add(ready.run.id, "local", ready.uri, spec.model_dump(mode="json"))
    with playbooks(way):
        try:
            infrastructure, seconds = follow(ready, radl, ledger)
            second = configure_again(ready, infrastructure) if way == "ours" else None
        finally:
            destroyer = Destroyer(
                ready.services.im, ledger, ready.services.client, ready.services.traces
            )
            destroyer.destroy(ledger.get(ready.run.id), lambda _: None)
    return seconds, second


def follow(ready: Ready, radl: str, ledger: Ledger) -> tuple[str, dict[str, float]]:
    """Create and wait for the first step; the infrastructure, and seconds by phase."""
    im = ready.services.im
    values = {name: secret.reveal() for name, secret in ready.services.s3.inputs().items()}
    starts = {PHASES[0]: time.monotonic()}
    with ledger.intent(ready.run.id, "create", "infrastructure") as step:
        step.detail = im.create(inputs.fill(radl, values))
    ledger.set_infrastructure(ready.run.id, step.detail)
    wait_for_nodes(im, step.detail, NODES, Pace(interval=0.5), lambda *_: None)
    starts[PHASES[1]] = time.monotonic()

    def look() -> None:
        for phase in LAUNCHED.findall(im.messages(step.detail)):
            starts.setdefault(phase, time.monotonic())

    wait_until_configured(im, step.detail, Pace(interval=1.0), lambda *_: None, look)
    starts["first step"] = time.monotonic()
    _wait_for(ready, lambda status: bool(status.global_step) or status.state != "starting")
    return step.detail, durations(starts, time.monotonic())


def durations(starts: Mapping[str, float], end: float) -> dict[str, float]:
    """Seconds of each phase from when they began; one that was never seen took none."""
    ends: dict[str, float] = {}
    for phase in reversed(PHASES):
        ends[phase] = end
        end = starts.get(phase, end)
    return {phase: ends[phase] - starts.get(phase, ends[phase]) for phase in PHASES}


def _wait_for(ready: Ready, reached: Callable[[Status], bool]) -> None:
    """Return when the run's status is as wanted. Raises Broken when it fails or takes too long."""
    deadline = time.monotonic() + LONGEST_S
    while time.monotonic() < deadline:
        status = ready.store.status()
        if status is not None and status.state == "failed":
            raise Broken(f"the run failed: {status.error}")
        if status is not None and reached(status):
            return
        time.sleep(0.5)
    raise Broken(f"the run did not come so far in {LONGEST_S:.0f} s")


def configure_again(ready: Ready, infrastructure: str) -> dict[str, Any]:
    """Let IM configure the unchanged cluster once more: seconds, and the tasks that changed it."""
    _wait_for(ready, lambda status: status.state == "succeeded")
    im = ready.services.im
    started = time.monotonic()
    im.reconfigure(infrastructure)
    deadline = started + 20
    while im.state(infrastructure).infrastructure == "configured" and time.monotonic() < deadline:
        time.sleep(0.2)
    wait_until_configured(im, infrastructure, Pace(interval=0.5), lambda *_: None, lambda: None)
    seconds = time.monotonic() - started
    tasks = changed_tasks(im.messages(infrastructure))
    roles = [task for task in tasks if task.startswith("mayfly.training.")]
    others = [task for task in tasks if task not in roles]
    return {"seconds": seconds, "changed_in_roles": roles, "changed_in_im": others}


def changed_tasks(messages: str) -> list[str]:
    """The Ansible tasks that changed something on a node, once for each node."""
    found, task = [], ""
    for line in messages.splitlines():
        if named := TASK.match(line):
            task = named["name"]
        elif line.startswith("changed: [") and task not in found[-1:]:
            found.append(task)
    return found


# --- the old way -------------------------------------------------------------------------------


def old_radl(radl: str, image: str) -> str:
    """Our RADL with another image, and each kind of node in a step of its own."""
    numbers = iter(range(1, 100))
    radl = STEP.sub(lambda found: f"{found[1]}{next(numbers)}", radl)
    radl = re.sub(r"docker://mayfly-node:\w+", f"docker://{image}", radl)
    head, block, tail = radl.partition("configure hdfs_ps (")
    alone = "  vars:\n    hadoop_datanodes: \"{{ groups['ps'] }}\"\n"
    changed = head + block + tail.replace("  vars:\n", alone, 1)
    if changed == radl:
        raise SystemExit("the RADL has no hdfs_ps with variables: this bench needs an update")
    return changed


def old_image(ready: Ready) -> str:
    """The node image without any of the roles' software; its tag."""
    assert ready.services.platform is not None
    docker = Docker(ready.services.platform.docker_host)
    context = find_paths().of("image") / "old"
    context.mkdir(exist_ok=True)
    text = OLD_DOCKERFILE.format(image=ready.run.image.removeprefix("docker://"))
    (context / "Dockerfile").write_text(text)
    docker("build", "-q", "--network", "host", "-t", OLD_IMAGE, str(context))
    return OLD_IMAGE


def old_basic(stock: str, ours: str) -> str:
    """IM's own playbook for every node, with the one task of ours that nodes which are containers
    cannot do without: else HDFS' daemons listen at the address that Docker wrote first."""
    task = NODE_NAME.search(ours)
    before, mark, after = stock.partition(BOOTED)
    if not task or not mark:
        raise SystemExit("IM's playbook or ours has changed: this bench needs an update")
    return f"{before}{task[0]}{mark}{after}"


@contextmanager
def playbooks(way: str) -> Iterator[None]:
    """IM's own files for configuring nodes while the block runs, or ours, which stay afterwards."""
    paths = find_paths()
    environment = venvs.ensure(paths, "im", imservice.REQUIREMENTS, note)
    target = paths.of("im") / "contextualization"
    connectors = paths.checkout / "scripts/im_connectors"
    if way == "old":
        stock = next(environment.glob("lib/python3*/site-packages/contextualization"))
        shutil.copy2(stock / "conf-ansible.yml", target / "conf-ansible.yml")
        ours = (connectors / "contextualization/basic.yml").read_text()
        (target / "basic.yml").write_text(old_basic((stock / "basic.yml").read_text(), ours))
    try:
        yield
    finally:
        imservice.make_contextualization(environment, connectors / "contextualization", target)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (Broken, RemoteError) as error:
        sys.exit(f"{error}\n" + "\n".join(getattr(error, "log_tail", [])))
