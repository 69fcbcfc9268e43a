"""Runs from the command line's side: begin, refuse, look at, interrupt, go on elsewhere."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from mayfly.cli import app
from mayfly.errors import UserError
from mayfly.recipe import look, node_commands, runs
from mayfly.recipe.execute import execute
from mayfly.recipe.load import load
from mayfly.recipe.views import results_view
from mayfly_train.errors import BadInput
from mayfly_train.recipe import book, identity, lock, names
from mayfly_train.recipe.engine import InProcessEngine
from mayfly_train.recipe.expand import Context, Expansion, Task
from mayfly_train.recipe.head import Head
from mayfly_train.recipe.ledger import Ledger
from mayfly_train.recipe.lock import Lease
from unit.recipe_fakes import Lab

PATIENCE_S = 300.0
ROOT = Path(__file__).resolve().parents[2]
RECIPE = """\
name: search
experiments:
  train:
    command: sh train.sh {{x}} {{name}}
    parameters: {x: [1, 3, 2], name: [a]}
    search: {objective: acc}
"""
SCRIPT = """\
echo "{\\"acc\\": $1, \\"note\\": \\"$2\\"}"
echo careful >&2
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a recipe and its source, and a state directory of its own."""
    monkeypatch.setenv("MAYFLY_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.delenv("MAYFLY_BUCKET", raising=False)
    source = tmp_path / "source"
    source.mkdir()
    (source / "recipe.yml").write_text(RECIPE)
    (source / "train.sh").write_text(SCRIPT)
    return source


def begin(folder: Path) -> tuple[Any, runs.Place]:
    place = runs.find_place("search", str(folder.parent / "store"))
    return runs.create(load(folder / "recipe.yml"), place), place


def worked(folder: Path) -> tuple[Any, runs.Place, Any]:
    """A run that was worked on to its end."""
    run, place = begin(folder)
    lab = Lab(folder.parent)
    lab.store = place.store
    engine, ledger = InProcessEngine(lab.node()), book.open_to_work(place.store, place.state)
    Head(run, ledger, engine).work()
    engine.close()
    return run, place, ledger


def test_a_second_run_of_one_name_is_refused(folder: Path):
    begin(folder)
    with pytest.raises(UserError, match="there is a run 'search' .* resume search"):
        begin(folder)


def test_a_changed_recipe_is_refused_with_what_differs(folder: Path):
    _, place = begin(folder)
    (folder / "recipe.yml").write_text(RECIPE.replace("[1, 3, 2]", "[1, 3]"))
    with pytest.raises(UserError) as caught:
        runs.reopen(place, folder / "recipe.yml")
    assert "- parameters: {x: [1, 3, 2]" in str(caught.value)
    assert "+ parameters: {x: [1, 3]," in str(caught.value)


def test_a_comment_is_no_change_but_another_source_is(folder: Path):
    _, place = begin(folder)
    runs.reopen(place, folder / "recipe.yml")
    (folder / "train.sh").write_text("exit 0\n")
    with pytest.raises(UserError, match="the source of 'search' was changed"):
        runs.reopen(place, folder / "recipe.yml")


def test_an_unknown_run_names_the_nearest(folder: Path):
    _, place = begin(folder)
    book.open_to_work(place.store, place.state)
    with pytest.raises(UserError, match="unknown run: 'serch'.*did you mean 'search'"):
        runs.reopen(runs.find_place("serch", str(folder.parent / "store")))


def test_the_latest_run_is_the_one_worked_on_last(folder: Path):
    with pytest.raises(UserError, match="no recipe was run here"):
        runs.latest()
    worked(folder)
    assert runs.latest() == "search"


@pytest.mark.parametrize(
    ("given", "address"),
    [("bench-runs", "s3://bench-runs"), ("s3://b-1/x/", "s3://b-1/x"), ("/mnt/x", "/mnt/x")],
)
def test_ways_to_name_a_store(given: str, address: str):
    assert runs.base_address(given, {}) == address


def test_a_store_that_is_none(folder: Path):
    with pytest.raises(UserError, match="no place for runs"):
        runs.base_address("Not A Bucket", {})


def test_results_are_best_first_and_complete(folder: Path):
    run, place, ledger = worked(folder)
    (found,) = look.results(run, place, ledger, None)["experiments"]
    assert [task["value"] for task in found["tasks"]] == [3, 2, 1]
    best = found["tasks"][0]
    assert best["task"] == "train/000001"
    assert best["parameters"] == {"x": 3, "name": "a"}
    assert best["results"] == {"acc": 3, "note": "a"}
    assert found["node_seconds"] >= sum(task["seconds"] for task in found["tasks"]) - 0.01
    with pytest.raises(UserError, match="unknown experiment: 'trian'"):
        look.results(run, place, ledger, "trian")


def test_results_as_a_table(folder: Path):
    run, place, ledger = worked(folder)
    header, first, *_ = look.as_csv(look.results(run, place, ledger, None)).splitlines()
    row = dict(zip(header.split(","), first.split(","), strict=True))
    assert (row["x"], row["result.acc"], row["result.note"]) == ("3", "3", "a")


@pytest.mark.parametrize(
    ("lines", "told"), [("echo no such file >&2\nexit 3\n", True), ("", False)]
)
def test_results_say_why_tasks_failed(folder: Path, lines: str, told: bool):
    (folder / "train.sh").write_text(lines)
    run, place, ledger = worked(folder)
    shown = Console(width=200, record=True, file=io.StringIO())
    shown.print(results_view(look.results(run, place, ledger, None), 10))
    text = shown.export_text()
    assert ("WHY" in text, "exit code 3: no such file" in text) == (told, told)
    message = ledger.experiments()[0]["message"]
    assert (message == "3 of 3 tasks failed, train/000000: exit code 3: no such file") is told


def test_status_says_how_it_ended(folder: Path):
    run, place, ledger = worked(folder)
    document = look.status(run, place, ledger)
    assert document["state"] == "succeeded"
    assert document["experiments"][0]["states"] == {"done": 3}


def test_a_run_that_nobody_works_on_was_interrupted(folder: Path):
    run, place = begin(folder)
    assert look.status(run, place, runs.read_ledger(place))["state"] == "interrupted"
    place.store.write(names.CANCEL, b"{}")
    assert look.status(run, place, runs.read_ledger(place))["state"] == "cancelled"


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_logs_of_a_task(folder: Path, stream: str):
    run, place, ledger = worked(folder)
    text = b"".join(look.log(look.find_task("train/2", run), stream, place, ledger, False))
    assert text == {"stdout": b'{"acc": 2, "note": "a"}\n', "stderr": b"careful\n"}[stream]


def test_logs_are_a_document_too(folder: Path):
    _, place, _ = worked(folder)
    words = ["recipe", "logs", "train/2", "--stderr", "--store", str(folder.parent / "store")]
    done = CliRunner().invoke(app, [*words, "--json"])
    document = {"run": place.name, "task": "train/2", "node": None, "kind": "application"}
    assert json.loads(done.output) == {**document, "lines": ["careful"]}


def test_following_goes_on_until_the_end(folder: Path, monkeypatch: pytest.MonkeyPatch):
    run, place = begin(folder)
    ledger = runs.read_ledger(place)
    prefix = "logs/train/000000/a-1/stdout/"
    happened = [
        lambda: place.store.write(f"{prefix}000001", b"one\n"),
        lambda: place.store.write(f"{prefix}000002", b"two\n"),
        lambda: place.store.write(f"{prefix}000003", b"three\n"),
        lambda: place.store.write("done/train/000000.json", b'{"attempt": "a-1"}'),
    ]
    monkeypatch.setattr(look, "pause", lambda _: happened.pop(0)())
    assert b"".join(look.log(("train", 0), "stdout", place, ledger, True)) == b"one\ntwo\nthree\n"
    assert happened == []


def test_following_goes_over_to_the_attempt_after_a_lost_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    """The ledger's copy is of the time at which following began; names are random."""
    run, place = begin(folder)
    ledger = book.open_to_work(place.store, place.state)
    ledger.submit(find_tasks(run)[0], "a-7")
    ledger.start("a-7", "node-0")
    logs = "logs/train/000000"
    place.store.write(f"{logs}/a-7/stdout/000001", b"lost\n")
    happened = [
        lambda: place.store.write(f"{logs}/a-3/stdout/000001", b"again\n"),
        lambda: place.store.write("attempts/train/000000/a-7.json", b"{}"),
        lambda: place.store.write(f"{logs}/a-5/stdout/000001", b"accepted\n"),
        lambda: place.store.write("done/train/000000.json", b'{"attempt": "a-5"}'),
    ]
    monkeypatch.setattr(look, "pause", lambda _: happened.pop(0)())
    text = b"".join(look.log(("train", 0), "stdout", place, ledger, True))
    assert text == b"lost\nagain\naccepted\n"
    place.store.write(f"{logs}/a-9/stdout/000001", b"late\n")
    (shown,) = look.log(("train", 0), "stdout", place, ledger, False)
    assert shown == b"accepted\n"


