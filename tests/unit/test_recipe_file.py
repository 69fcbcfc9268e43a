"""Recipe files: both forms, and what is refused with its line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mayfly.errors import UserError
from mayfly.recipe.load import Loaded, load
from mayfly_train.recipe import document
from mayfly_train.recipe.document import Parameter

PUBLISHED = """\
framework: pytorch
parameters:
  lr: {range: 0.1-0.3, sampling: uniform}
  samples: 1000
workers: 100
hardware: {gpu: k80}
command:
  - python prepare.py
  - python train.py --lr {{lr}}
"""
OURS = (Path(__file__).parent / "recipes/ours.yml").read_text()


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "search.yml"
    file.write_text(text)
    return file


def read(tmp_path: Path, text: str) -> Loaded:
    return load(write(tmp_path, text))


def error(tmp_path: Path, text: str) -> str:
    with pytest.raises(UserError) as caught:
        read(tmp_path, text)
    return str(caught.value).replace(str(tmp_path), "")


def test_the_published_form_is_accepted_unchanged(tmp_path: Path):
    recipe = read(tmp_path, PUBLISHED).recipe
    (only,) = recipe.experiments
    assert recipe.name == "search"
    assert recipe.image == "pytorch"
    assert only.samples == 1000
    assert only.workers == 100
    assert only.hardware.gpus == 1 and only.hardware.gpu == "k80"
    assert only.command == ("python prepare.py", "python train.py --lr {{lr}}")
    assert only.parameters == (Parameter("lr", "uniform", low=0.1, high=0.3),)


def test_samples_may_stand_beside_the_parameters(tmp_path: Path):
    beside = PUBLISHED.replace("  samples: 1000\n", "") + "samples: 1000\n"
    assert read(tmp_path, beside).recipe.digest == read(tmp_path, PUBLISHED).recipe.digest


def test_ours_in_full(tmp_path: Path):
    prepare, train, infer = read(tmp_path, OURS).recipe.experiments
    assert prepare.parameters == (Parameter("shard", "integers", low=0, high=31),)
    assert train.search.objective == "val_accuracy" and train.search.stop_after == 3
    assert train.hardware.memory == 2 << 30
    assert (train.task_retries, train.node_retries, train.timeout_s) == (2, 20, 1200)
    assert infer.needs == ("train",)


def test_a_recipe_survives_its_document(tmp_path: Path):
    recipe = read(tmp_path, OURS).recipe
    assert document.from_json(recipe.to_json()) == recipe


def test_experiments_come_after_what_they_need(tmp_path: Path):
    text = "experiments:\n  b: {needs: a, command: run}\n  a: {command: run}\n"
    assert [each.name for each in read(tmp_path, text).recipe.experiments] == ["a", "b"]


@pytest.mark.parametrize(
    ("old", "new", "mark", "parts"),
    [
        ("    workers: 4", "    worker: 4", "worker: 4", ["unknown key 'worker'", "'workers'"]),
        ("sampler: random", "samplr: random", "samplr", ["unknown key 'samplr'", "'sampler'"]),
        ("loguniform}", "loguniform, lo: 1}", "loguniform, lo: 1}", ["unknown key 'lo'"]),
        ("needs: [prepare]", "needs: [preprae]", "needs: [preprae]", ["'preprae'", "'prepare'"]),
        ("{{width}}", "{{widht}}", "python train.py", ["{{widht}} stands for nothing", "'width'"]),
        ("--lr {{lr}} ", "", "      lr:", ["'lr' is not used"]),
        ("0.001-0.3", "0.3-0.001", "      lr:", ["upside down", "0.001-0.3"]),
        ("0.001-0.3", "0-0.3", "      lr:", ["loguniform"]),
        ("0.001-0.3", "a lot", "      lr:", ["two numbers"]),
        ("samples: 1000", "samples: 0", "samples: 0", ["samples is 0", "1 or more"]),
        ("samples: 1000\n", "timeout: 3s\n", "timeout: 20m", ["'timeout' is there twice"]),
        ("[sgd, adam]", "[]", "      optimizer:", ["list of values"]),
        ("[sgd, adam]", "[sgd, sgd]", "      optimizer:", ["twice"]),
        ("memory: 2G", "memory: lots", "memory: lots", ["amount of memory"]),
        ("{{train.best.output}}", "{{trian.best.output}}", "python infer", ["unknown", "'train'"]),
        ("{{train.best.output}}", "{{train.worst.output}}", "python infer", ["stands for nothing"]),
        ("{{train.best.output}}", "{{prepare.best.output}}", "python infer", ["many tasks"]),
        ("objective: val_accuracy, ", "", "  train:", ["stop rule", "objective"]),
        ("sampler: random", "sampler: grid", "  train:", ["grid"]),
        ("    needs: [train]\n", "", "python infer", ["does not wait for", "needs: [train]"]),
        ('glob: "{{data}}', 'glob: "{{dat}}', "folder: {glob", ["{{dat}} stands for nothing"]),
        ("20m\n", "20m\n    result: ../x\n", "result: ../x", ["outside of the task's output"]),
        ("20m\n", "20m\n    result: /tmp/x\n", "result: /tmp/x", ["outside of the task's output"]),
        ("memory: 2G", "nodes: 0", "nodes: 0", ["nodes is 0", "1 or more"]),
        ("gpus: 0", "gpus: 2", "    hardware:", ["2 GPUs for a task", "nodes: 2"]),
        ("gpus: 0", "nodes: 2", "  train:", ["stop rule", "several nodes"]),
        ("20m\n", "20m\n    environment: {MY_TOKEN: x}\n", "environment", ["looks like a secret"]),
        ("name: mnist-search", "name: MNIST", "name: MNIST", ["name is 'MNIST'"]),
        ("--out {{output}}", "> {{output}}", "python train.py", ["only a shell", "shell: true"]),
    ],
)
def test_what_is_wrong_is_named_with_its_line(
    tmp_path: Path, old: str, new: str, mark: str, parts: list[str]
):
    assert old in OURS
    text = OURS.replace(old, new, 1)
    found = error(tmp_path, text)
    line = text[: text.index(mark)].count("\n") + 1
    assert all(part in found for part in parts), found
    assert f"search.yml, line {line}:" in found


def test_an_unknown_key_of_the_published_form_has_its_line(tmp_path: Path):
    found = error(tmp_path, PUBLISHED.replace("workers:", "wokers:"))
    assert found.startswith("/search.yml, line 5: unknown key 'wokers'")
    assert "'workers'" in found


def test_a_circle_is_shown(tmp_path: Path):
    text = "experiments:\n  a: {needs: c, command: x}\n  b: {needs: a, command: x}\n"
    text += "  c: {needs: b, command: x}\n"
    found = error(tmp_path, text)
    assert "a → c → b → a" in found and "line 2" in found


def test_what_is_drawn_needs_samples(tmp_path: Path):
    found = error(tmp_path, PUBLISHED.replace("  samples: 1000\n", ""))
    assert "draws lr, and has no samples" in found


def test_a_range_of_fractions_needs_a_sampling(tmp_path: Path):
    found = error(tmp_path, PUBLISHED.replace(", sampling: uniform", ""))
    assert "add sampling" in found and "line 3" in found


@pytest.mark.parametrize(
    ("text", "part"),
    [("[a", "is not YAML"), ("- a", "not a mapping"), ("name: x\n", "command is not set")],
)
def test_what_is_no_recipe(tmp_path: Path, text: str, part: str):
    assert part in error(tmp_path, text)


def test_a_source_that_is_not_there(tmp_path: Path):
    found = error(tmp_path, "source: nowhere\n" + PUBLISHED)
    assert "line 1: source 'nowhere' is no directory" in found


@pytest.mark.parametrize(
    ("written", "ends"),
    [("1e-4-1e-1", (1e-4, 0.1)), ("-1--0.5", (-1, -0.5)), ("[0.1, 3]", (0.1, 3))],
)
def test_ways_to_write_a_range(tmp_path: Path, written: str, ends: tuple[Any, Any]):
    (only,) = read(tmp_path, PUBLISHED.replace("0.1-0.3", written)).recipe.experiments
    assert (only.parameters[0].low, only.parameters[0].high) == ends


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ('experiments: {a: {command: "x {{y}}", parameters: {y: ["a\\0b"]}}}', "no command can"),
        ("experiments: &all\n  a: {command: x, environment: *all}\n", "contains itself"),
        (f"experiments: {{{'a' * 61}: {{command: x}}}}", "line 1"),
    ],
)
def test_what_would_only_show_on_a_worker(tmp_path: Path, text: str, part: str):
    assert part in error(tmp_path, text)


@pytest.mark.parametrize(
    ("source", "glob", "part"),
    [
        ("null", "in/*", "'in/*' is relative, and there is no source"),
        (".", "../in/*", "'../in/*' leads out of the source"),
    ],
)
def test_a_glob_that_tasks_could_not_follow(tmp_path: Path, source: str, glob: str, part: str):
    text = f"source: {source}\ncommand: cat {{{{f}}}}\nparameters:\n  f: {{glob: '{glob}'}}\n"
    assert part in (found := error(tmp_path, text)) and "line 4" in found


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("samples: https://me:hunter22@host/x\n", "'https://…@host/x'"),
        ("environment: {DB: 'postgres://me:hunter22@host/x'}\n", "DB looks like a secret"),
    ],
)
def test_no_error_shows_the_password_of_an_address(tmp_path: Path, text: str, masked: str):
    found = error(tmp_path, "command: run\n" + text)
    assert masked in found and "hunter" not in found
