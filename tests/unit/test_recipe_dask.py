"""The Dask engine: a scheduler and two workers as processes of this machine, on loopback."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from distributed import Client
from distributed.security import Security

from mayfly_train.recipe import process, tls
from mayfly_train.recipe.attempt import Job
from mayfly_train.recipe.dask_engine import DaskEngine
from mayfly_train.recipe.document import Experiment, Hardware, Parameter
from mayfly_train.recipe.engine import ENDED, Member, slots_for, why_no_room
from mayfly_train.recipe.expand import Task
from mayfly_train.recipe.head import Head
from mayfly_train.recipe.here import Machine
from mayfly_train.recipe.ledger import Ledger
from unit.recipe_fakes import Lab

PATIENCE_S = 300.0


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(tmp_path_factory.mktemp("dask"))


@pytest.fixture(scope="module")
def machine(lab: Lab) -> Iterator[Machine]:
    found = Machine(lab.path / "machine", lab.store.address, workers=2)
    found.start()
    yield found
    found.stop()
    assert [p for p in found.processes.values() if p.is_alive()] == []


@pytest.fixture
def engine(machine: Machine) -> Iterator[DaskEngine]:
    found = DaskEngine(machine.scheduler, machine.tls)
    eventually(lambda: len(found.members()) == 2)
    yield found
    found.close()


def eventually(true: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.05)


def numbered(count: int) -> tuple[Parameter, ...]:
    return (Parameter("n", "integers", low=0, high=count - 1),)


def work(lab: Lab, engine: DaskEngine, experiment: Experiment) -> tuple[str, Ledger]:
    """Each test's experiment has a name of its own, and so a run in the common store."""
    ledger = Ledger(lab.path / f"{experiment.name}.sqlite")
    return Head(lab.run(experiment), ledger, engine).work(), ledger


def running(lab: Lab, name: str) -> int:
    """How many attempts a run's head knows to have begun."""
    with closing(sqlite3.connect(lab.path / f"{name}.sqlite")) as db:
        query = "SELECT COUNT(*) FROM attempts WHERE state = 'running'"
        return int(db.execute(query).fetchone()[0])


def test_members_say_what_they_have(engine: DaskEngine):
    assert {member.name.rpartition("-")[0] for member in engine.members()} == {
        "worker-0",
        "worker-1",
    }
    memory = psutil.virtual_memory().total
    assert engine.members()[0] == Member(engine.members()[0].name, 1, 1.0, memory, 0)


def test_short_tasks_all_end_once_and_on_both(lab: Lab, engine: DaskEngine, tmp_path: Path):
    line = f"sh -c 'echo $0 >> {tmp_path}/ran' {{{{n}}}}"
    outcome, ledger = work(lab, engine, Experiment("short", (line,), numbered(60)))
    assert outcome == "succeeded"
    assert sorted(map(int, (tmp_path / "ran").read_text().split())) == list(range(60))
    rows = list(ledger.rows("short"))
    assert {row.attempts for row in rows} == {1}
    assert len({row.node for row in rows}) == 2


def test_short_tasks_say_nothing_of_another_experiments(engine: DaskEngine):
    """Long tasks that a slot gets several of would wait for each other, on a lost node, too."""
    for number in range(100):
        engine._learn({"task": f"short/{number:06d}", "seconds": 0.01})
    engine._learn({"state": "cancelled"})
    assert (engine.together("short"), engine.together("long")) == (16, 1)


def test_failures_and_retries_come_back(lab: Lab, engine: DaskEngine, tmp_path: Path):
    line = f"sh -c 'echo >> {tmp_path}/ran; test $(wc -l < {tmp_path}/ran) -ge 3'"
    outcome, ledger = work(lab, engine, Experiment("retried", (line,)))
    row = ledger.row("retried", 0)
    assert outcome == "succeeded" and row is not None
    assert (row.failures, row.node_losses) == (2, 0)


