"""Recipes to the RADL of their nodes: the text as recorded, and accepted by those who read it.

Record again with `make goldens` (MAYFLY_UPDATE_GOLDENS=1), and read the difference.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from radl.radl_parse import parse_radl

from mayfly import inputs
from mayfly.clouds import completed
from mayfly.places import find_place
from mayfly.radl_lint import lint
from mayfly.recipe import cluster
from mayfly.run import Run
from mayfly_train.recipe.document import Experiment, Hardware, Recipe

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BIN = Path(sys.executable).parent
RUN: dict[str, Any] = {
    "image": "docker://mayfly-node:0123456789ab",
    "collection": "http://172.30.0.1:8333/mayfly-public/0123/mayfly-training-0.1.0.tar.gz",
    "s3_endpoint": "http://172.30.0.1:8333",
    "s3_region": "us-east-1",
}
RENTED: dict[str, Any] = {
    "image": "aws://eu-west-1/ami-0123456789abcdef0",
    "collection": "@input.collection_url@",
    "s3_endpoint": None,
    "s3_region": "eu-west-1",
    "end_s": 3000,
}


@dataclass(frozen=True)
class Case:
    """A recipe's experiments, and where their nodes are made."""

    name: str
    hardware: tuple[Hardware, ...] = (Hardware(),)
    image: str = ""
    cloud: str = "local"
    workers: int = 4
    flags: dict[str, Any] = field(default_factory=dict)

    @property
    def golden(self) -> Path:
        return HERE / "recipe" / f"{self.name}.radl"

    def render(self) -> str:
        experiments = (
            Experiment(f"step{number}", ("true",), hardware=each)
            for number, each in enumerate(self.hardware)
        )
        recipe = Recipe("search", tuple(experiments), image=self.image)
        address = "s3://my-bucket/team/recipes/search"
        options = cluster.Options(self.cloud, self.workers, **self.flags)
        spec, profile = completed(cluster.spec_of(recipe, address, options, {}), {})
        place = find_place(spec, profile, {})
        values = RUN if self.cloud == "local" else RENTED
        run = Run(id="search-261128-010203-0a1b", region=place.region, **values)
        return cluster.Cluster(recipe, address).render(spec, profile, run)


CASES = [
    Case("local"),
    Case("local_framework", image="pytorch", workers=2),
    Case("local_large_tasks", (Hardware(), Hardware(cpus=2, memory=1 << 30))),
    Case("aws_spot", cloud="aws", workers=100, flags={"region": "eu-west-1"}),
    Case("aws_on_demand", (Hardware(), Hardware(spot=False)), cloud="aws"),
    Case("aws_gpu", (Hardware(gpus=1, gpu="t4"),), "tensorflow-2.15", "aws"),
]
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@every_case
def test_the_text_is_the_recorded_one(case: Case):
    text = case.render()
    if os.environ.get("MAYFLY_UPDATE_GOLDENS"):
        case.golden.write_text(text, encoding="utf-8")
    assert text == case.golden.read_text(encoding="utf-8"), "run make goldens, read the difference"


def test_every_recorded_file_has_its_case():
    assert {path.stem for path in (HERE / "recipe").iterdir()} == {case.name for case in CASES}


@every_case
def test_the_real_parser_takes_a_head_and_its_workers(case: Case):
    radl = parse_radl(case.render())
    assert radl.check()
    assert lint(str(radl)) == []
    assert [(d.id, d.vm_number) for d in radl.deploys] == [("head", 1), ("worker", case.workers)]
    last = max(item.num for item in radl.contextualize.items.values() if item.num)
    steps = {item.configure: item.num for item in radl.contextualize.items.values()}
    assert steps["engine_head"] == steps["engine_worker"] == last


@every_case
def test_the_head_is_never_a_spot_node(case: Case):
    systems = {each.name: each for each in parse_radl(case.render()).systems}
    assert systems["head"].getValue("spot") is None
    spot = case.cloud == "aws" and all(each.spot for each in case.hardware)
    assert (systems["worker"].getValue("spot") == "yes") is spot


@every_case
def test_secrets_are_placeholders(case: Case):
    text = case.render()
    roles = [] if case.cloud == "local" else ["collection_url"]
    expected = [*roles, "s3_access_key_id", "s3_secret_access_key", "engine_tls"]
    assert inputs.names(text) == expected


@every_case
def test_ansible_takes_every_block(case: Case, tmp_path: Path):
    playbook = tmp_path / "all_blocks.yml"
    header = {"hosts": "localhost", "become": True, "gather_facts": False}
    blocks = [c.recipes for c in parse_radl(case.render()).configures if c.recipes]
    plays = [
        header | play
        for text in blocks
        for play in yaml.safe_load(text)
        if isinstance(play, dict) and "roles" in play
    ]
    assert plays
    playbook.write_text(yaml.safe_dump(plays), encoding="utf-8")
    command = [BIN / "ansible-playbook", "--syntax-check", playbook]
    environment = {
        **os.environ,
        "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
        "ANSIBLE_COLLECTIONS_PATH": str(ROOT / ".ansible/collections"),
        "ANSIBLE_HOME": str(tmp_path / "home"),
    }
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr


def test_more_nodes_are_asked_for_by_name_alone():
    text = cluster.more_nodes(3)
    assert lint(text) == []
    radl = parse_radl(text)
    assert radl.check()
    assert [(d.id, d.vm_number) for d in radl.deploys] == [("worker", 3)]
