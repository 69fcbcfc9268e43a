"""The control side's own faults: IM killed, the control process killed or interrupted, two at once.

Each case has a run of its own with one ps and one worker, and leaves nothing.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest
from machine import ROOT, docker, mayfly, networks, nodes, start

import testenv
from faults.test_export import MAY_WRITE, identity
from mayfly.ledger import Ledger, Record

LIMIT_S = 180
ONE_RUN_S = 600
SLOW = pytest.mark.slow
PHASES = ("preparing", "creating", "configuring", "training", "exporting", "destroying")


def quick(one: str, *states: str) -> list:
    """The states to try; but one of them, only where there is time for slow cases."""
    return [state if state == one else pytest.param(state, marks=SLOW) for state in states]


@dataclass
class Deployment:
    """A `mayfly deploy` in the background."""

    process: subprocess.Popen[str]
    name: str
    messages: Path

    def record(self) -> Record | None:
        with closing(Ledger(testenv.STATE / "ledger.sqlite")) as ledger:
            found = [r for r in ledger.runs() if r.run.startswith(f"{self.name}-")]
        return found[0] if found else None

    def reach(self, state: str) -> Record:
        """Wait until the ledger shows the state, or a later one; returns the record."""
        end = time.monotonic() + ONE_RUN_S
        while time.monotonic() < end:
            record = self.record()
            if record and (record.state == state or later(record.state, state)):
                return record
            assert self.process.poll() is None, self.messages.read_text()[-3000:]
            time.sleep(0.05)
        raise AssertionError(f"{self.name} did not reach {state}")

    def end(self, seconds: float = ONE_RUN_S) -> tuple[int, dict]:
        out, _ = self.process.communicate(timeout=seconds)
        print(self.messages.read_text()[-4000:], file=sys.stderr)
        return self.process.returncode, json.loads(out or "{}")


def later(state: str, wanted: str) -> bool:
    return state in PHASES and PHASES.index(state) > PHASES.index(wanted)


def things(platform) -> set[str]:
    return {*nodes(platform), *networks(platform)}


@pytest.fixture
def deploy(platform, tmp_path) -> Iterator:
    """Starts deployments, and finds nothing of them at the end; the lab's nodes may be there."""
    started: list[Deployment] = []
    before = things(platform)

    def start(name: str, *more: str, env: dict[str, str] | None = None) -> Deployment:
        messages = tmp_path / f"{name}.messages"
        command = [
            *(str(ROOT / ".venv/bin/mayfly"), "deploy", "--cloud", "local", "--json"),
            *("--ps", "1", "--workers", "1", "--name", name, "--steps", "20", *more),
        ]
        with messages.open("w") as file:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**testenv.environment(), **(env or {})},
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                start_new_session=True,
            )
        started.append(Deployment(process, name, messages))
        return started[-1]

    yield start
    left = things(platform) - before
    for deployment in started:
        if deployment.process.poll() is None:
            deployment.process.kill()
            deployment.process.wait()
        record = deployment.record()
        if record and not record.destroyed:
            mayfly("destroy", record.run, "--json")
    assert left == set()


def kill_im() -> None:
    record = testenv.STATE / "local/im/im-service.pid"
    os.kill(json.loads(record.read_text())["pid"], signal.SIGKILL)


@pytest.mark.parametrize("state", quick("creating", "creating", "configuring", "destroying"))
def test_the_im_service_killed(deploy, state):
    run = deploy(f"im-{state[:8]}")
    run.reach(state)
    if state == "configuring":
        time.sleep(15)  # well within contextualization
    kill_im()
    killed = time.monotonic()
    code, document = run.end()
    print(f"IM killed while {state}: rc {code} after {time.monotonic() - killed:.0f} s")
    assert document["leftovers"] == 0
    if code:
        assert time.monotonic() - killed < LIMIT_S
        assert "IM" in document["error"]["message"]


@pytest.mark.parametrize("state", quick("creating", *PHASES))
def test_the_control_process_killed(deploy, state):
    run = deploy(f"kill-{state[:8]}")
    run.reach(state)
    run.process.kill()
    run.process.wait()
    record = run.record()
    shown = mayfly("status", record.run, "--json")
    assert shown.code == 0
    assert shown.document["run"] == record.run
    began = time.monotonic()
    gone = mayfly("destroy", record.run, "--json")
    print(f"control killed while {state}: destroyed in {time.monotonic() - began:.0f} s")
    assert gone.code == 0
    proof = mayfly("verify-clean", record.run, "--json")
    assert (proof.code, proof.document["count"], proof.document["left"]) == (0, 0, [])
    assert "container" in [each["kind"] for each in proof.document["places"][0]["listed"]]