def test_a_killed_worker_loses_nothing(
    lab: Lab, engine: DaskEngine, machine: Machine, tmp_path: Path
):
    """Finished tasks do not run again, and those that ran do, once."""
    line = f"sh -c 'echo $0 >> {tmp_path}/began; sleep 1.5; echo $0 >> {tmp_path}/ended' {{{{n}}}}"
    experiment = Experiment("killed", (line,), numbered(12), task_retries=0)

    def kill() -> None:
        eventually(lambda: (tmp_path / "ended").exists())
        time.sleep(0.7)  # into the middle of the next ones
        os.kill(machine.processes[0].pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    outcome, ledger = work(lab, engine, experiment)
    killer.join()
    assert outcome == "succeeded"
    assert ledger.states("killed") == {"done": 12}
    rows = list(ledger.rows("killed"))
    assert sum(row.failures for row in rows) == 0
    assert sum(row.node_losses for row in rows) == 1
    began = (tmp_path / "began").read_text().split()
    assert sorted(set(began), key=int) == [str(n) for n in range(12)]
    assert len(began) == 13
    eventually(lambda: len(engine.members()) == 2)


def test_a_task_on_two_nodes_starts_again_when_one_is_killed(
    lab: Lab, engine: DaskEngine, machine: Machine, tmp_path: Path
):
    line = (
        f"sh -c 'echo $RANK >> {tmp_path}/began; test $(wc -l < {tmp_path}/began) -gt 2 ||"
        f" exec sleep 600; test -e {tmp_path}/killed'"
    )

    def kill() -> None:
        began = tmp_path / "began"
        eventually(lambda: began.exists() and len(began.read_text().split()) == 2)
        eventually(lambda: running(lab, "gang") == 2)  # else the attempt counts as not begun
        (tmp_path / "killed").touch()
        os.kill(machine.processes[0].pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    outcome, ledger = work(lab, engine, Experiment("gang", (line,), hardware=Hardware(nodes=2)))
    killer.join()
    row = ledger.row("gang", 0)
    assert outcome == "succeeded" and row is not None
    assert (row.failures, row.node_losses, row.attempts) == (0, 1, 2)
    assert sorted((tmp_path / "began").read_text().split()) == ["0", "0", "1", "1"]
    eventually(lambda: len(engine.members()) == 2)


def test_cancelling_ends_the_processes(lab: Lab, engine: DaskEngine, tmp_path: Path):
    jobs = []
    run = lab.run(Experiment("stuck", ("sleep 6543",), numbered(1)))

    task = Task("stuck", 0, {}, [["sleep", "6543"]], {})
    jobs.append(Job("stuck-1", task.to_json(), "", run.data, "result.json"))
    engine.submit(jobs, Hardware())
    eventually(lambda: bool(sleeping()))
    engine.cancel(["stuck-1"])
    reports = []
    end = time.monotonic() + PATIENCE_S
    while not reports and time.monotonic() < end:
        reports = [report for report in engine.wait(0.2) if report.kind == ENDED]
    assert reports[0].outcome is not None and reports[0].outcome["state"] == "cancelled"
    assert sleeping() == []


def sleeping() -> list[int]:
    return [
        p.pid for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", "6543"]
    ]


def test_a_task_that_fits_nowhere_says_what_it_waits_for(lab: Lab, engine: DaskEngine):
    wanted = Hardware(memory=1 << 60)
    assert slots_for(engine.members(), wanted) == 0
    assert why_no_room(engine.members(), wanted).startswith(
        "waits for a node with 1073741824.0 GiB"
    )


def test_strangers_are_refused(machine: Machine, tmp_path: Path):
    tls.make(tmp_path, "another run")
    strange = {
        "tls_ca_file": str(machine.tls / tls.CA),
        "tls_client_cert": str(tmp_path / tls.CERTIFICATE),
        "tls_client_key": str(tmp_path / tls.KEY),
    }
    for address, security in (
        (machine.scheduler, Security(require_encryption=True, **strange)),
        (machine.scheduler.replace("tls:", "tcp:"), None),
    ):
        with pytest.raises((OSError, TimeoutError)):
            Client(address, security=security, timeout=3, set_as_default=False)


def test_keys_are_for_their_owner_alone(machine: Machine):
    assert {path.stat().st_mode & 0o777 for path in machine.tls.iterdir()} == {0o600}
    assert "PRIVATE" not in (machine.tls / tls.CA).read_text()


def test_nothing_listens_beyond_loopback(machine: Machine):
    started = [*machine.processes.values(), machine._scheduler]
    ports = [
        connection.laddr
        for each in started
        if each is not None
        for connection in psutil.Process(each.pid).net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert len(ports) >= 3
    assert {port.ip for port in ports} == {"127.0.0.1"}


def test_everything_ends_with_a_killed_head(tmp_path: Path):
    """Kill -9 of the process that has started it: scheduler, worker and task end, too."""
    script = f"""
import sys, time
sys.path.append({str(Path(__file__).parents[1])!r})
from pathlib import Path
from unit.recipe_fakes import Lab
from mayfly_train.recipe.dask_engine import DaskEngine
from mayfly_train.recipe.document import Experiment
from mayfly_train.recipe.head import Head
from mayfly_train.recipe.here import Machine
lab = Lab(Path({str(tmp_path)!r}))
machine = Machine(lab.path / "machine", lab.store.address, workers=1)
machine.start()
engine = DaskEngine(machine.scheduler, machine.tls)
while not engine.members():
    time.sleep(0.05)
print(machine._scheduler.pid, machine.processes[0].pid, flush=True)
line = "sh -c 'echo $$ > {tmp_path}/task; exec sleep 600'"
Head(lab.run(Experiment("only", (line,))), lab.ledger(), engine).work()
"""
    head = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert head.stdout is not None
    pids = [int(word) for word in head.stdout.readline().split()]
    assert len(pids) == 2, "the head did not start"
    task = tmp_path / "task"
    eventually(lambda: task.exists() and bool(task.read_text().strip()))
    pids.append(int(task.read_text()))
    head.kill()
    head.wait()
    eventually(lambda: not any(process._state_of(pid) not in ("", "Z") for pid in pids))
