"""One attempt: marker first and last, outputs, logs, results, and whose fault a failure is."""

from __future__ import annotations

import errno
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from mayfly_train.errors import NodeError
from mayfly_train.recipe import attempt, names, patience, sources
from mayfly_train.recipe.attempt import Job
from mayfly_train.recipe.expand import Task
from mayfly_train.recipe.store import S3Store, read_json
from mayfly_train.s3 import parse_uri
from unit.recipe_fakes import Lab


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


def job(*lines: list[str], name: str = "a-1", inputs: tuple[str, ...] = (), **more: Any) -> Job:
    task = Task("train", 7, {"x": 1}, lines, {"SIZE": "3"}, inputs)
    defaults = {"source": "", "data": "here/data", "result": "result.json"}
    return Job(name, task.to_json(), **{**defaults, **more})


def shell(script: str) -> list[str]:
    return ["sh", "-c", script]


def test_a_good_end_leaves_marker_output_and_logs(lab: Lab):
    script = 'echo hello; echo oops >&2; echo "$SIZE" > ../output/size; mkdir ../output/deep;'
    script += 'echo x > "$MAYFLY_OUTPUT/deep/y"'
    outcome = attempt.run(job(shell(script)), lab.node())
    assert outcome["state"] == "done" and outcome["exit_code"] == 0 and outcome["files"] == 2
    assert read_json(lab.store, "done/train/000007.json") == outcome
    assert lab.store.read("outputs/train/000007/a-1/size") == b"3\n"
    assert lab.store.read("outputs/train/000007/a-1/deep/y") == b"x\n"
    assert lab.store.read("logs/train/000007/a-1/stdout/000001") == b"hello\n"
    assert lab.store.read("logs/train/000007/a-1/stderr/000001") == b"oops\n"


def test_an_attempt_finds_nothing_of_the_one_before(lab: Lab):
    node = lab.node()
    messy = "touch here .hidden ../output/x; mkdir ../inputs; echo out; echo err >&2; exit 1"
    attempt.run(job(shell(messy)), node)
    clean = 'test -z "$(find . ../output -mindepth 1)" && test ! -e ../inputs'
    assert attempt.run(job(shell(clean), name="a-2"), node)["state"] == "done"
    assert len(list((node.scratch / "slots").iterdir())) == 1
    assert lab.store.names("logs/train/000007/a-2/") == []


def test_a_finished_task_never_runs_again(lab: Lab, tmp_path: Path):
    line = shell(f"echo x >> {tmp_path}/ran")
    first = attempt.run(job(line), lab.node())
    assert attempt.run(job(line, name="a-2"), lab.node("node-1")) == first
    assert (tmp_path / "ran").read_text() == "x\n"


def test_of_two_at_once_the_first_marker_wins(lab: Lab):
    """The second ran while the first finished: it returns what the first has found."""
    winner = {"state": "done", "attempt": "a-1", "results": {"value": 1}}
    marker = lab.path / "store" / names.done("train/000007")
    script = f"mkdir -p {marker.parent}; echo '{json.dumps(winner)}' > {marker}; echo late"
    outcome = attempt.run(job(shell(script), name="a-2"), lab.node())
    assert outcome == winner
    assert read_json(lab.store, names.done("train/000007")) == winner
    assert lab.store.names("outputs/train/000007/a-1") == []


def test_lines_run_one_after_another_until_one_fails(lab: Lab):
    outcome = attempt.run(job(shell("echo 1"), shell("exit 4"), shell("echo 3")), lab.node())
    assert (outcome["state"], outcome["exit_code"]) == ("failed", 4)
    assert lab.store.read("logs/train/000007/a-1/stdout/000001") == b"1\n"
    assert lab.store.read("done/train/000007.json") is None
    assert read_json(lab.store, "attempts/train/000007/a-1.json") == outcome


def test_the_last_line_of_stderr_is_the_reason(lab: Lab):
    outcome = attempt.run(job(shell("echo first >&2; echo no such file >&2; exit 2")), lab.node())
    assert outcome["message"] == "exit code 2: no such file"


def test_each_task_gets_a_fresh_copy_of_the_source(lab: Lab, tmp_path: Path):
    source = tmp_path / "source"
    (source / "sub").mkdir(parents=True)
    (source / "run.sh").write_text("cat sub/data; echo more >> sub/data\n")
    (source / "sub/data").write_text("once\n")
    digest = sources.put(source, lab.store)
    for number in (1, 2):
        line = job(["sh", "run.sh"], name=f"a-{number}", source=digest)
        task = {**line.task, "number": number}
        attempt.run(Job(**{**line.to_json(), "task": task}), lab.node())
        log = lab.store.read(f"logs/train/00000{number}/a-{number}/stdout/000001")
        assert log == b"once\n"


def test_outputs_of_other_tasks_are_inputs(lab: Lab):
    lab.store.write("outputs/prepare/000001/a-9/m/model", b"weights")
    line = ["cat", "../inputs/prepare/000001/m/model"]
    for name in ("a-1", "a-2"):
        attempt.run(job(line, name=name, inputs=("prepare/000001/a-9",)), lab.node())
    assert lab.store.read("logs/train/000007/a-1/stdout/000001") == b"weights"


