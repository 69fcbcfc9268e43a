"""What runs on the nodes of a recipe beside Dask: layout, progress, the watch, and the start."""

from __future__ import annotations

import base64
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from mayfly_train.errors import BadInput
from mayfly_train.recipe import (
    book,
    names,
    node_head,
    node_watch,
    node_worker,
    shape,
    tls,
    utilisation,
)
from mayfly_train.recipe.document import Experiment, Hardware, Parameter, Recipe
from mayfly_train.recipe.engine import Member
from mayfly_train.recipe.ledger import Ledger
from mayfly_train.recipe.lock import Lease
from mayfly_train.recipe.progress import Progress, nodes, slots_left
from mayfly_train.recipe.store import DirectoryStore, read_json, to_bytes
from mayfly_train.s3 import S3UserError
from unit.recipe_fakes import Lab, python


def recipe(*hardware: Hardware) -> Recipe:
    return Recipe(
        "r", tuple(Experiment(f"e{n}", ("true",), hardware=h) for n, h in enumerate(hardware))
    )


def test_plain_tasks_have_a_process_each():
    assert shape.layout(recipe(Hardware()), 4, 0) == shape.Layout(4, 1)


def test_large_tasks_share_one_process():
    assert shape.layout(recipe(Hardware(), Hardware(cpus=2)), 4, 0) == shape.Layout(1, 4)


def test_each_gpu_has_a_process():
    gpus = recipe(Hardware(gpus=1))
    assert shape.layout(gpus, 8, 2) == shape.Layout(2, 1, devices=True)
    assert shape.layout(gpus, 8, 0) == shape.Layout(1, 8), "it waits there, and says for what"


def test_a_workers_name_tells_its_node():
    name = f"{shape.worker_name('worker-1', 0)}-a1b2c3"
    assert shape.node_of(name) == "worker-1"
    assert shape.node_of("worker-0-a1b2c3") == "worker-0"


def test_slots_and_tasks_are_counted_by_node():
    members = [Member(f"worker-1.{n}-abc", 1, 1, 0, 0) for n in range(2)]
    found = nodes(members, {"worker-1.0-abc": 1})
    assert found == {"worker-1": {"slots": 2, "running": 1}}


def experiment(name: str, state: str, tasks: int | None, **states: int) -> dict[str, Any]:
    return {"name": name, "state": state, "tasks": tasks, "message": "", "states": states}


def test_what_is_left_counts_each_experiment_up_to_its_workers():
    files = (Parameter("f", "glob", pattern="*"),)
    many = Experiment("b", ("true {{f}}",), files)
    made = Recipe("r", (Experiment("a", ("true",), workers=3), many))
    members = [Member("n.0-a", 2, 2, 0, 0)]
    running = experiment("a", "running", 10, done=2, failed=1)
    waiting, done = experiment("b", "waiting", None), experiment("a", "done", 10, done=10)
    assert slots_left(made, [running, waiting], members) == {"a": 3, "b": 2}
    assert slots_left(made, [done, running], members) == {"a": 3}
    last = experiment("b", "running", 10, done=9)
    assert slots_left(made, [experiment("a", "skipped", None), last], members) == {"b": 1}


def test_what_comes_later_counts_when_its_number_is_known():
    number = (Parameter("n", "integers", low=1, high=9),)
    made = Recipe("r", (Experiment("a", ("true",)), Experiment("b", ("true {{n}}",), number)))
    both = [experiment("a", "running", 1, running=1), experiment("b", "waiting", None)]
    assert slots_left(made, both, [Member("n.0-a", 4, 4, 0, 0)]) == {"a": 1, "b": 9}


