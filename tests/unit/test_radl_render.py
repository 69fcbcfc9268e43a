"""Rendering: what a caller decides shows in the text, and what cannot be RADL is refused.

The texts themselves are recorded in tests/golden.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from radl.radl_parse import parse_radl

from mayfly.clouds import load_job
from mayfly.errors import MayflyError
from mayfly.radl_print import main
from mayfly.radl_render import render, write_radl
from mayfly.role_vars import role_vars, share
from mayfly.run import Run
from mayfly.steps import GroupPlay, Stage

RUN = Run("r-261128-010203-0a1b", "docker://node:1", "mayfly.training,0.1.0", None, "us-east-1")
STAGES = (
    Stage(
        1, "one", (GroupPlay("ps", ("n.c.hadoop",), {}), GroupPlay("worker", ("n.c.trainer",), {}))
    ),
)


def text(overrides: dict | None = None, run: Run = RUN, stages: tuple[Stage, ...] = STAGES) -> str:
    spec, profile = load_job(None, {"cloud": "local", **(overrides or {})}, {})
    return render(spec, profile, run, stages)


def recipe(radl: str, name: str) -> dict:
    (found,) = [c for c in parse_radl(radl).configures if c.name == name]
    (play,) = yaml.safe_load(found.recipes)
    return play


def test_the_same_arguments_give_the_same_text():
    assert text() == text()


def test_a_block_carries_the_variables_of_its_roles_only():
    rendered = text()
    assert recipe(rendered, "one_ps") == {"roles": ["n.c.hadoop"]}
    names = recipe(rendered, "one_worker")["vars"]
    assert names["trainer_run"] == RUN.id
    assert all(name.startswith("trainer_") for name in names)


def test_the_variables_of_a_play_win():
    stages = (Stage(1, "one", (GroupPlay("ps", ("n.c.trainer",), {"trainer_steps": 5}),)),)
    rendered = text({"steps": 9}, stages=stages)
    assert recipe(rendered, "one_ps")["vars"]["trainer_steps"] == 5


def test_a_role_is_not_taken_for_one_whose_name_it_begins():
    assert share({"gpu_x": 1, "gpus_x": 2}, ["gpu"]) == {"gpu_x": 1}


def test_the_session_token_is_asked_for_only_when_there_is_one():
    spec, _ = load_job(None, {"cloud": "local"}, {})
    without, with_token = role_vars(spec, RUN), role_vars(spec, replace(RUN, session_token=True))
    extra = {name for name in with_token if name not in without}
    assert extra
    assert all(name.endswith("_s3_session_token") for name in extra)


def test_a_budget_stops_training_and_ends_the_nodes():
    spec, _ = load_job(None, {"cloud": "local"}, {})
    without = role_vars(spec, RUN)
    assert "trainer_budget_s" not in without
    capped = role_vars(spec, replace(RUN, train_s=600, end_s=1200))
    assert (capped["trainer_budget_s"], capped["deadman_max_s"]) == (600, 1200)
    assert capped["deadman_age_s"] == 1200 and "deadman_age_s" not in without
    assert capped["deadman_linger_s"] <= 1200 < without["deadman_max_s"]
    ample = role_vars(spec, replace(RUN, train_s=10**6, end_s=10**6 + 600))
    assert ample["deadman_max_s"] == without["deadman_max_s"]


def test_awkward_arguments_arrive_unchanged():
    value = 'it\'s "x": #1, [y] {z} é \\ %s $HOME'
    rendered = text({"trainer.args.title": value})
    assert recipe(rendered, "one_worker")["vars"]["trainer_args"] == {"title": value}


def test_what_would_not_be_radl_is_refused():
    with pytest.raises(MayflyError, match="rendered RADL is wrong") as caught:
        text(run=replace(RUN, image="docker://it's"))
    assert caught.value.exit_code == 1


def test_a_stage_that_is_not_deployed_is_refused():
    stages = (Stage(1, "one", (GroupPlay("ps2", ("n.c.a",), {}),)),)
    with pytest.raises(MayflyError, match="unknown system 'ps2'"):
        text(stages=stages)


def test_writing_makes_the_directory(tmp_path: Path):
    write_radl("x\n", tmp_path / "build/x.radl")
    assert (tmp_path / "build/x.radl").read_text() == "x\n"


def test_the_executable_prints_it(capsys, monkeypatch):
    monkeypatch.delenv("MAYFLY_CLOUD", raising=False)
    assert main(["--set", "cloud=local", "--image", "docker://node:1"]) == 0
    assert parse_radl(capsys.readouterr().out).check()


def test_the_executable_says_what_is_missing_on_one_line(capsys, monkeypatch):
    monkeypatch.delenv("MAYFLY_CLOUD", raising=False)
    assert main(["--set", "cloud=local"]) == 2
    assert "give --image URL" in capsys.readouterr().err
    assert main(["--set", "cloud=nowhere"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