@SLOW
@pytest.mark.parametrize("victim", ["destroy", "im"])
def test_a_destroy_is_killed(deploy, victim):
    """Another destroy goes on with what the first has left, also when IM was killed under it."""
    run = deploy(f"twofold-{victim}")
    record = run.reach("configuring")
    run.process.kill()
    run.process.wait()
    first = start("destroy", record.run, "--json")
    try:
        time.sleep(random.Random(victim).uniform(2, 5))  # Python's own start takes as long
        kill_im() if victim == "im" else first.kill()
        code = first.wait(LIMIT_S)
    finally:
        first.kill()
        first.wait()
    print(f"{victim} killed while destroying: rc {code}")
    assert mayfly("destroy", record.run, "--json").code == 0
    proof = mayfly("verify-clean", record.run, "--json")
    assert (proof.code, proof.document["count"]) == (0, 0)


@SLOW
@pytest.mark.parametrize("state", PHASES[1:])
def test_ctrl_c(deploy, state):
    run = deploy(f"int-{state[:8]}")
    run.reach(state)
    run.process.send_signal(signal.SIGINT)
    pressed = time.monotonic()
    code, document = run.end(LIMIT_S)
    print(f"Ctrl-C while {state}: rc {code} after {time.monotonic() - pressed:.0f} s")
    assert document["leftovers"] == 0
    messages = run.messages.read_text()
    if state == "destroying":  # the run had its end before
        assert (code, document["ok"]) == (0, True)
        assert "still destroying" in messages
    else:
        assert code == 130
        assert "destroying what was made" in messages
    assert run.record().destroyed


@SLOW
@pytest.mark.parametrize("phase", ["services", "image"])
def test_ctrl_c_before_anything_is_made(deploy, phase):
    """There is no run yet: nothing to destroy, and nothing in the ledger."""
    run = deploy(f"early-{phase}")
    end = time.monotonic() + LIMIT_S
    while f"{phase} …" not in run.messages.read_text():
        assert time.monotonic() < end, run.messages.read_text()
        time.sleep(0.01)
    run.process.send_signal(signal.SIGINT)
    code, document = run.end(LIMIT_S)
    assert (code, document["run"], document["leftovers"]) == (130, None, 0)
    assert run.record() is None


@SLOW
def test_a_second_ctrl_c_leaves_and_says_what_is_left(deploy):
    run = deploy("twice")
    run.reach("configuring")
    run.process.send_signal(signal.SIGINT)
    run.reach("destroying")
    run.process.send_signal(signal.SIGINT)
    code, _ = run.end(30)
    assert code == 130
    record = run.record()
    assert "left: " in run.messages.read_text()
    assert not record.destroyed
    assert mayfly("destroy", record.run, "--json").code == 0


@SLOW
def test_an_export_that_failed_is_taken_up_with_other_keys(deploy):
    may = ["Read:mayfly", "List:mayfly", "Read:mayfly-public", "Write:mayfly-public"]
    may += [f"Write:mayfly/few-*/{name}*" for name in ("job.json", *MAY_WRITE)]
    with identity(may) as (key, secret):
        keys = {"MAYFLY_S3_ACCESS_KEY_ID": key, "MAYFLY_S3_SECRET_ACCESS_KEY": secret}
        run = deploy("few", env=keys)
        code, document = run.end()
    assert code == 1
    assert document["leftovers"] > 0
    record = run.record()
    assert (record.state, record.outcome) == ("kept", "failed")
    assert f"mayfly export {record.run}" in document["error"]["message"]
    began = time.monotonic()
    done = mayfly("export", record.run, "--json")
    print(f"export taken up: done and destroyed in {time.monotonic() - began:.0f} s")
    assert (done.code, done.document["leftovers"]) == (0, 0)
    record = run.record()
    assert (record.state, record.outcome) == ("destroyed", "succeeded")


@SLOW
def test_an_export_of_an_unknown_run_is_refused(platform):
    refused = mayfly("export", "no-such-run", "--json")
    assert refused.code == 2
    assert "unknown run: 'no-such-run'" in refused.messages


@SLOW
def test_two_runs_at_once(deploy):
    first, second = deploy("one"), deploy("two")
    for run in (first, second):
        code, document = run.end(900)
        assert (code, document["ok"], document["leftovers"]) == (0, True, 0)


@SLOW
def test_a_run_left_alone_is_ended_by_its_dead_man_timer(deploy, platform):
    run = deploy("alone", "--set", "limits.idle=40s")
    run.reach("training")
    run.process.kill()
    run.process.wait()
    left = time.monotonic()
    label = f"label=im.infrastructure={run.record().infrastructure}"
    while docker(platform, "ps", "-q", "--filter", label).split():
        assert time.monotonic() - left < ONE_RUN_S
        time.sleep(2)
    print(f"left alone: nodes off after {time.monotonic() - left:.0f} s")
    gone = mayfly("destroy", run.record().run, "--json")
    assert (gone.code, gone.document["leftovers"]) == (0, 0)
