"""Many short runs in a row: does the platform end where it began?

Usage: soak.py [RUNS]. After each run: containers, networks and volumes of the engine, file
descriptors and memory of each service, and disk by part of the state directory. JSON on standard
output; exit code 1 when a run failed or something grows without end.

What counts nodes (containers, networks, volumes) must be back after every run. The rest has caches
that fill in the first runs: its last quarter is compared with its second. A run's objects are
removed from the bucket after it, for they are meant to stay; the S3 server frees their space later,
so its disk is shown, but not judged. Needs the environment of tests/testenv.py.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from kept import ROOT, local, machine, note, say, testenv
from processes import STATE, descriptors, memory_mib, services

from mayfly.local.docker import Docker
from mayfly.services import open_services
from mayfly_train import s3

SHORT = ("--ps", "1", "--workers", "1", "--steps", "40", "--name", "soak", "--json")
EXACT = ("containers", "networks", "volumes")
# Growth that is allowed from the second quarter to the last: a part, and a fixed amount.
ALLOWED = {"fds": (0.1, 5.0), "mib": (0.15, 20.0), "disk": (0.1, 50.0)}
ENOUGH = 8  # runs, for quarters that mean something
SETTLE_S = 5.0


def main() -> int:
    """Run and look; 1 when a run failed or something grows."""
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    os.environ.update(testenv.environment())
    docker = Docker(local.up(note).docker_host)
    before, samples, seconds = machine(), [sample(docker)], []
    for number in range(1, runs + 1):
        started = time.monotonic()
        done = subprocess.run(
            [str(ROOT / ".venv/bin/mayfly"), "deploy", "--cloud", "local", *SHORT],
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        document = json.loads(done.stdout or "{}")
        if done.returncode:
            say({"runs": number - 1, "failed": document, "samples": samples}, before)
            return 1
        seconds.append(round(time.monotonic() - started, 1))
        forget(document["run"])
        time.sleep(SETTLE_S)
        samples.append(sample(docker))
        note(f"run {number} of {runs}: {seconds[-1]} s; {samples[-1]}")
    grows = growth(samples)
    result = {"runs": runs, "seconds": statistics.median(seconds), "grows": grows}
    say({**result, "first": samples[0], "last": samples[-1], "samples": samples}, before)
    return 1 if grows else 0


def sample(docker: Docker) -> dict[str, float]:
    """What there is now."""
    found: dict[str, float] = {
        "containers": len(docker.lines("ps", "-aq")),
        "networks": len(docker.lines("network", "ls", "-q")),
        "volumes": len(docker.lines("volume", "ls", "-q")),
    }
    for name, pid in services().items():
        found[f"{name}_fds"] = descriptors(pid)
        found[f"{name}_mib"] = round(memory_mib(pid))
    for part in ("docker", "im", "s3"):
        found[f"{part}_disk"] = disk_mib(STATE / part)
    return found


def disk_mib(directory: Path) -> float:
    """Space that a directory takes, in MiB; overlay mounts below it are not entered."""
    command = ["du", "-xsm", str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return float(done.stdout.split()[0])


def forget(run: str) -> None:
    """Remove a run's objects from the bucket."""
    client = open_services("local", os.environ, lambda _: None).client
    address = s3.parse_uri(f"s3://mayfly/{run}")
    names = s3.list_sizes(client, address)
    keys = [{"Key": address.join(name).key} for name in names]
    if keys:
        client.delete_objects(Bucket=address.bucket, Delete={"Objects": keys})


def growth(samples: Sequence[dict[str, float]]) -> list[str]:
    """What grows without end, in words; empty when nothing does.

    With few runs, the last sample is compared with the one after the first run.
    """
    found = []
    for name in samples[0]:
        values = [sample[name] for sample in samples if name in sample]
        if name in EXACT:
            if max(values[1:], default=0) > values[0]:
                found.append(f"{name}: {values[0]:g} before, {max(values[1:]):g} afterwards")
        elif name != "s3_disk" and (grown := _grown(name, values[1:])):
            found.append(grown)
    return found


def _grown(name: str, values: Sequence[float]) -> str:
    quarter = len(values) // 4
    if len(values) >= ENOUGH:
        early, late = values[quarter : 2 * quarter], values[-quarter:]
    else:
        early, late = values[:1], values[-1:]
    part, amount = ALLOWED[name.rpartition("_")[2]]
    first, last = statistics.median(early), statistics.median(late)
    return f"{name}: {first:g}, later {last:g}" if last > first * (1 + part) + amount else ""


if __name__ == "__main__":
    sys.exit(main())
