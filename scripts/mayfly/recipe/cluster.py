"""The nodes of a recipe: a spec of them, as of any run, and the RADL that makes them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mayfly import inputs
from mayfly.clouds import CloudProfile, load_cloud
from mayfly.errors import UserError, nearest
from mayfly.radl_render import Contents, render_contents
from mayfly.recipe.plan import smallest
from mayfly.role_vars import deadman, gpus, s3
from mayfly.run import Run
from mayfly.spec import ClusterSpec, Layer, environment_settings, expand, merge, validate
from mayfly.steps import load_stages
from mayfly_train.recipe import shape
from mayfly_train.recipe.document import Hardware, Recipe

HEAD, WORKER = GROUPS = ("head", "worker")
TLS = "engine_tls"  # the input with the engine's keys; they are made for each run
ENTRY, ENTRY_FRAMEWORK = "recipe.yml", "recipe_framework.yml"
FRAMEWORKS = {
    "pytorch": "torch",
    "torch": "torch",
    "tensorflow": "tensorflow",
    "tensorflow-2.15": "tensorflow",
    "tensorflow2": "tensorflow2",
    "tensorflow-2.21": "tensorflow2",
}
RUNTIME = "/opt/mayfly/runtime/bin"
NAME_LENGTH = 29
FROM_ENVIRONMENT = ("region", "image", "budget", "collection")
MOST_HERE = 2
MORE = "network public\nnetwork private\nsystem worker\ndeploy worker {count}\n"


@dataclass(frozen=True)
class Options:
    """What the command line says of a run on nodes."""

    cloud: str
    workers: int
    """How many nodes are wished for, beside the head's."""
    region: str | None = None
    budget: str | None = None
    max_duration: str | None = None


@dataclass(frozen=True)
class Cluster:
    """What a recipe's nodes are told."""

    recipe: Recipe
    address: str
    """Where the run lies, `s3://bucket/prefix/recipes/NAME`."""

    def render(self, spec: ClusterSpec, profile: CloudProfile, run: Run) -> str:
        """The RADL of a run on nodes."""
        entry = ENTRY_FRAMEWORK if framework_of(self.recipe) else ENTRY
        return render_contents(spec, profile, run, self.contents(spec, run, entry))

    def contents(self, spec: ClusterSpec, run: Run, entry: str) -> Contents:
        """What roles are told, and what is asked for when nodes are made."""
        return Contents(
            stages=load_stages(entry=entry, groups=GROUPS),
            variables=self.variables(spec, run),
            inputs=(inputs.S3_ACCESS_KEY_ID, inputs.S3_SECRET_ACCESS_KEY, TLS),
            source=f"recipe {self.recipe.name} and playbooks/{entry}",
            names={"ps": HEAD},
        )

    def variables(self, spec: ClusterSpec, run: Run) -> dict[str, Any]:
        """The roles' variables, by their full names; secrets are placeholders."""
        framework = framework_of(self.recipe)
        return {
            **deadman(spec, run),
            **gpus(spec),
            "engine_store": self.address,
            **s3("engine", run),
            "engine_tls": inputs.placeholder(TLS),
            "engine_processes": 0 if shape.alike(self.recipe) else 1,
            "engine_gpus": shape.wants_gpus(self.recipe),
            **({"engine_path": [RUNTIME], "runtime_framework": framework} if framework else {}),
        }


def wish_of(given: int | None, planned: int, profile: CloudProfile, least: int = 1) -> int:
    """How many workers are wished for: as many as were asked for, else as many as the recipe has
    use for; of containers, which share this machine's cores, a few.

    Raises UserError for fewer than `least`, which one of the recipe's tasks takes at once.
    """
    if given and given < least:
        raise UserError(
            f"--workers {given}: a task of this recipe takes {least} nodes at once",
            f"write --workers {least}, or less at hardware.nodes",
        )
    if given:
        return given
    return max(least, min(planned, MOST_HERE)) if profile.instances == "none" else planned


def least_of(recipe: Recipe) -> int:
    """How many nodes the recipe's largest task takes at once; several GPUs may be on one."""
    wanted = (each.hardware for each in recipe.experiments)
    return max(1 if each.gpus else each.nodes for each in wanted)