def test_a_task_on_several_nodes_leaves_as_much_as_it_takes(tmp_path: Path):
    wanted = Hardware(nodes=4)
    made = Recipe("r", (Experiment("a", ("true",), hardware=wanted), Experiment("b", ("true",))))
    both = [experiment("a", "running", 1, running=1), experiment("b", "running", 3)]
    assert slots_left(made, both) == {"a": 4, "b": 3}
    store = DirectoryStore(tmp_path / "store")
    Progress(made, store, Ledger(tmp_path / "ledger.sqlite"), lambda: []).show(both)
    found = read_json(store, names.PROGRESS)
    assert (found["left"], found["together"]) == (7, 4)


def test_progress_is_written_when_it_changes_and_now_and_then(tmp_path: Path):
    made = Recipe("r", (Experiment("a", ("true",)),))
    store, now = DirectoryStore(tmp_path / "store"), [0.0]
    ledger = Ledger(tmp_path / "ledger.sqlite")
    progress = Progress(made, store, ledger, lambda: [], clock=lambda: now[0])
    progress.show([experiment("a", "running", 3)])
    first = read_json(store, names.PROGRESS)
    assert (first["left"], first["nodes"]) == (3, {})
    now[0] = 5
    progress.show([experiment("a", "running", 3)])
    assert read_json(store, names.PROGRESS) == first
    now[0] = 15
    time.sleep(0.01)
    progress.show([experiment("a", "running", 3)])
    assert read_json(store, names.PROGRESS)["time"] > first["time"]


# --- the worker's start ---


def test_a_worker_finds_only_a_head_that_answers(tmp_path: Path):
    store = DirectoryStore(tmp_path)
    assert node_worker.reachable(store) == ""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"tls://127.0.0.1:{server.getsockname()[1]}"
        store.write(names.SCHEDULER, to_bytes({"address": address}))
        assert node_worker.reachable(store) == address
    assert node_worker.reachable(store) == "", "an address of a head that is gone"


def arguments(*more: str) -> Any:
    given = ["--store", "s", "--host", "127.0.0.1", "--tls", "t", "--scratch", "d", "--node", "n"]
    return node_worker._parser().parse_args([*given, *more])


def test_workers_of_a_node_share_its_memory():
    words = node_worker.words(arguments("--processes", "4"), "tls://h:1", 8, 16 << 30)
    assert words[words.index("--memory") + 1] == str(4 << 30)
    assert words[words.index("--cpus") + 1] == "1"
    assert "--device" not in words


def test_a_worker_with_a_gpu_has_its_share_of_the_cores():
    args = arguments("--processes", "2", "--number", "1", "--devices")
    words = node_worker.words(args, "tls://h:1", 8, 16 << 30)
    assert words[words.index("--cpus") + 1] == "4.0"
    assert words[words.index("--device") + 1] == "1"


def test_a_worker_whose_run_has_ended_does_not_begin(tmp_path: Path):
    store = DirectoryStore(tmp_path)
    store.write(names.ENDED, b"{}")
    signs = tmp_path / "signs"
    signs.mkdir()
    given = ["--store", str(tmp_path), "--host", "127.0.0.1", "--tls", "t", "--scratch", "d"]
    assert node_worker.main([*given, "--node", "n", "--signs", str(signs)]) == node_worker.OVER
    assert [sign.name for sign in signs.iterdir()] == ["ended"], "it is not to be started again"


# --- the head ---


def head_words(tmp_path: Path) -> list[str]:
    (tmp_path / "signs").mkdir()
    given = {"--store": "s", "--tls": "tls", "--state": "state", "--signs": "signs"}
    paths = [word for option, name in given.items() for word in (option, str(tmp_path / name))]
    return ["--host", "127.0.0.1", *paths]


def test_a_head_without_a_run_says_so_in_the_store(tmp_path: Path, capsys: Any):
    words = head_words(tmp_path)
    assert node_head.main(words) == 2
    assert [sign.name for sign in (tmp_path / "signs").iterdir()] == ["ended"]
    ended = read_json(DirectoryStore(tmp_path / "s"), names.ENDED)
    assert ended["outcome"] == "failed" and "there is no run" in ended["message"]
    assert "there is no run" in capsys.readouterr().err


