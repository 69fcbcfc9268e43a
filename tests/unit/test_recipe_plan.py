"""Plans: counts, what is known later, nodes, prices, and the commands at the ends."""

from __future__ import annotations

import datetime as dt
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mayfly.cli import app
from mayfly.clouds import load_cloud
from mayfly.prices import Found, PriceList, TypePrice
from mayfly.recipe.load import load
from mayfly.recipe.plan import Where, make_plan
from mayfly_train.errors import BadInput
from mayfly_train.recipe import globs
from mayfly_train.s3 import parse_uri, write_bytes

OURS = Path(__file__).parent / "recipes/ours.yml"
LIST = PriceList(
    cloud="aws",
    currency="USD",
    date=dt.date(2026, 11, 1),
    source="a test",
    types={
        "m6i.large": TypePrice(hour=0.1, spot=(0.02, 0.04)),
        "g4dn.xlarge": TypePrice(hour=0.5, spot=(0.2, 0.3)),
    },
)


def plan(file: Path, where: Where | None = None) -> dict[str, Any]:
    return make_plan(load(file), where or Where())


def by_name(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {each["name"]: each for each in document["experiments"]}


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "r.yml"
    file.write_text(text)
    return file


def test_counts_and_what_is_known_later():
    document = plan(OURS)
    each = by_name(document)
    assert document["tasks"] == 32 + 1000
    assert not document["tasks_known"]
    assert (each["prepare"]["tasks"], each["train"]["tasks"], each["infer"]["tasks"]) == (
        32,
        1000,
        None,
    )
    assert "images" in each["infer"]["known_later"]
    assert "{{train.best.output}}" in each["infer"]["known_later"]
    assert each["infer"]["first"] is None


def test_first_and_last_commands_are_those_of_the_run():
    prepare = by_name(plan(OURS))["prepare"]
    assert prepare["first"][0][:3] == ["mayfly-prepare", "--shard", "0"]
    assert prepare["last"][0][:3] == ["mayfly-prepare", "--shard", "31"]
    assert prepare["first"][0][-1] == "{{data}}/mnist"


def test_nodes_are_the_workers_that_have_something_to_do():
    each = by_name(plan(OURS))
    assert each["prepare"]["nodes"] == 4
    assert each["train"]["nodes"] == 100
    assert plan(OURS)["nodes"] == 100


def test_the_price_of_an_hour_is_known_from_a_list():
    price = plan(OURS, Where(load_cloud("aws"), Found(LIST, "prices.yml"), ""))["price"]
    assert price["types"] == ["m6i.large", "m6i.large"]
    assert price["per_hour"] == [pytest.approx(0.1 + 100 * 0.02), pytest.approx(0.1 + 100 * 0.1)]


def test_a_gpu_decides_the_type(tmp_path: Path):
    file = write(tmp_path, "command: run {{x}}\nparameters: {x: [1, 2]}\nhardware: {gpu: t4}\n")
    price = plan(file, Where(load_cloud("aws"), Found(LIST, "prices.yml"), ""))["price"]
    assert price["types"] == ["m6i.large", "g4dn.xlarge"]


def test_a_price_that_is_not_listed_is_unknown(tmp_path: Path):
    file = write(tmp_path, "command: run\nhardware: {instance: m6i.4xlarge}\n")
    price = plan(file, Where(load_cloud("aws"), Found(LIST, "prices.yml"), ""))["price"]
    assert price == {"known": False, "why": "no price of m6i.4xlarge in prices.yml"}


def test_references_stay_as_written(tmp_path: Path):
    text = "experiments:\n  a: {command: run}\n  b: {needs: a, command: 'go {{a.best.output}}/m'}\n"
    assert by_name(plan(write(tmp_path, text)))["b"]["first"] == [["go", "{{a.best.output}}/m"]]


def test_a_glob_of_files_here_is_known_at_once(tmp_path: Path):
    for name in ("b.txt", "a.txt", ".hidden.txt"):
        (tmp_path / name).touch()
    file = write(tmp_path, "command: run {{x}}\nparameters: {x: {glob: '*.txt'}}\n")
    (only,) = plan(file)["experiments"]
    assert (only["tasks"], only["first"], only["last"]) == (
        2,
        [["run", "a.txt"]],
        [["run", "b.txt"]],
    )


def test_a_glob_that_matches_nothing(tmp_path: Path):
    file = write(tmp_path, "command: run {{x}}\nparameters: {x: {glob: '*.csv'}}\n")
    with pytest.raises(BadInput, match=r"main.x: nothing matches '\*.csv'"):
        plan(file)


def test_globs_in_s3_walk_level_by_level(client: Any):
    client.create_bucket(Bucket="data")
    keys = ["images/cats/1.png", "images/cats/2.png", "images/dogs/1.png", "images/x.txt", "other"]
    for key in keys:
        write_bytes(client, parse_uri(f"s3://data/{key}"), b"", "text/plain")

    def found(pattern: str) -> list[str]:
        return [uri.removeprefix("s3://data/") for uri in globs.find(pattern, client, None)]

    assert found("s3://data/images/*") == ["images/cats", "images/dogs", "images/x.txt"]
    assert found("s3://data/images/*/1.png") == ["images/cats/1.png", "images/dogs/1.png"]
    assert found("s3://data/images/[cd]*s/*") == keys[:3]
    assert found("s3://data/images/cats") == ["images/cats"]
    assert found("s3://data/image") == []


def test_the_command_line_prints_one_document():
    done = CliRunner().invoke(app, ["recipe", "plan", str(OURS), "--json"])
    assert done.exit_code == 0
    assert json.loads(done.stdout)["tasks"] == 1032


def test_people_read_the_same(capsys: pytest.CaptureFixture[str]):
    done = CliRunner().invoke(app, ["recipe", "plan", str(OURS), "--cloud", "local"])
    assert "tasks: at least 1032" in done.stdout
    assert "prepare, first: mayfly-prepare --shard 0" in done.stdout
    assert "price: free" in done.stdout