def find_tasks(run: Any) -> list[Task]:
    (experiment,) = run.recipe.experiments
    return list(Expansion(experiment, Context("data", {}, {})).tasks())


def test_a_task_that_has_not_begun(folder: Path):
    run, place = begin(folder)
    with pytest.raises(UserError, match="train/000009 has not begun"):
        list(look.log(("train", 9), "stdout", place, runs.read_ledger(place), False))


@pytest.mark.parametrize("text", ["train", "train/x", "other/1"])
def test_what_is_no_task(folder: Path, text: str):
    run, _ = begin(folder)
    with pytest.raises(UserError):
        look.find_task(text, run)


@contextlib.contextmanager
def mayfly(*words: str, state: Path) -> Iterator[subprocess.Popen[str]]:
    """The command line in a process of its own, with the real engine."""
    path = os.pathsep.join(str(ROOT / part) for part in ("scripts", "training"))
    environment = {**os.environ, "PYTHONPATH": path, "MAYFLY_STATE_DIR": str(state)}
    code = "import sys; from mayfly.entry import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "recipe", *words],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


SLOW = """\
experiments:
  slow:
    command: sh -c 'echo $0 >> FOLDER/began; sleep 0.4; echo $0 >> FOLDER/ended' {{n}}
    parameters: {n: {range: 0-11}}
"""


