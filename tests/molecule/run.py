"""Run the roles' molecule scenarios on the local platform's node image, two at a time.

Usage: run.py [--all] [--keep] [--jobs N] [ROLE | ROLE/SCENARIO ...]

Without arguments the `default` scenario of every role but `horovod`, whose wheel takes minutes to
compile, and `juicefs`, which needs /dev/fuse and more in the image: name them, or give --all. The
engine, the image and the network are those of `mayfly local up`, unless DOCKER_HOST and
MAYFLY_NODE_IMAGE name others. What a scenario printed comes when it has ended. Ends with why some
failed and a table of times; exit status 1 when one failed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mayfly.local import platform
from mayfly.local.image import with_extras

ROOT = Path(__file__).resolve().parents[2]
BASE = ROOT / "tests/molecule/base.yml"
NETWORK = "mayfly-molecule"
JOBS = 2  # half of a scenario's time is waiting for daemons and for SSH
# Parts of the node image that only these need, and that cost minutes (mayfly.local.image).
EXTRAS = {
    "horovod/": "horovod-tensorflow",
    "juicefs/default": "juicefs",
    "runtime/tensorflow2": "tensorflow2",
}
ON_DEMAND = ("horovod", "juicefs")
LONGEST_LINE = 600  # of what is told again at the end
LAST_LINES = 40  # told again where Ansible ended without a task that failed
LONGEST = "trainer/"  # started first, so that nothing short waits for it at the end


def main() -> int:
    """Run what was asked for; 0 when every scenario passed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--all", action="store_true", help="every scenario, not only default")
    parser.add_argument("--keep", action="store_true", help="converge and verify, keep the nodes")
    parser.add_argument("--jobs", type=int, default=JOBS, help=f"at a time (default: {JOBS})")
    parser.add_argument("names", nargs="*", metavar="ROLE[/SCENARIO]")
    options = parser.parse_args()
    chosen = scenarios(options.names, every=options.all)
    chosen.sort(key=lambda name: not name.startswith(LONGEST))
    extras = [extra for start, extra in EXTRAS.items() if any(n.startswith(start) for n in chosen)]
    environment = environment_of_molecule(extras)
    with ThreadPoolExecutor(options.jobs) as pool:
        runs = pool.map(lambda name: run(name, environment, keep=options.keep), chosen)
        results = dict(zip(chosen, runs, strict=True))
    failed = {name: said for name, (passed, _, said) in results.items() if not passed}
    for name, said in failed.items():
        print("\n".join([f"--- {name}", *why(said)]))
    for name, (passed, seconds, _) in results.items():
        print(f"{name:32} {'passed' if passed else 'FAILED'} {seconds:6.1f} s")
    print(f"{len(results) - len(failed)} passed, {len(failed)} failed")
    return 1 if failed else 0


def scenarios(names: list[str], every: bool) -> list[str]:
    """The scenarios as `role/scenario`, sorted; exits when a name is unknown."""
    known = sorted(
        f"{path.parents[2].name}/{path.parent.name}"
        for path in ROOT.glob("roles/*/molecule/*/molecule.yml")
    )
    chosen: list[str] = []
    roles = sorted({scenario.split("/")[0] for scenario in known})
    for name in names or [role for role in roles if every or role not in ON_DEMAND]:
        only = name if "/" in name else f"{name}/default"
        matches = [s for s in known if s.startswith(f"{name}/")] if every else [only]
        if not set(matches) <= set(known) or not matches:
            sys.exit(f"unknown scenario {name!r} (known: {', '.join(known)})")
        chosen += matches
    return chosen


def environment_of_molecule(extras: list[str]) -> dict[str, str]:
    """Variables for molecule: engine, image, network, and only this checkout's collection."""
    scripts = Path(sys.executable).parent
    environment = {
        **os.environ,
        "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}",
        "ANSIBLE_COLLECTIONS_PATH": str(ROOT / ".ansible/collections"),
        "ANSIBLE_HOME": str(ROOT / ".ansible"),
        "ANSIBLE_FORCE_COLOR": "0",
    }
    if {"DOCKER_HOST", "MAYFLY_NODE_IMAGE"} <= environment.keys():
        return environment | {"MAYFLY_MOLECULE_NETWORK": own_network(environment)}
    wanted = with_extras(os.environ, extras)
    started = platform.up(
        lambda message: print(message, file=sys.stderr, flush=True), environ=wanted
    )
    return environment | {
        "DOCKER_HOST": started.docker_host,
        "MAYFLY_NODE_IMAGE": started.image,
        "MAYFLY_MOLECULE_NETWORK": started.network,
    }


def own_network(environment: dict[str, str]) -> str:
    """Name of a network on which nodes find each other by name; kept for the next run."""
    command = ["docker", "network", "create", "--label", "mayfly=1", NETWORK]
    subprocess.run(command, env=environment, capture_output=True)
    return NETWORK


def why(said: str) -> list[str]:
    """The lines that tell what failed, each after the step or task that it belongs to.

    Where no task failed (Ansible was killed, or failed itself): the last lines up to molecule's
    own on the exit status, or up to the end.
    """
    task, told, lines = "", [], said.splitlines()
    for line in lines:
        if line.startswith(("TASK [", "INFO ")):
            task = line.rstrip(" *")
        elif line.startswith(("fatal:", "failed:")):
            told += [task, line[:LONGEST_LINE]]
        elif line.startswith("* ["):  # not idempotent
            told.append(line)
    if told:
        return told
    ended = next((n for n, line in enumerate(lines, 1) if line.startswith("CRITICAL")), len(lines))
    return [line[:LONGEST_LINE] for line in lines[max(0, ended - LAST_LINES) : ended]]


def run(name: str, environment: dict[str, str], keep: bool) -> tuple[bool, float, str]:
    """Whether the scenario passed, the seconds that it took, and what it said."""
    role, scenario = name.split("/")
    print(f"=== {name} started", flush=True)
    start, passed, said = time.monotonic(), True, ""
    for step in ("converge", "verify") if keep else ("test",):
        command = ["molecule", "--base-config", str(BASE), step, "--scenario-name", scenario]
        done = subprocess.run(
            command,
            cwd=ROOT / "roles" / role,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        passed, said = passed and done.returncode == 0, said + done.stdout
    print(f"\n=== {name}\n{said}", flush=True)
    return passed, time.monotonic() - start, said


if __name__ == "__main__":
    sys.exit(main())
