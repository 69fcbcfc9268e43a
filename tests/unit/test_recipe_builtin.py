"""The built-in recipes: what they say they are, and their programs on real data."""

from __future__ import annotations

import json
import os
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import pytest

from mayfly.recipe.load import BUILT_IN, load
from mayfly.recipe.plan import Where, make_plan
from mayfly_train.convert import tfrecord
from mayfly_train.recipe import globs, sources
from mayfly_train.recipe.document import Recipe, from_json
from mayfly_train.recipe.engine import InProcessEngine
from mayfly_train.recipe.expand import Context, Expansion
from mayfly_train.recipe.head import Head, Run
from unit.recipe_fakes import Lab

ROOT = Path(__file__).resolve().parents[2]


def test_the_search_is_of_twelve_parameters_with_two_choices():
    (only,) = load(Path("gbm_search")).recipe.experiments
    assert [len(parameter.values) for parameter in only.parameters] == [2] * 12
    assert make_plan(load(Path("gbm_search")), Where())["tasks"] == 4096


@pytest.mark.parametrize("path", sorted(BUILT_IN.glob("*.yml")), ids=lambda path: path.stem)
def test_every_one_is_found_by_its_name(path: Path):
    assert load(Path(path.stem)).file == path
    assert load(Path(path.stem)).source == path.with_suffix("")


def test_one_combination_of_the_search(tmp_path: Path):
    loaded = load(Path("gbm_search"))
    (only,) = loaded.recipe.experiments
    task = Expansion(only, Context("", {}, {})).task(4095)
    assert task.parameters["n_estimators"] == 60
    narrow = Recipe("one", (_with_only(only, task.parameters),))
    lab, ledger = _work(tmp_path, narrow, loaded.source)
    row = ledger.row("search", 0)
    assert row is not None and row.state == "done", row
    assert 0.95 < row.results["auc"] < 1


def test_inference_merges_what_every_folder_gave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "training"))
    loaded = load(Path("inference"))
    lab, ledger = _work(tmp_path, loaded.recipe, loaded.source)
    row = ledger.row("merge", 0)
    assert row is not None and row.state == "done", list(ledger.experiments())
    assert row.results["images"] == 597
    assert row.results["accuracy"] > 0.85
    assert sum(each.results["images"] for each in ledger.rows("infer")) == 597
    merged = lab.store.read(f"outputs/merge/000000/{row.accepted}/classes.csv")
    assert merged is not None and len(merged.splitlines()) == 597
    assert json.loads(lab.store.read("done/merge/000000.json") or b"")["exit_code"] == 0


def test_training_on_two_nodes_finds_what_one_does(tmp_path: Path):
    loaded = load(Path("training"))
    found = []
    for nodes in (2, 1):
        document = loaded.recipe.to_json()
        document["experiments"][0]["hardware"]["nodes"] = nodes
        lab, ledger = _work(tmp_path / str(nodes), from_json(document), loaded.source)
        row = ledger.row("train", 0)
        assert row is not None and row.state == "done", row
        model = lab.path / f"store/outputs/train/000000/{row.accepted}/model.npz"
        found.append((row.results, np.load(model)["weights"]))
    (two, weights), (one, alone) = found
    assert (two["nodes"], one["nodes"]) == (2, 1)
    assert two["accuracy"] == pytest.approx(one["accuracy"]) and one["accuracy"] > 0.85
    assert np.abs(weights - alone).max() < 1e-9


def test_another_type_of_gpu_is_one_line(tmp_path: Path):
    text = (BUILT_IN / "training.yml").read_text().replace("source: training", "source: null")
    found = []
    for gpu in ("v100", "a100"):
        file = tmp_path / "training.yml"
        line = f"hardware: {{nodes: 2, gpu: {gpu}}}"
        file.write_text(text.replace("hardware: {nodes: 2}", line))
        found.append(load(file).recipe.to_json())
    for document in found:
        hardware = document["experiments"][0]["hardware"]
        assert (hardware["nodes"], hardware["gpus"]) == (2, 1)
        hardware["gpu"] = ""
    assert found[0] == found[1]


def _with_only(experiment, values):
    """The experiment with one value for each parameter."""
    document = Recipe("", (experiment,)).to_json()
    for parameter in document["experiments"][0]["parameters"]:
        parameter["values"] = [values[parameter["name"]]]
    return from_json(document).experiments[0]


def _work(tmp_path: Path, recipe: Recipe, source: Path | None):
    """Run in this process, with the python3 that runs the tests."""
    lab = Lab(tmp_path)
    run = Run(
        recipe, sources.put(source, lab.store), lab.store, lambda text: globs.find(text, None, None)
    )
    engine, ledger = InProcessEngine(lab.node()), lab.ledger()
    Head(run, ledger, engine).work()
    engine.close()
    return lab, ledger


def test_texts_become_checked_records_of_paragraphs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """On all 79 topics of Python's reference; 30 files a shard, and its last one has the rest."""
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(ROOT / "training"), os.environ.get("PYTHONPATH", "")])
    )
    loaded = load(Path("text"))
    document = loaded.recipe.to_json()
    shard = next(each for each in document["experiments"] if each["name"] == "shard")
    shard["command"] = [shard["command"][0].replace("--files 10", "--files 30")]
    lab, ledger = _work(tmp_path, from_json(document), loaded.source)
    assert {each["state"] for each in ledger.experiments()} == {"done"}, ledger.experiments()
    found = [row.results for row in ledger.rows("tokenise")]
    assert [each["files"] for each in found] == [30, 30, len(topics) - 60]
    assert all(each["too_short"] and each["no_prose"] for each in found)
    (total,) = ledger.rows("sum")
    assert total.results["records"] == sum(each["paragraphs"] for each in found) > 1000
    records = [record for path in _shards(lab) for record in tfrecord.read(path)]
    examples = [tfrecord.decode(record) for record in records]
    assert len(examples) == total.results["records"]
    for each in examples:
        source, text = (str(each[name][0], "utf-8") for name in ("source", "text"))
        original = topics[source.removeprefix("texts/").removesuffix(".txt")]
        assert text in " ".join(original.split())
        tokens = [str(token, "utf-8") for token in each["tokens"]]
        assert "".join(tokens).replace(" ", "") == text.replace(" ", "")
        assert each["sentence_starts"][0] == 0 and max(each["sentence_starts"]) < len(tokens)
    known = next(each for each in examples if b"convenient way to insert" in each["text"][0])
    assert known["tokens"][:3] == [b"Assert", b"statements", b"are"]


def _shards(lab: Lab) -> list[Path]:
    return sorted((lab.path / "store/outputs/tokenise").rglob("*.tfrecord"))