def test_a_run_that_was_cancelled_before_its_head_began_ends(tmp_path: Path):
    store = DirectoryStore(tmp_path / "s")
    store.write(names.CANCEL, b"{}")
    assert node_head.main(head_words(tmp_path)) == 0
    assert read_json(store, names.ENDED)["outcome"] == "cancelled"


def test_a_head_that_is_one_too_many_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    """Another one works on it: systemd starts this one again, until the run has ended."""
    monkeypatch.setattr(node_head, "FREE_S", 0.0)
    store = DirectoryStore(tmp_path / "s")
    Lease(store).take()
    words = head_words(tmp_path)
    assert node_head.main(words) == 1
    assert "another head works on" in capsys.readouterr().err
    assert store.read(names.ENDED) is None and list((tmp_path / "signs").iterdir()) == []
    ended = to_bytes({"outcome": "succeeded"})
    store.write(names.ENDED, ended)
    assert node_head.main(words) == 0
    assert store.read(names.ENDED) == ended
    assert [sign.name for sign in (tmp_path / "signs").iterdir()] == ["ended"]


def test_keys_that_are_refused_for_now_end_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refused(*_: Any) -> None:
        raise S3UserError("S3 access denied — check the keys")

    monkeypatch.setattr(node_head, "_work", refused)
    assert node_head.main(head_words(tmp_path)) == 1
    assert DirectoryStore(tmp_path / "s").read(names.ENDED) is None


def test_globs_look_into_the_source_that_the_store_has(tmp_path: Path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "a.txt").write_text("a")
    lab = Lab(tmp_path)
    task = Experiment("e", ("cat {{f}}",), (Parameter("f", "glob", pattern="*.txt"),))
    run = lab.run(task, source=source)
    kept = {"recipe": run.recipe.to_json(), "source": run.source}
    run.store.write(names.RUN, to_bytes(kept))
    (source / "b.txt").write_text("later, and not packed")
    found = book.open_run(run.store, tmp_path / "elsewhere")
    assert found.find("*.txt") == ["a.txt"]
    with pytest.raises(BadInput, match="there is no run"):
        book.open_run(DirectoryStore(tmp_path / "empty"), tmp_path / "elsewhere")


# --- the watch ---


def test_a_node_tells_the_dead_man_whether_its_run_goes_on(tmp_path: Path):
    store, signs = DirectoryStore(tmp_path / "store"), tmp_path / "signs"
    signs.mkdir()
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/journal").write_bytes(b"")
    watch = node_watch.Watch("n", "s", tmp_path / "logs", signs, store)
    assert not watch.look()
    assert list(signs.iterdir()) == [], "no head has said anything"
    store.write(names.HEAD, to_bytes({"beat": 1}))
    assert not watch.look()
    (signs / "alive").unlink()
    assert not watch.look()
    assert list(signs.iterdir()) == [], "the head has not renewed its lease since"
    store.write(names.HEAD, to_bytes({"beat": 2}))
    assert not watch.look()
    assert (signs / "alive").exists()
    store.write(names.ENDED, b"{}")
    assert watch.look()
    assert (signs / "ended").exists()


def test_samples_and_the_journal_are_shipped_in_pieces(tmp_path: Path):
    store = DirectoryStore(tmp_path / "store")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/journal").write_bytes(b"one\n")
    watch = node_watch.Watch("worker-1", "s1", tmp_path / "logs", tmp_path, store)
    watch.take_sample()
    watch.ship()
    watch.take_sample()
    stop = threading.Event()
    stop.set()
    watch.run(stop)
    pieces = store.names(names.node_log("worker-1", "s1", "utilisation"))
    lines = b"".join(store.read(piece) or b"" for piece in pieces).splitlines()
    assert len(pieces) == 2 and len(lines) == 3
    assert 0 < json.loads(lines[0])["memory_bytes"] < json.loads(lines[0])["memory_total_bytes"]
    assert store.read(f"{names.node_log('worker-1', 's1', 'journal')}000001") == b"one\n"


