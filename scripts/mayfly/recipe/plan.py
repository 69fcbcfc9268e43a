"""What a recipe would run: its graph, how many tasks, on how many nodes, at what price."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mayfly import cost
from mayfly.clouds import CloudProfile, InstanceType
from mayfly.node_types import Nodes
from mayfly.prices import Found
from mayfly.recipe.load import Loaded
from mayfly.recipe.model import WORKERS
from mayfly_train.recipe import globs
from mayfly_train.recipe.document import TPE, Experiment, Hardware
from mayfly_train.recipe.expand import Context, Expansion, Task, references, resolve_globs

# Of what a type is said to have, so much is left for tasks: the kernel and the daemons have theirs.
USABLE_MEMORY = 0.9
HEAD = Nodes("ps", 1, None, None, 0, None, spot=False, public=False)


@dataclass(frozen=True)
class Where:
    """The cloud that the nodes would be of, and its prices, when they are known."""

    profile: CloudProfile | None = None
    prices: Found | None = None
    why: str = "no cloud is given"


@dataclass(frozen=True)
class Planned:
    """One experiment. `later` says what is known only when others are done, empty when all is."""

    experiment: Experiment
    tasks: int | None
    nodes: int
    first: Task | None
    last: Task | None
    later: str


def make_plan(loaded: Loaded, where: Where) -> dict[str, Any]:
    """The plan as a document. Raises BadInput for a glob that matches nothing here."""
    data = loaded.recipe.data or "{{data}}"
    planned = [_plan(each, data, loaded.source) for each in loaded.recipe.experiments]
    counts = [each.tasks for each in planned if each.tasks is not None]
    whole = len(counts) == len(planned)
    nodes = max(each.nodes for each in planned)
    return {
        "recipe": loaded.recipe.name,
        "file": str(loaded.file),
        "digest": loaded.recipe.digest,
        "tasks": sum(counts),
        "tasks_known": whole,
        "nodes": nodes,
        "price": _price(planned, where),
        "source": str(loaded.source) if loaded.source else None,
        "experiments": [_document(each) for each in planned],
    }


def _plan(experiment: Experiment, data: str, source: Path | None) -> Planned:
    later = _later(experiment)
    globbed = any(parameter.kind == "glob" for parameter in experiment.parameters)
    if globbed and not later:
        context = Context(data, {}, {})
        experiment = resolve_globs(
            experiment, context, lambda pattern: globs.find(pattern, None, source)
        )
        globbed = False
    if globbed:
        tasks = experiment.samples or None
        return Planned(experiment, tasks, _nodes(experiment, tasks), None, None, later)
    expansion = Expansion(experiment, Context(data, {}, {}, planned=True))
    count = expansion.count
    nodes = _nodes(experiment, count)
    if experiment.search.sampler == TPE:
        return Planned(experiment, count, nodes, None, None, later)
    ends = expansion.task(0), expansion.task(count - 1)
    return Planned(experiment, count, nodes, *ends, later)


def _later(experiment: Experiment) -> str:
    """What of an experiment its needs, or the run's place, decide."""
    reasons = []
    for parameter in experiment.parameters:
        if parameter.kind == "glob":
            there = parameter.pattern.startswith("s3://") or "{{" in parameter.pattern
            if there or experiment.needs:
                reasons.append(f"{parameter.name}: what {parameter.pattern} matches")
    reasons += [f"{{{{{name}}}}}" for name in references(experiment)]
    if experiment.search.sampler == TPE:
        reasons.append("parameters: chosen by the results so far")
    return "; ".join(reasons)


def _nodes(experiment: Experiment, tasks: int | None) -> int:
    wanted = experiment.workers or WORKERS
    return (min(wanted, tasks) if tasks else wanted) * experiment.hardware.nodes


def _document(planned: Planned) -> dict[str, Any]:
    experiment = planned.experiment
    return {
        "name": experiment.name,
        "needs": list(experiment.needs),
        "tasks": planned.tasks,
        "known_later": planned.later or None,
        "nodes": planned.nodes,
        "sampler": experiment.search.sampler if experiment.samples else "grid",
        "objective": experiment.search.objective or None,
        "first": _commands(planned.first),
        "last": _commands(planned.last),
    }


def _commands(task: Task | None) -> list[list[str]] | None:
    return None if task is None else [list(words) for words in task.commands]


def _price(planned: list[Planned], where: Where) -> dict[str, Any]:
    """The price of an hour, as an interval; how many hours nobody knows before."""
    if where.profile is not None and where.profile.prices == "free":
        return {"known": True, "currency": None, "per_hour": [0.0, 0.0], "why": "free"}
    if where.prices is None or where.profile is None:
        return {"known": False, "why": where.why}
    largest = max(planned, key=lambda each: each.nodes)
    nodes = (_head(where.profile), _group(largest, where.profile))
    found = cost.estimate(nodes, where.prices.prices, cost.Interval(1, 1))
    if found is None:
        missing = ", ".join(cost.unpriced(nodes, where.prices.prices))
        return {"known": False, "why": f"no price of {missing} in {where.prices.origin}"}
    return {
        "known": True,
        "currency": found.currency,
        "per_hour": [found.per_hour.low, found.per_hour.high],
        "types": [group.type for group in nodes],
        "why": where.prices.origin,
    }


def _head(profile: CloudProfile) -> Nodes:
    return _of_type(HEAD, smallest(profile.types, Hardware(memory=2 << 30)), profile)


def _group(planned: Planned, profile: CloudProfile) -> Nodes:
    wanted = planned.experiment.hardware
    name = wanted.instance or smallest(profile.types, wanted)
    spot = wanted.spot and profile.spot
    group = Nodes("worker", planned.nodes, None, None, wanted.gpus, None, spot=spot, public=False)
    return _of_type(group, name, profile)


def _of_type(group: Nodes, name: str | None, profile: CloudProfile) -> Nodes:
    size = profile.types.get(name) if name else None
    return Nodes(
        group.group, group.count, name, size, group.gpu, None, spot=group.spot, public=group.public
    )


def smallest(types: Mapping[str, InstanceType], wanted: Hardware) -> str | None:
    """The first listed type that is large enough; they are listed from small to large."""
    for name, size in types.items():
        enough = size.cpu >= wanted.cpus and (size.memory_mb << 20) * USABLE_MEMORY >= wanted.memory
        if enough and _has_gpus(size, wanted):
            return name
    return None


def _has_gpus(size: InstanceType, wanted: Hardware) -> bool:
    """Whether a type has the GPUs, of the model that is named; one that wants none gets none."""
    if not wanted.gpus:
        return not size.gpu
    return size.gpu >= wanted.gpus and wanted.gpu.lower() in (size.gpu_model or "").lower()