def wait_for_lines(path: Path, count: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not (path.exists() and len(path.read_text().split()) >= count):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)


def test_ctrl_c_and_go_on_elsewhere_with_the_store_alone(folder: Path, tmp_path: Path):
    """The whole way, on real processes: finished tasks do not run again on the second machine."""
    (folder / "slow.yml").write_text(SLOW.replace("FOLDER", str(tmp_path)))
    store = ("--store", str(tmp_path / "store"))
    options = (*store, "--workers", "2")
    with mayfly("run", str(folder / "slow.yml"), *options, state=tmp_path / "one") as first:
        wait_for_lines(tmp_path / "ended", 4, first)
        first.send_signal(signal.SIGINT)
        _, said = first.communicate(timeout=PATIENCE_S)
    assert first.returncode == 130
    assert "go on with: mayfly recipe resume slow" in said
    finished = {int(path.stem) for path in (tmp_path / "store/recipes/slow/done/slow").iterdir()}
    assert 4 <= len(finished) < 12
    with mayfly("resume", "slow", *options, "--json", state=tmp_path / "two") as again:
        out, said = again.communicate(timeout=PATIENCE_S)
    assert again.returncode == 0, said
    assert json.loads(out)["outcome"] == "succeeded"
    began = [int(word) for word in (tmp_path / "began").read_text().split()]
    assert set(began) == set(range(12))
    assert all(began.count(number) == 1 for number in finished)


def test_runs_of_one_name_in_two_stores_are_two(folder: Path):
    _, place, ledger = worked(folder)
    ledger.close()
    other = runs.find_place("search", str(folder.parent / "elsewhere"))
    runs.create(load(folder / "recipe.yml"), other)
    assert other.state != place.state
    assert runs.read_ledger(other).experiments() == []


def test_a_ledger_of_a_removed_run_is_not_taken_for_the_new_one(folder: Path):
    _, place, ledger = worked(folder)
    ledger.close()
    shutil.rmtree(folder.parent / "store")
    begin(folder)
    assert runs.read_ledger(place).experiments() == []
    assert book.open_to_work(place.store, place.state).experiments() == []


