"""The renderer and the roles agree: every variable we set exists, and every required one is set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from mayfly.clouds import load_job
from mayfly.recipe import cluster
from mayfly.role_vars import role_vars, share
from mayfly.run import Run
from mayfly.steps import load_stages
from mayfly_train.recipe.document import Experiment, Recipe

ROLES = Path(__file__).resolve().parents[2] / "roles"
USED = sorted({name for s in load_stages() for play in s.plays for name in play.role_names})
JOBS: dict[str, dict[str, Any]] = {
    "default": {},
    "git": {
        "trainer.program": "git+https://example.org/repo.git@v1",
        "trainer.directory": "code",
        "trainer.entrypoint": "train.py",
        "trainer.args": {"layers": [1, 2], "fast": True},
        "mode": "sync",
    },
    "preprocess": {"engine": "torch", "data.preprocess.to": "tensors"},
    "juicefs": {"engine": "keras-ps", "store": "juicefs"},
    "gpus": {"cloud": "static", "bucket": "b-1", "nodes.ps.gpu": 1, "nodes.worker.gpu": 2},
}
TYPES = {
    "str": str,
    "path": str,
    "int": int,
    "bool": bool,
    "dict": dict,
    "list": list,
    "float": (int, float),
}


def variables(job: str) -> dict[str, Any]:
    spec, _ = load_job(None, {"cloud": "local", **JOBS[job]}, {})
    run = Run(
        "r-1",
        "docker://i",
        "mayfly.training,0.1.0",
        "http://x:1",
        "us-east-1",
        True,
        train_s=600,
        end_s=1200,
    )
    return role_vars(spec, run)


def options(role: str) -> dict[str, dict[str, Any]]:
    specs = yaml.safe_load((ROLES / role / "meta/argument_specs.yml").read_text())
    return specs["argument_specs"]["main"]["options"]


@pytest.mark.parametrize("job", JOBS)
def test_every_variable_belongs_to_a_role_of_some_stage(job):
    assert share(variables(job), USED) == variables(job)


@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize("role", USED)
def test_every_variable_is_one_that_the_role_takes(role, job):
    own = share(variables(job), [role])
    known = options(role)
    assert set(own) - set(known) == set()
    for name, value in own.items():
        assert isinstance(value, TYPES[known[name].get("type", "str")]), name
        assert value in known[name].get("choices", [value]), name


def test_nodes_are_told_the_gpus_that_they_must_have():
    wanted = {"gpu_ps_count": 1, "gpu_worker_count": 2}
    assert share(variables("gpus"), ["gpu"]) == wanted
    assert share(variables("default"), ["gpu"]) == {}


@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize("role", USED)
def test_every_required_variable_is_set(role, job):
    required = {name for name, option in options(role).items() if option.get("required")}
    assert required - set(variables(job)) == set()


RECIPES = {"plain": Recipe("r", (Experiment("e", ("true",)),), image="")}
RECIPES["framework"] = Recipe("r", RECIPES["plain"].experiments, image="pytorch")


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_a_recipes_roles_are_told_what_they_take_and_need(recipe: Recipe):
    spec = cluster.spec_of(recipe, "s3://bucket/recipes/r", cluster.Options("local", 2), {})
    run = Run("r-1", "docker://i", "mayfly.training,0.1.0", "http://x:1", "us-east-1", True)
    contents = cluster.Cluster(recipe, "s3://bucket/recipes/r").contents(
        spec, run, cluster.ENTRY_FRAMEWORK if recipe.image else cluster.ENTRY
    )
    roles = {name for stage in contents.stages for play in stage.plays for name in play.role_names}
    known = {name: option for role in roles for name, option in options(role).items()}
    assert set(contents.variables) - set(known) == set()
    required = {name for name, option in known.items() if option.get("required")}
    assert required - set(contents.variables) == set()
    for name, value in contents.variables.items():
        assert isinstance(value, TYPES[known[name].get("type", "str")]), name