@pytest.mark.parametrize(
    ("script", "results", "value"),
    [
        ("echo '{\"acc\": 0.5}' > ../output/result.json; echo '{\"acc\": 1}'", {"acc": 0.5}, 0.5),
        ("echo '{\"acc\": 0.25}'; echo '{\"acc\": 1}'; echo bye", {"acc": 1}, 1.0),
        ("echo '{not json}'; echo 3", {}, None),
        ('echo \'{"acc": "high"}\'', {"acc": "high"}, None),
        ("echo '{\"acc\": NaN}'", {"acc": None}, None),
    ],
)
def test_results_are_of_the_file_or_the_last_line(lab: Lab, script, results, value):
    outcome = attempt.run(job(shell(script), objective="acc"), lab.node())
    assert outcome["value"] == value
    assert outcome["results"] == results


@pytest.mark.parametrize("text", ["{broken", "[1]", ""])
def test_a_result_file_that_is_no_object_is_a_failure(lab: Lab, text: str):
    outcome = attempt.run(job(shell(f"printf '{text}' > ../output/result.json")), lab.node())
    assert outcome["state"] == "failed"
    assert "result.json is" in outcome["message"]


def test_a_link_out_of_the_output_is_refused(lab: Lab):
    outcome = attempt.run(job(shell("ln -s /etc/hostname ../output/x")), lab.node())
    assert outcome["state"] == "failed"
    assert "leads out" in outcome["message"]


def test_a_timeout_is_the_commands_failure(lab: Lab):
    outcome = attempt.run(job(["sleep", "600"], timeout_s=1), lab.node())
    assert (outcome["state"], outcome["message"]) == ("failed", "took longer than 1 s")


def test_a_cancelled_attempt_says_so(lab: Lab):
    node = lab.node()
    node.cancelled.add("a-1")
    assert attempt.run(job(["sleep", "600"]), node)["state"] == "cancelled"


def test_a_worker_that_goes_does_not_blame_the_command(lab: Lab):
    node = lab.node()
    node.closing.set()
    assert attempt.run(job(["sleep", "600"]), node)["state"] == "broken"


def test_a_missing_source_does_not_blame_the_command(lab: Lab):
    outcome = attempt.run(job(["true"], source="0" * 64), lab.node())
    assert outcome["state"] == "broken"
    assert "missing or damaged" in outcome["message"]