def test_a_run_that_is_worked_on_is_left_alone(folder: Path):
    run, place = begin(folder)
    Lease(place.store).take()
    place.store.write(names.CANCEL, b"{}")
    with pytest.raises(BadInput, match="is run by process"):
        execute(run, place, 1)
    assert place.store.read(names.CANCEL) == b"{}"
    assert not (place.state / "machine").exists()


@pytest.mark.parametrize(
    ("hardware", "why"),
    [
        ("cpus: 4096", "waits for a node with 4096 cores: the largest has"),
        ("memory: 900000G", "GiB of memory: the largest has"),
        ("gpus: 1", "waits for a node with 1 GPUs: the largest has 0"),
        ("nodes: 3", "waits for 3 nodes at once: there is room on 2"),
    ],
)
def test_what_this_machine_will_never_have_is_refused(folder: Path, hardware: str, why: str):
    (folder / "large.yml").write_text(
        f"experiments: {{large: {{command: 'true', hardware: {{{hardware}}}}}}}\n"
    )
    options = ("--store", str(folder / "store"), "--workers", "2")
    with mayfly("run", str(folder / "large.yml"), *options, state=folder / "one") as asked:
        _, said = asked.communicate(timeout=PATIENCE_S)
    assert asked.returncode == 2
    assert why in said and "--cloud" in said and len(said.splitlines()) == 1, said


GPUS = """\
experiments:
  gpu:
    command: sh alone.sh FOLDER {{n}}
    parameters: {n: {range: 0-5}}
    hardware: {gpus: 1}
    retries: {task: 0}
"""
ALONE = """\
cd $1
mkdir $CUDA_VISIBLE_DEVICES || exit 1
sleep 0.3
mv $CUDA_VISIBLE_DEVICES $2-on-$CUDA_VISIBLE_DEVICES
"""


def test_each_gpu_is_given_to_one_task_at_a_time(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Two GPUs that a stand-in for the driver's program lists; a second task on one would fail."""
    fake_driver, ran = tmp_path / "bin/nvidia-smi", tmp_path / "ran"
    for path in (fake_driver.parent, ran):
        path.mkdir()
    fake_driver.write_text("#!/bin/sh\necho 'GPU 0: a fake'\necho 'GPU 1: a fake'\n")
    fake_driver.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake_driver.parent}{os.pathsep}{os.environ['PATH']}")
    (folder / "alone.sh").write_text(ALONE)
    (folder / "gpu.yml").write_text(GPUS.replace("FOLDER", str(ran)))
    options = ("--store", str(tmp_path / "store"), "--json")
    with mayfly("run", str(folder / "gpu.yml"), *options, state=tmp_path / "one") as asked:
        out, said = asked.communicate(timeout=PATIENCE_S)
    assert asked.returncode == 0, said
    assert json.loads(out)["outcome"] == "succeeded"
    places = [path.name.split("-on-") for path in ran.iterdir()]
    assert sorted(number for number, _ in places) == list("012345")
    assert {device for _, device in places} == {"0", "1"}


def test_what_failed_elsewhere_runs_again_here(folder: Path, tmp_path: Path):
    """On another machine with the store alone: nothing is fetched over what was forgiven."""
    (folder / "bad.yml").write_text(
        f"experiments: {{bad: {{command: test -e {tmp_path}/fixed, retries: {{task: 0}}}}}}\n"
    )
    options = ("--store", str(tmp_path / "store"), "--workers", "1")
    with mayfly("run", str(folder / "bad.yml"), *options, state=tmp_path / "one") as first:
        first.communicate(timeout=PATIENCE_S)
    assert first.returncode == 1
    head = tmp_path / "store/recipes/bad/head.json"
    head.write_text(json.dumps({**json.loads(head.read_text()), "id": "elsewhere"}))
    (tmp_path / "fixed").touch()
    words = ("rerun", "bad", "--failed", *options)
    with mayfly(*words, state=tmp_path / "two") as again:
        _, said = again.communicate(timeout=PATIENCE_S)
    assert again.returncode == 0, said
    assert "1 tasks run again" in said