def more_nodes(count: int) -> str:
    """The RADL that adds workers to an infrastructure, which knows all else of them."""
    return MORE.format(count=count)


def framework_of(recipe: Recipe) -> str | None:
    """What role runtime installs for the recipe; None for a recipe that names nothing.

    Raises UserError for what is no runtime of ours.
    """
    if not recipe.image:
        return None
    if recipe.image.lower() in FRAMEWORKS:
        return FRAMEWORKS[recipe.image.lower()]
    guess = nearest(recipe.image, FRAMEWORKS)
    known = ", ".join(FRAMEWORKS)
    raise UserError(
        f"image {recipe.image!r} is no runtime that nodes can be given",
        f"did you mean {guess!r}?" if guess else f"known: {known}; container images are not taken",
    )


def hardware_of(recipe: Recipe) -> Hardware:
    """What a node must have for every experiment of the recipe.

    Raises UserError when they name several instance types, or several types of GPU: the nodes of
    a run are all alike.
    """
    every = [each.hardware for each in recipe.experiments]
    named = {"instance": {each.instance for each in every}, "gpu": {each.gpu for each in every}}
    for key, names in named.items():
        if len(names - {""}) > 1:
            both = " and ".join(sorted(names - {""}))
            raise UserError(
                f"hardware.{key} is {both} in recipe {recipe.name!r}: a run's nodes are all alike",
                "name one of them, or run the experiments as two recipes",
            )
    return Hardware(
        cpus=max(each.cpus for each in every),
        memory=max(each.memory for each in every),
        gpus=max(each.gpus for each in every),
        gpu=max(named["gpu"]),
        instance=max(named["instance"]),
        spot=all(each.spot for each in every),
    )


def spec_of(
    recipe: Recipe, address: str, options: Options, environ: Mapping[str, str]
) -> ClusterSpec:
    """The spec of a run's nodes: group `ps` is the head, on demand and alone. Raises UserError."""
    profile, wanted = load_cloud(options.cloud), hardware_of(recipe)
    if profile.backend == "inventory":
        raise UserError(
            f"recipes make no nodes on {profile.title}",
            "put them into groups head and worker, and run ansible-playbook mayfly.training.recipe",
        )
    framework_of(recipe)
    may_be_spot = wanted.spot and profile.instances != "none"
    known = environment_settings(environ)
    environment = {name: known[name] for name in FROM_ENVIRONMENT if name in known}
    flags = {
        "name": recipe.name[:NAME_LENGTH].rstrip("-"),
        "cloud": options.cloud,
        "region": options.region,
        "budget": options.budget,
        "limits.max_duration": options.max_duration,
        "nodes.ps.count": 1,
        "nodes.worker.count": options.workers,
        "nodes.worker.instance": wanted.instance or _type(wanted, profile),
        "nodes.worker.gpu": wanted.gpus or None,
        "nodes.worker.spot": "prefer" if may_be_spot else None,
        "trainer.engine": "command",
        "trainer.command": ["mayfly", "recipe", "resume", recipe.name],
        "tensorboard": False,
        "model.destination": f"{address}/nodes/",
    }
    layers = [
        Layer("the environment", expand(environment)),
        Layer("the recipe and the command line", expand(flags)),
    ]
    return validate(merge(layers), layers)


def _type(wanted: Hardware, profile: CloudProfile) -> str | None:
    """The smallest listed type that is large enough; None where IM picks one."""
    if profile.instances != "listed":
        return None
    found = smallest(profile.types, wanted)
    if found is None:
        models = {size.gpu_model for size in profile.types.values() if size.gpu_model}
        memory = f"{wanted.memory / (1 << 30):g} GiB"
        gpus = f", {wanted.gpus} GPUs {wanted.gpu}".rstrip() if wanted.gpus else ""
        raise UserError(
            f"no type in radl/clouds/{profile.name}.yml has {wanted.cpus:g} cores, {memory}{gpus}",
            f"name one with hardware.instance; GPUs there: {', '.join(sorted(models)) or 'none'}",
        )
    return found
