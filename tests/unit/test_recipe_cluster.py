"""The nodes of a recipe: what they must have, and what is refused before anything exists."""

from __future__ import annotations

import pytest

from mayfly.clouds import load_cloud
from mayfly.errors import UserError
from mayfly.recipe import cluster
from mayfly_train.recipe.document import Experiment, Hardware, Recipe

ADDRESS = "s3://bucket/recipes/search"


def recipe(*hardware: Hardware, image: str = "") -> Recipe:
    experiments = (
        Experiment(f"e{number}", ("true",), hardware=each) for number, each in enumerate(hardware)
    )
    return Recipe("search", tuple(experiments), image=image)


def spec(given: Recipe, cloud: str = "aws", **flags: str):
    return cluster.spec_of(given, ADDRESS, cluster.Options(cloud, 3, **flags), {})


def test_a_node_has_what_every_experiment_needs():
    found = cluster.hardware_of(recipe(Hardware(cpus=4), Hardware(memory=9 << 30, spot=False)))
    assert (found.cpus, found.memory, found.spot) == (4, 9 << 30, False)


def test_the_smallest_type_that_is_large_enough_is_taken():
    assert spec(recipe(Hardware())).nodes.worker.instance == "m6i.large"
    large = spec(recipe(Hardware(cpus=4, memory=9 << 30)))
    assert large.nodes.worker.instance == "m6i.xlarge"
    whole = spec(recipe(Hardware(memory=16 << 30)))
    assert whole.nodes.worker.instance == "m6i.2xlarge", "16 GiB are not all for tasks"


def test_one_line_changes_the_type_of_gpu():
    types = [
        spec(recipe(Hardware(gpus=1, gpu=model))).nodes.worker.instance for model in ("T4", "l4")
    ]
    assert types == ["g4dn.xlarge", "g6.xlarge"]


def test_a_gpu_that_the_cloud_has_not_is_refused_with_those_that_it_has():
    with pytest.raises(UserError, match=r"1 GPUs k80.*GPUs there: NVIDIA A100"):
        spec(recipe(Hardware(gpus=1, gpu="k80")))


def test_spot_is_preferred_for_workers_and_never_for_the_head():
    found = spec(recipe(Hardware()))
    assert (found.nodes.worker.spot, found.nodes.ps.spot) == ("prefer", False)
    assert found.nodes.ps.count == 1
    assert spec(recipe(Hardware(), Hardware(spot=False))).nodes.worker.spot is False


def test_two_instance_types_are_refused():
    with pytest.raises(UserError, match="a and b.*a run's nodes are all alike"):
        cluster.hardware_of(recipe(Hardware(instance="a"), Hardware(instance="b")))


@pytest.mark.parametrize(
    ("image", "says"),
    [("pytorh", "did you mean 'pytorch'"), ("ghcr.io/me/x:1", "container images are not taken")],
)
def test_an_image_that_is_no_runtime_is_refused(image: str, says: str):
    with pytest.raises(UserError, match=says):
        spec(recipe(Hardware(), image=image))


def test_machines_of_the_users_own_are_refused_with_the_playbook_for_them():
    with pytest.raises(UserError, match=r"ansible-playbook mayfly\.training\.recipe"):
        spec(recipe(Hardware()), cloud="static")


def test_limits_come_from_the_command_line():
    found = spec(recipe(Hardware()), max_duration="12h", budget="5 USD")
    assert found.limits.max_duration == 12 * 3600
    assert str(found.limits.budget) == "5 USD"
    with pytest.raises(UserError, match="max_duration is 'soon'"):
        spec(recipe(Hardware()), max_duration="soon")


def test_a_long_name_is_cut_where_a_run_may_end():
    long = Recipe("a" * 28 + "-search", recipe(Hardware()).experiments)
    assert spec(long).name == "a" * 28


def test_containers_of_one_machine_are_few_unless_asked_for():
    local, aws = load_cloud("local"), load_cloud("aws")
    assert [cluster.wish_of(None, 100, cloud) for cloud in (local, aws)] == [2, 100]
    assert [cluster.wish_of(8, 100, cloud) for cloud in (local, aws)] == [8, 8]
    assert cluster.wish_of(None, 1, local) == 1


def test_a_task_on_several_nodes_has_them():
    four = recipe(Hardware(), Hardware(nodes=4))
    assert cluster.least_of(four) == 4
    assert cluster.least_of(recipe(Hardware(nodes=4, gpus=1))) == 1, "a node may have four"
    assert cluster.wish_of(None, 4, load_cloud("local"), 4) == 4
    with pytest.raises(UserError, match="--workers 2: a task of this recipe takes 4 nodes"):
        cluster.wish_of(2, 4, load_cloud("aws"), 4)
