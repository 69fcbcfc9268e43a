"""Runs on nodes seen from the control side: where they lie, what their nodes have left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mayfly.clouds import load_cloud
from mayfly.errors import UserError
from mayfly.job import Job
from mayfly.recipe import (
    cluster,
    commands,
    node_commands,
    node_logs,
    node_place,
    on_nodes,
    runs,
)
from mayfly.recipe.node_commands import forgive
from mayfly.recipe.on_nodes import OnNodes, carrying
from mayfly.recipe.runs import Place
from mayfly.recipe.wanted import Wanted, as_before
from mayfly_train.recipe import book, names, tls
from mayfly_train.recipe.document import Experiment, Recipe
from mayfly_train.recipe.expand import Context, Expansion
from mayfly_train.recipe.head import Run
from mayfly_train.recipe.ledger import FAILED, Ledger
from mayfly_train.recipe.store import DirectoryStore
from mayfly_train.s3 import S3Settings

ENVIRON = {"MAYFLY_STATE_DIR": "/nonexistent"}


def place(tmp_path: Path, name: str = "search") -> Place:
    state = tmp_path / f"state/recipes/{name}/0123abcd"
    return Place(name, DirectoryStore(tmp_path / "store"), state)


def test_a_cloud_with_a_bucket_of_its_own_needs_none():
    assert node_place.bucket_of(load_cloud("local"), None, ENVIRON) == "s3://mayfly"
    given = node_place.bucket_of(load_cloud("local"), "s3://mine/team/", ENVIRON)
    assert given == "s3://mine/team"


def test_whoever_works_on_a_run_of_nodes_here_has_its_keys(tmp_path: Path):
    environ = {"MAYFLY_STATE_DIR": str(tmp_path)}
    settings = S3Settings("key", "secret", None, "http://127.0.0.1:1")
    found = runs.place_at("s3://bucket/recipes/search", "search", settings, environ)
    assert S3Settings.from_environ(found.environ) == settings
    assert runs.place_at(str(tmp_path), "search", None, environ).environ == {}


def test_nodes_see_no_directory_and_need_a_bucket():
    with pytest.raises(UserError, match="is a directory, and nodes see only S3"):
        node_place.bucket_of(load_cloud("local"), "/tmp/store", ENVIRON)
    with pytest.raises(UserError, match="cloud 'aws' has no default"):
        node_place.bucket_of(load_cloud("aws"), None, ENVIRON)


def test_this_machine_remembers_where_a_run_is(tmp_path: Path):
    environ = {"MAYFLY_STATE_DIR": str(tmp_path / "state")}
    assert node_place.noted("search", environ) is None
    node_place.note(place(tmp_path), "local", {"workers": 3})
    found = node_place.noted("search", environ)
    assert found == {"address": str(tmp_path / "store"), "cloud": "local", "workers": 3}
    assert node_place.noted("search", environ, "s3://elsewhere") is None
    assert runs.latest(environ) == "search", "it has no ledger here yet"


@pytest.mark.parametrize(
    ("given", "noted", "expected"),
    [
        (Wanted(None), None, None),
        (Wanted(None), {"cloud": "local", "workers": 3}, Wanted("local", 3)),
        (Wanted(None, 5), {"cloud": "local", "workers": 3}, Wanted("local", 5)),
        (Wanted("aws"), {"cloud": "local", "workers": 3}, Wanted("aws")),
        (Wanted("aws", yes=True), None, Wanted("aws", yes=True)),
        (
            Wanted(None),
            {"cloud": "aws", "region": "eu-west-1", "budget": "5 USD"},
            Wanted("aws", region="eu-west-1", budget="5 USD"),
        ),
    ],
)
def test_a_run_goes_on_as_before_unless_told_otherwise(given: Any, noted: Any, expected: Any):
    assert as_before(given, noted) == expected


def test_when_there_is_no_room_for_all_fewer_nodes_will_do(tmp_path: Path):
    recipe = Recipe("search", (Experiment("e", ("true",)),))
    options = cluster.Options("local", 20)
    spec = cluster.spec_of(recipe, "s3://bucket/recipes/search", options, {})
    following = OnNodes(cluster.Cluster(recipe, "s3://bucket/x"), DirectoryStore(tmp_path), 20)
    job = carrying(Job(spec, load_cloud("local")), following)
    assert [each.spec.count("worker") for each in job.others] == [10, 5, 2, 1]
    assert job.extras == ()
    assert not job.trains and all(not each.trains for each in job.others)
    (secret,) = {each.secrets[cluster.TLS].reveal() for each in (job, *job.others)}
    assert secret not in repr(job)


@pytest.mark.parametrize(("budget", "most"), [("5 USD", 2), (None, 20)])
def test_a_budget_is_not_spent_on_nodes_that_it_was_not_counted_for(budget: Any, most: int):
    """Only two of twenty were to be had."""
    recipe, said = Recipe("search", (Experiment("e", ("true",)),)), list[str]()
    options = cluster.Options("local", 2, budget=budget)
    made = Job(cluster.spec_of(recipe, "s3://bucket/r", options, {}), load_cloud("local"))
    assert on_nodes.affordable(20, made, said.append) == most
    assert bool(said) == bool(budget)


def with_a_failed_task(here: Place, state: str) -> Ledger:
    """The ledger of a run whose experiment is in this state, and whose only task has failed."""
    here.store.write(names.RUN, b"{}")
    (task,) = _tasks()
    ledger = book.open_to_work(here.store, here.state)
    ledger.set_experiment("e", state, 1)
    ledger.freeze([task])
    ledger.blame(task, "command", FAILED, {"message": "exit code 1"})
    return ledger


def test_failed_tasks_of_a_search_that_is_done_run_again_on_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    here, done = place(tmp_path), list[str]()
    ledger = with_a_failed_task(here, "done")
    run = Run(Recipe("search", (Experiment("e", ("true",)),)), "", here.store, lambda _: [])
    monkeypatch.setattr(node_place, "noted", lambda *_: {"cloud": "local", "address": "s3://b/r"})
    monkeypatch.setattr(node_place, "open_place", lambda *_: here)
    monkeypatch.setattr(runs, "reopen", lambda *_: run)
    for name in ("offer_at", "confirm", "work"):
        monkeypatch.setattr(node_commands, name, lambda *_, name=name: done.append(name))
    commands._go_on("search", None, Wanted(None), here=False, again=True)
    assert done == ["offer_at", "confirm", "work"]
    assert ledger.states("e") == {"waiting": 1}


def test_the_node_image_has_the_framework_of_a_recipe(tmp_path: Path):
    recipe = Recipe("search", (Experiment("e", ("true",)),), image="tensorflow-2.21")
    spec = cluster.spec_of(recipe, "s3://bucket/r", cluster.Options("local", 1), {})
    following = OnNodes(cluster.Cluster(recipe, "s3://bucket/r"), DirectoryStore(tmp_path), 1)
    assert carrying(Job(spec, load_cloud("local")), following).extras == ("tensorflow2",)


def test_failed_tasks_are_forgiven_where_the_next_head_reads(tmp_path: Path):
    here = place(tmp_path)
    with_a_failed_task(here, "failed")
    assert forgive(here) == 1
    copy = tmp_path / "copy.sqlite"
    here.store.download(names.LEDGER, copy)
    assert Ledger(copy).states("e") == {"waiting": 1}


def _tasks() -> Any:
    return [Expansion(Experiment("e", ("true",)), Context("data", {}, {})).task(0)]


# --- logs of nodes ---


def logs(store: DirectoryStore) -> None:
    sample = [{"time": 1000.0 + 5 * n, "cpu_percent": n} for n in range(4)]
    lines = [json.dumps(each).encode() + b"\n" for each in sample]
    for session, piece, data in (("s1", 1, lines[:2]), ("s2", 1, lines[2:3]), ("s2", 2, lines[3:])):
        name = f"{names.node_log('worker-1', session, 'utilisation')}{piece:06d}"
        store.write(name, b"".join(data))
    journal = b"1970-01-01T00:16:45+0000 worker-1 systemd[1]: one\n-- Boot --\n"
    store.write(f"{names.node_log('worker-1', 's1', 'journal')}000001", journal)


def test_a_nodes_log_is_read_in_order(tmp_path: Path):
    here = place(tmp_path)
    logs(here.store)  # type: ignore[arg-type]
    text = b"".join(node_logs.read("worker-1", "utilisation", here))
    assert [json.loads(line)["cpu_percent"] for line in text.splitlines()] == [0, 1, 2, 3]
    assert b"systemd" in b"".join(node_logs.read("worker-1", "journal", here))


def test_what_is_not_there_is_told_with_what_is(tmp_path: Path):
    here = place(tmp_path)
    with pytest.raises(UserError, match="no node has left logs"):
        list(node_logs.read("worker-1", "journal", here))
    logs(here.store)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="worker-1"):
        list(node_logs.read("worker-2", "journal", here))
    with pytest.raises(UserError, match="'utilisation'|utilisation, journal"):
        list(node_logs.read("worker-1", "utilization", here))


def test_a_task_has_the_lines_of_its_time_on_its_node(tmp_path: Path):
    here = place(tmp_path)
    logs(here.store)  # type: ignore[arg-type]
    (task,) = _tasks()
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ledger.freeze([task])
    with pytest.raises(UserError, match="e/0 has not begun"):
        list(node_logs.of_task(("e", 0), "utilisation", here, ledger))
    ledger.submit(task, "a1")
    ledger.start("a1", "worker-1.0-abc123")
    ledger._db.execute("UPDATE attempts SET started = 1003, ended = 1012")
    lines = list(node_logs.of_task(("e", 0), "utilisation", here, ledger))
    assert [json.loads(line)["cpu_percent"] for line in lines] == [1, 2]
    (line,) = node_logs.of_task(("e", 0), "journal", here, ledger)
    assert line.endswith(b"one\n")


def test_the_keys_of_two_starts_differ():
    assert tls.bundle("r") != tls.bundle("r")