def test_following_ends_when_nobody_works_on_the_run(folder: Path, monkeypatch: pytest.MonkeyPatch):
    _, place = begin(folder)
    place.store.write("logs/train/000000/a-1/stdout/000001", b"one\n")
    lease = Lease(place.store)
    lease.take()
    paused: list[float] = []

    def pause(seconds: float) -> None:
        paused.append(seconds)
        if len(paused) == 30:
            lease.release()
        assert len(paused) < 99

    monkeypatch.setattr(look, "pause", pause)
    said = []
    with pytest.raises(UserError, match="train/000000 has not ended.*recipe resume search"):
        said += look.log(("train", 0), "stdout", place, runs.read_ledger(place), True)
    assert len(paused) == 30 + look.ALONE - 1


@pytest.mark.parametrize(
    ("changed", "alive"),
    [
        ({}, True),
        ({"host": "another name"}, True),
        ({"process": "{pid} 1 {space}"}, False),
        ({"process": "{pid} {start} another-boot.1"}, True),
        ({"process": "{pid} {start} another-boot.1", "beat": 1.0}, True),
        ({"process": "{pid} {start} another-boot.1", "beat": 0}, False),
    ],
)
def test_a_head_is_known_by_boot_and_process_not_by_its_hosts_name(
    folder: Path, changed: dict[str, Any], alive: bool
):
    """Of a head elsewhere, or in an earlier boot, only the age of its last word is known; what its
    clock said then does not matter."""
    _, place = begin(folder)
    Lease(place.store).take()
    pid, start, space = identity.own().split()
    held = {**json.loads(place.store.read(names.HEAD) or b""), **changed}
    held["process"] = held["process"].format(pid=pid, start=start, space=space)
    place.store.write(names.HEAD, json.dumps(held).encode())
    assert lock.is_held(place.store) == alive
    if "another-boot" in held["process"]:
        file = folder.parent / "store/recipes/search" / names.HEAD
        os.utime(file, (0, file.stat().st_mtime - lock.STALE_S))
        assert not lock.is_held(place.store)


