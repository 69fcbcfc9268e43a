"""A recipe as the head and the workers read it: checked by the control side, plain, and frozen."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

VERSION = 1
GRID, RANDOM, TPE = "grid", "random", "tpe"
MAXIMIZE = "maximize"  # else a search minimizes


@dataclass(frozen=True)
class Parameter:
    """What one placeholder may stand for.

    `kind` is `values` or `integers` (part of the product), `uniform`, `loguniform`, `int` or
    `choice` (drawn for each sample), or `glob` (files that are looked up when they are there).
    """

    name: str
    kind: str
    values: tuple[Any, ...] = ()
    low: float = 0
    high: float = 0
    pattern: str = ""

    @property
    def drawn(self) -> bool:
        """Whether each sample draws it, instead of the product listing it."""
        return self.kind in ("uniform", "loguniform", "int", "choice")


@dataclass(frozen=True)
class Search:
    """How samples are chosen, and what makes one the best."""

    sampler: str = RANDOM
    seed: int = 0
    objective: str = ""
    direction: str = MAXIMIZE
    generation: int = 8
    """How many trials a guided sampler asks for before it is told of any of them."""
    stop_after: int = 0
    """The median rule stops no task before this step; 0: there is no rule."""


@dataclass(frozen=True)
class Hardware:
    """What one task takes of a node; memory in bytes."""

    cpus: float = 1.0
    memory: int = 0
    gpus: int = 0
    nodes: int = 1
    """How many of all this one task takes at once."""
    gpu: str = ""
    instance: str = ""
    spot: bool = True


@dataclass(frozen=True)
class Experiment:
    """Tasks of one kind: a command, and what its placeholders stand for."""

    name: str
    command: tuple[str, ...]
    """Lines that run one after another; the first that fails is the last."""
    parameters: tuple[Parameter, ...] = ()
    needs: tuple[str, ...] = ()
    shell: bool = False
    environment: tuple[tuple[str, str], ...] = ()
    samples: int = 0
    """0: the whole product."""
    search: Search = Search()
    hardware: Hardware = Hardware()
    workers: int = 0
    """The most tasks at a time; 0: as many as there is room for."""
    task_retries: int = 2
    node_retries: int = 20
    timeout_s: int = 0
    """0: none."""
    result: str = "result.json"
    """Where a task leaves its results, below its output directory."""


@dataclass(frozen=True)
class Recipe:
    """Experiments in an order that suits what they need."""

    name: str
    experiments: tuple[Experiment, ...]
    image: str = ""
    data: str = ""
    """Where `{{data}}` is, when it is not below the run's own address."""

    def experiment(self, name: str) -> Experiment:
        """The experiment of this name, which there is."""
        return next(each for each in self.experiments if each.name == name)

    def to_json(self) -> dict[str, Any]:
        """What `from_json` takes."""
        return {"version": VERSION, **_plain(self)}

    @property
    def digest(self) -> str:
        """SHA-256 over all that decides what is run."""
        return hashlib.sha256(canonical(self.to_json()).encode()).hexdigest()


def canonical(document: Any) -> str:
    """JSON text that is the same to the byte for the same content."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def from_json(document: dict[str, Any]) -> Recipe:
    """The recipe in a document that `Recipe.to_json` has made."""
    experiments = tuple(_experiment(item) for item in document["experiments"])
    return Recipe(
        name=document["name"],
        experiments=experiments,
        image=document["image"],
        data=document["data"],
    )


def _experiment(item: dict[str, Any]) -> Experiment:
    return Experiment(
        **{
            **item,
            "command": tuple(item["command"]),
            "needs": tuple(item["needs"]),
            "environment": tuple((name, text) for name, text in item["environment"]),
            "parameters": tuple(
                Parameter(**{**each, "values": tuple(each["values"])})
                for each in item["parameters"]
            ),
            "search": Search(**item["search"]),
            "hardware": Hardware(**item["hardware"]),
        }
    )


def _plain(value: Any) -> Any:
    if hasattr(value, "__dataclass_fields__"):
        return {name: _plain(getattr(value, name)) for name in value.__dataclass_fields__}
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return value