def test_logs_are_in_the_store_while_the_task_runs(lab: Lab, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(attempt.shipping, "EVERY_S", 0.05)
    piece = lab.path / "store/logs/train/000007/a-1/stdout/000001"
    script = f"echo early; while [ ! -e {piece} ]; do sleep 0.02; done; echo late"
    assert attempt.run(job(shell(script), timeout_s=60), lab.node())["state"] == "done"
    assert piece.read_text() == "early\n"
    assert piece.with_name("000002").read_text() == "late\n"


def test_the_median_rule_ends_a_task_that_lags(lab: Lab, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(attempt.shipping, "EVERY_S", 0.05)
    lab.store.write("medians/train.json", b'{"1": 0.1, "2": 0.9}')
    script = 'for s in 1 2; do echo "{\\"step\\": $s, \\"acc\\": 0.5}"; done; exec sleep 600'
    line = job(shell(script), objective="acc", stop_after=2, timeout_s=60)
    outcome = attempt.run(line, lab.node())
    assert outcome["state"] == "stopped"
    assert outcome["value"] == 0.5
    assert outcome["curve"] == [(1, 0.5), (2, 0.5)]
    assert lab.store.read("done/train/000007.json") is not None


def test_the_same_in_s3(client: Any, tmp_path: Path):
    client.create_bucket(Bucket="runs")
    lab = Lab(tmp_path)
    lab.store = S3Store(client, parse_uri("s3://runs/one"))
    first = attempt.run(job(shell("echo hi; echo x > ../output/x")), lab.node())
    assert attempt.run(job(shell("exit 1"), name="a-2"), lab.node("node-1")) == first
    assert lab.store.names("outputs/") == ["outputs/train/000007/a-1/x"]
    assert lab.store.names("logs/train/000007/a-1/std") == ["logs/train/000007/a-1/stdout/000001"]
    assert not lab.store.create(names.done("train/000007"), b"{}")


@pytest.mark.parametrize(
    "script",
    [
        "rmdir ../output && ln -s /etc ../output",
        "rmdir ../output",
        "mkdir ../output/result.json",
        "mkfifo ../output/result.json",
        "ln -s /etc/hostname ../output/result.json",
    ],
)
def test_an_output_that_is_none_is_the_commands_failure(lab: Lab, script: str):
    node = lab.node()
    outcome = attempt.run(job(shell(script)), node)
    assert outcome["state"] == "failed", outcome
    assert lab.store.names("outputs/") == []
    assert attempt.run(job(shell("touch ../output/x"), name="a-2"), node)["state"] == "done"


@pytest.mark.parametrize("name", ["output", "source", "inputs"])
@pytest.mark.parametrize("how", ["ln -s {there} ../{name}", "touch ../{name}"])
def test_a_slot_outlives_what_a_task_puts_in_its_place(
    lab: Lab, tmp_path: Path, name: str, how: str
):
    source, there = tmp_path / "from", tmp_path / "there"
    for each in (source, there):
        each.mkdir()
        (each / "file").write_text("kept\n")
    digest, node = sources.put(source, lab.store), lab.node()
    line = f"rm -rf ../{name}; " + how.format(there=there, name=name)
    attempt.run(job(shell(f"{line}; exit 1"), source=digest), node)
    outcome = attempt.run(job(shell("cat file > ../output/y"), name="a-2", source=digest), node)
    assert outcome["state"] == "done", outcome
    assert lab.store.read("outputs/train/000007/a-2/y") == b"kept\n"
    assert [path.name for path in there.iterdir()] == ["file"]


def test_an_input_is_fetched_again_when_the_store_has_failed(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(patience, "PATIENCE_S", -1.0)
    lab.store.write("outputs/prepare/000001/a-9/model", b"weights")
    download, failures = lab.store.download, [1]

    def flaky(name: str, path: Path) -> None:
        if failures and failures.pop():
            raise NodeError("the store is away")
        download(name, path)

    lab.store.download = flaky  # type: ignore[method-assign]
    node, line = lab.node(), ["cat", "../inputs/prepare/000001/model"]
    inputs = ("prepare/000001/a-9",)
    assert attempt.run(job(line, inputs=inputs), node)["state"] == "broken"
    assert attempt.run(job(line, name="a-2", inputs=inputs), node)["state"] == "done"


def left_in(directory: Path) -> list[str]:
    """What has a dot before its name, but the lock."""
    return [path.name for path in directory.rglob(".*") if path.name != ".lock"]


@pytest.mark.parametrize("what", ["input", "source"])
def test_a_disk_that_is_full_keeps_nothing_of_what_was_fetched(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
):
    """Else it would stay full, for nobody but the same thread would remove it."""
    (tmp_path / "source").mkdir()
    (tmp_path / "source/file").write_text("x")
    digest = sources.put(tmp_path / "source", lab.store) if what == "source" else ""
    inputs = ("prepare/000001/a-9",) if what == "input" else ()
    lab.store.write("outputs/prepare/000001/a-9/model", b"weights")

    def fake_full(*words: Any, **_: Any) -> None:
        (words[1] / "part" if what == "source" else words[1]).write_text("the first part")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(sources.tarfile.TarFile, "extractall", fake_full)
        patch.setattr(lab.store, "download", fake_full)
        node, line = lab.node(), job(["true"], inputs=inputs, source=digest)
        outcome = attempt.run(line, node)
    assert outcome["state"] == "broken" and "No space left" in outcome["message"]
    assert left_in(node.scratch) == []
    assert attempt.run(line, node)["state"] == "done"


def test_what_a_killed_process_has_unpacked_in_part_goes_with_the_next(lab: Lab, tmp_path: Path):
    (tmp_path / "source").mkdir()
    digest = sources.put(tmp_path / "source", lab.store)
    cache = lab.path / "sources"
    (cache / f".{digest}.999999999-1-1/part").mkdir(parents=True)
    sources.unpacked(digest, cache, lab.store)
    assert left_in(cache) == []


def test_a_marker_that_is_refused_and_not_there_is_written_again(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
):
    """As when two write at a time, and the store takes neither (409)."""
    monkeypatch.setattr(attempt, "CLAIM_S", 0.0)
    create, refused = lab.store.create, [1, 1]
    lab.store.create = lambda *words: (  # type: ignore[method-assign]
        False if refused and refused.pop() else create(*words)
    )
    outcome = attempt.run(job(["true"]), lab.node())
    assert read_json(lab.store, names.done("train/000007")) == outcome
    refused += [1] * 1000
    other = Job(**{**job(["true"]).to_json(), "task": {**job(["true"]).task, "number": 8}})
    assert attempt.run(other, lab.node())["state"] == "broken"


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("'{\"acc\": ' + '1' * 400 + '}'", None),
        ("'{\"acc\": 1e999}'", None),
        ("'{\"a\": ' * 100000 + '1' + '}' * 100000", None),
    ],
)
def test_numbers_and_texts_beyond_all_bounds_are_no_results(lab: Lab, line: str, value: None):
    words = [sys.executable, "-c", f"print({line})"]
    outcome = attempt.run(job(words, objective="acc"), lab.node())
    assert (outcome["state"], outcome["value"]) == ("done", value)
    assert b"Infinity" not in (lab.store.read("done/train/000007.json") or b"")


def test_a_command_that_fails_where_there_is_no_room_is_not_blamed(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
):
    """The bar is put above what any disk has."""
    monkeypatch.setattr(attempt, "ROOM_BYTES", 1 << 62)
    outcome = attempt.run(job(shell("echo no space >&2; exit 1")), lab.node())
    assert outcome["state"] == attempt.BROKEN
    assert outcome["message"] == "the node's disk is full: exit code 1: no space"
    assert attempt.run(job(shell("true")), lab.node())["state"] == "done"