def test_gpus_are_read_from_the_drivers_table():
    found = utilisation.read_gpus("0, 97, 10240, 81559\n1, [N/A], 0, 81559\n")
    assert found == [
        {
            "index": 0,
            "percent": 97.0,
            "memory_bytes": 10240 << 20,
            "memory_total_bytes": 81559 << 20,
        }
    ]


def test_the_engines_keys_fit_on_one_line_of_radl():
    line = tls.bundle("r")
    assert "\n" not in line and not set("'\"@{") & set(line)
    assert set(json.loads(base64.b64decode(line))) == {tls.CA, tls.CERTIFICATE, tls.KEY}


def test_a_frameworks_python_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MAYFLY_PATH", "/opt/mayfly/runtime/bin")
    first, own, *_ = Lab(tmp_path).node().environment[b"PATH"].split(b":")
    assert first == b"/opt/mayfly/runtime/bin" and own.endswith(b"/bin")
    monkeypatch.delenv("MAYFLY_PATH")
    assert Lab(tmp_path).node().environment[b"PATH"].split(b":")[0] == own
    assert not [name for name in Lab(tmp_path).node().environment if name.startswith(b"MAYFLY")]
    assert os.environ.get("MAYFLY_PATH") is None


# --- the processes themselves, which have nothing in common but the store ---


def start(module: str, *more: str, on: Path) -> subprocess.Popen[bytes]:
    words = ["--store", str(on / "store"), "--host", "127.0.0.1", "--tls", str(on / "tls"), *more]
    words += ["--signs", str(on)]
    command = [sys.executable, "-m", f"mayfly_train.recipe.{module}", *words]
    with (on / f"{module}.log").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)


def test_head_and_worker_meet_in_the_store_and_a_killed_head_comes_again(tmp_path: Path):
    lab = Lab(tmp_path)
    number = Parameter("number", "integers", low=0, high=11)
    work = python("import sys, time; time.sleep(0.3); print(sys.argv[1])")
    run = lab.run(Experiment("e", (f"{work} {{{{number}}}}",), (number,)))
    run.store.write(names.RUN, to_bytes({"recipe": run.recipe.to_json(), "source": ""}))
    assert run.store.address == str(tmp_path / "store")
    tls.make(tmp_path / "tls", "r")
    state = ("--state", str(tmp_path / "state"))
    node = ("--scratch", str(tmp_path / "scratch"), "--node", "worker-1", "--slots", "2")
    worker = start("node_worker", *node, on=tmp_path)
    head = start("node_head", *state, on=tmp_path)
    try:
        deadline = time.monotonic() + 90
        while len(run.store.names(names.DONE)) < 3 and time.monotonic() < deadline:
            time.sleep(0.1)
        os.killpg(head.pid, signal.SIGKILL)
        head.wait()
        before = set(run.store.names(names.DONE))
        assert 3 <= len(before) < 12, (tmp_path / "node_head.log").read_text()
        head = start("node_head", *state, on=tmp_path)
        assert worker.wait(60) == 0, "it has lost its head, and is to be started again"
        worker = start("node_worker", *node, on=tmp_path)
        assert head.wait(90) == 0, (tmp_path / "node_head.log").read_text()
        assert worker.wait(60) == 0
        worker = start("node_worker", *node, on=tmp_path)
        assert worker.wait(60) == node_worker.OVER
    finally:
        for each in (head, worker):
            if each.poll() is None:
                os.killpg(each.pid, signal.SIGKILL)
                each.wait()
    assert read_json(run.store, names.ENDED)["outcome"] == "succeeded"
    assert len(run.store.names(names.DONE)) == 12
    markers = [read_json(run.store, name) for name in run.store.names(names.DONE)]
    assert all(shape.node_of(marker["node"]) == "worker-1" for marker in markers)
    assert read_json(run.store, names.PROGRESS)["left"] == 0
    assert Ledger(tmp_path / "state/ledger.sqlite").states("e") == {"done": 12}
