"""How tasks are laid out on workers: pure, from what a recipe's tasks take of a node."""

from __future__ import annotations

from dataclasses import dataclass

from mayfly_train.recipe.document import Hardware, Recipe


@dataclass(frozen=True)
class Layout:
    """The worker processes of one node: how many, and how many tasks each runs at a time."""

    processes: int
    slots: int
    devices: bool = False
    """Each process has the GPU of its number, which alone its tasks see."""


def alike(recipe: Recipe) -> bool:
    """Whether every task takes one core of one node, and says nothing else of it."""
    plain = Hardware()
    return all(
        (each.hardware.cpus, each.hardware.memory, each.hardware.gpus, each.hardware.nodes)
        == (plain.cpus, plain.memory, plain.gpus, plain.nodes)
        for each in recipe.experiments
    )


def wants_gpus(recipe: Recipe) -> bool:
    """Whether any task takes a GPU."""
    return any(each.hardware.gpus for each in recipe.experiments)


def layout(recipe: Recipe, slots: int, gpus: int) -> Layout:
    """One process for each GPU, else one for each task at a time; where tasks take more than a
    core, or several nodes, one process that has all of them."""
    if gpus and wants_gpus(recipe):
        return Layout(gpus, 1, devices=True)
    return Layout(slots, 1) if alike(recipe) else Layout(1, slots)


def worker_name(node: str, number: int) -> str:
    """The name of a node's worker process."""
    return f"{node}.{number}"


def node_of(member: str) -> str:
    """The node of a worker: `worker-1` of `worker-1.0-a1b2c3`, where a start has added its own."""
    name = member.rpartition("-")[0] or member
    return name.rpartition(".")[0] or name