def test_a_clock_that_is_wrong_here_makes_no_head_dead(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    _, place = begin(folder)
    lease = Lease(place.store)
    lease.take()
    monkeypatch.setattr(identity, "space", lambda: "another-boot.1")
    now = time.time() + 3600
    monkeypatch.setattr(time, "time", lambda: now)
    with pytest.raises(BadInput, match="is run by process"):
        lock.require_free(place.store)
    lease.release()
    lock.require_free(place.store)


def test_a_lease_is_kept_while_its_head_is_busy_but_not_when_it_is_stuck(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    _, place = begin(folder)
    lease = Lease(place.store)
    lease.take()
    monkeypatch.setattr(lock, "EVERY_S", 0.0)
    monkeypatch.setattr(lock, "_LOOK_S", 0.01)

    def beat() -> Any:
        return json.loads(place.store.read(names.HEAD) or b"")["beat"]

    first, deadline = beat(), time.monotonic() + PATIENCE_S
    with lease.kept():
        while beat() == first:
            assert time.monotonic() < deadline
    monkeypatch.setattr(lock, "STUCK_S", 0.0)
    stuck = Lease(place.store)
    lease.release()
    stuck.take()
    before = beat()
    stuck.keep()
    assert beat() == before
    stuck.renew()
    assert beat() != before
    stuck.release()
    stuck.renew()
    assert beat() == 0, "nobody renews what was let go"


def test_a_machine_of_the_same_name_takes_the_newer_ledger(folder: Path, tmp_path: Path):
    """Which machine worked on a run last is no matter of its name."""
    _, place, ledger = worked(folder)
    ledger.close()
    assert runs.read_ledger(place).states("train") == {"done": 3}
    head = json.loads(place.store.read(names.HEAD) or b"")
    place.store.write(names.HEAD, json.dumps({**head, "id": "of another machine"}).encode())
    Ledger(tmp_path / "theirs.sqlite").close()
    place.store.upload(names.LEDGER, tmp_path / "theirs.sqlite")
    assert runs.read_ledger(place).states("train") == {}
    assert book.open_to_work(place.store, place.state).states("train") == {}


def of_another_machine(place: runs.Place) -> None:
    """The run was worked on elsewhere since: its head, and the ledger's copy."""
    head = json.loads(place.store.read(names.HEAD) or b"")
    place.store.write(names.HEAD, json.dumps({**head, "id": "of another machine"}).encode())


def test_looking_at_a_run_leaves_its_head_the_ledger(folder: Path):
    """`resume` has the copy of another machine's ledger, and its head begins: whoever looks just
    then, and thereafter, changes nothing and sees what the head writes."""
    _, place, ledger = worked(folder)
    ledger.close()
    of_another_machine(place)
    early = runs.read_ledger(place)
    ours = book.open_to_work(place.store, place.state)
    files = sorted(path.name for path in place.state.iterdir())
    lease = Lease(place.store)
    lease.take()
    assert runs.read_ledger(place).states("train") == {"done": 3}
    assert runs.read_ledger(place).states("train") == {"done": 3}, "two at a time"
    assert sorted(path.name for path in place.state.iterdir()) == files
    ours.worked_by(lease.id)
    ours.set_experiment("train", "running", message="by the new head")
    early.close()
    late = runs.read_ledger(place)
    assert late.experiments()[0]["message"] == "by the new head"
    ours.set_experiment("train", "done", message="at its end")
    assert late.experiments()[0]["message"] == "at its end"
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        late.set_experiment("train", "failed")


def test_one_process_of_a_machine_works_on_a_run(folder: Path):
    """A second one would make the certificates anew that workers of the first still read."""
    run, place = begin(folder)
    with runs.worked_on(place):
        with pytest.raises(UserError, match="run search is at work.*`mayfly recipe status search`"):
            execute(run, place, 1)
        with pytest.raises(UserError, match="run search is at work"):
            node_commands.forgive(place)
        assert not (place.state / "machine").exists()
        assert runs.read_ledger(place).experiments() == []


def test_relative_globs_are_of_the_source_on_any_machine(folder: Path):
    (folder / "in").mkdir()
    for name in ("a", "b", ".hidden"):
        (folder / "in" / name).write_text(name)
    (folder / "recipe.yml").write_text(
        "name: search\ncommand: cat {{file}}\nparameters: {file: {glob: 'in/*'}}\n"
    )
    _, place = begin(folder)
    shutil.rmtree(folder)
    lab = Lab(folder.parent)
    lab.store = place.store
    engine, ledger = InProcessEngine(lab.node()), book.open_to_work(place.store, place.state)
    assert Head(runs.reopen(place), ledger, engine).work() == "succeeded"
    engine.close()
    assert [row.task.parameters["file"] for row in ledger.rows("main")] == ["in/a", "in/b"]


def test_data_beside_the_recipe_is_found_by_tasks(folder: Path, monkeypatch: pytest.MonkeyPatch):
    (folder / "mine").mkdir()
    (folder / "mine/one").write_text("1")
    (folder / "recipe.yml").write_text(
        "name: search\ndata: ./mine\ncommand: cat {{file}} {{data}}/one\n"
        "parameters: {file: {glob: '{{data}}/*'}}\n"
    )
    monkeypatch.chdir(folder)
    loaded = load(Path("recipe.yml"))
    assert loaded.recipe.data == str(folder / "mine")
    monkeypatch.chdir(folder.parent)
    run, place, ledger = worked(folder)
    assert ledger.states("main") == {"done": 1}
    assert run.data == str(folder / "mine")


def test_a_difference_shows_no_password(folder: Path):
    text = RECIPE + "data: https://me:hunter22@host/data\n"
    (folder / "recipe.yml").write_text(text)
    _, place = begin(folder)
    (folder / "recipe.yml").write_text(text.replace("/data", "/other"))
    with pytest.raises(UserError) as caught:
        runs.reopen(place, folder / "recipe.yml")
    assert "https://…@host/other" in str(caught.value) and "hunter" not in str(caught.value)


def test_recipes_do_not_load_what_they_do_not_need(folder: Path):
    """A head that was killed is to be at work again soon: the rest takes a second of a core."""
    code = "import sys; from mayfly.entry import main; sys.argv[1:] = ['recipe', 'plan', 'none']"
    code += "\ntry: main()\nfinally: print(*sys.modules)"
    path = os.pathsep.join(str(ROOT / part) for part in ("scripts", "training"))
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2 and "cannot read the recipe none" in done.stderr
    loaded = set(done.stdout.split())
    assert "mayfly.recipe.commands" in loaded
    assert (
        loaded & {"mayfly.cli", "mayfly.services", "openstack", "distributed", "numpy", "optuna"}
        == set()
    )
