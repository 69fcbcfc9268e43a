"""What the user writes in a recipe file, as frozen models with unknown keys refused."""

from __future__ import annotations

import math
import re
from collections import Counter
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from mayfly.redact import CREDENTIALS_IN_URL
from mayfly.spec import Duration, Model, Scalar
from mayfly_train.recipe import document
from mayfly_train.recipe.document import GRID, TPE

_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_RANGE = re.compile(rf"\s*({_NUMBER})\s*-\s*({_NUMBER})\s*")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SECRET_NAME = re.compile(r"SECRET|PASSW|TOKEN|ACCESS_KEY|PRIVATE_KEY|CREDENTIAL", re.IGNORECASE)
NAME = r"^[a-z][a-z0-9_]*$"
WORKERS = 4  # tasks at a time, when a recipe does not say


def _ends(value: object) -> object:
    """The two ends of `0.1-0.3` or `[0.1, 0.3]`."""
    if isinstance(value, str) and (match := _RANGE.fullmatch(value)):
        value = [match[1], match[2]]
    if not isinstance(value, list) or len(value) != 2:  # noqa: PLR2004
        raise ValueError("write two numbers such as 0.1-0.3, or [0.1, 0.3]")
    try:
        low, high = (_number(end) for end in value)
    except (TypeError, ValueError):
        raise ValueError("write two numbers such as 0.1-0.3, or [0.1, 0.3]") from None
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ValueError("its ends must be finite")
    if low >= high:
        raise ValueError(f"is upside down or empty: write the lower end first, {high:g}-{low:g}")
    return (low, high)


def _number(text: Any) -> int | float:
    if isinstance(text, bool):
        raise ValueError("no number")
    return int(text) if re.fullmatch(r"[+-]?\d+", str(text)) else float(text)


def _size(value: object) -> object:
    """Bytes in `2G`, `512M` or a whole number."""
    match = _SIZE.fullmatch(str(value).strip())
    if isinstance(value, bool) or not match:
        raise ValueError("write an amount of memory such as 512M or 2G")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def _values(value: Any) -> Any:
    if not isinstance(value, list) or not value:
        raise ValueError("write a list of values, such as [sgd, adam]")
    for item in value:
        if not isinstance(item, Scalar):
            raise ValueError(f"has {item!r}: values are text, numbers, true or false")
        if isinstance(item, str) and not (item.isprintable() or _is_argument(item)):
            raise ValueError(f"has {item!r}: no command can have that character")
    texts = Counter(str(item) for item in value)
    twice, times = texts.most_common(1)[0]
    if times > 1:
        raise ValueError(f"has {twice!r} twice: each value counts once")
    return tuple(value)


def _is_argument(text: str) -> bool:
    try:
        return b"\0" not in text.encode()
    except UnicodeEncodeError:  # half of a pair of surrogates
        return False


def _lines(value: object) -> object:
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list) or not value or not all(isinstance(x, str) for x in value):
        raise ValueError("write text, or a list of lines")
    return tuple(value)


def _names(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _inside(value: str) -> str:
    path = PurePosixPath(value)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise ValueError("is outside of the task's output directory: write a path inside it")
    return value


Range = Annotated[tuple[int | float, int | float], BeforeValidator(_ends)]
Values = Annotated[tuple[Any, ...], BeforeValidator(_values)]
Bytes = Annotated[int, BeforeValidator(_size)]


class Parameter(Model):
    """What a placeholder may stand for; a plain list is `values`."""

    values: Values | None = None
    """Some values, all of which are in the product."""
    range: Range | None = None
    """Two ends. Without `sampling`, whole numbers that are all in the product."""
    sampling: Literal["uniform", "loguniform", "int"] | None = None
    """How each sample draws a number from the range."""
    choice: Values | None = None
    """Some values, of which each sample draws one."""
    glob: str | None = None
    """A pattern; files, or S3 keys and prefixes, that match are in the product."""

    @model_validator(mode="after")
    def _one_kind(self) -> Parameter:
        kinds = [name for name in ("values", "range", "choice", "glob") if getattr(self, name)]
        if len(kinds) != 1:
            has = " and ".join(kinds) or "none"
            raise ValueError(f"takes one of values, range, choice and glob, and has {has}")
        if self.sampling and not self.range:
            raise ValueError("has sampling, which goes with range")
        if self.range:
            self._check_range(*self.range)
        return self

    def _check_range(self, low: float, high: float) -> None:
        whole = isinstance(low, int) and isinstance(high, int)
        if self.sampling == "loguniform" and low <= 0:
            raise ValueError("is loguniform and not above 0: raise the lower end")
        if self.sampling == "int" and not whole:
            raise ValueError("is of whole numbers (int): write both ends as whole numbers")
        if self.sampling is None and not whole:
            raise ValueError("has no end of values: add sampling: uniform or loguniform")

    def plain(self, name: str) -> document.Parameter:
        """For head and workers."""
        if self.range is not None:
            low, high = self.range
            kind = self.sampling or "integers"
            return document.Parameter(name, kind, low=low, high=high)
        if self.glob is not None:
            return document.Parameter(name, "glob", pattern=self.glob)
        if self.choice is not None:
            return document.Parameter(name, "choice", values=self.choice)
        return document.Parameter(name, "values", values=self.values or ())


def _parameter(value: object) -> object:
    if isinstance(value, list):
        return {"values": value}
    return {"values": [value]} if isinstance(value, Scalar) else value


class Stop(Model):
    """When tasks that lag behind are ended."""

    rule: Literal["median"] = "median"
    """Worse than the median of what finished tasks had at the same step."""
    after: int = Field(default=1, ge=1)
    """No task is stopped before this step."""


class Search(Model):
    """How samples are chosen, and which is the best."""

    sampler: Literal["grid", "random", "tpe"] = "random"
    """`grid`: the whole product; `random`; `tpe`: Optuna's, guided by the results so far."""
    seed: int = Field(default=0, ge=0)
    """The same seed, the same samples."""
    objective: str | None = None
    """The key of a task's results that is compared."""
    direction: Literal["maximize", "minimize"] = "maximize"
    """Whether more or less is better."""
    generation: int = Field(default=8, ge=1)
    """Trials that `tpe` asks for at a time; what they found is told before the next are asked."""
    stop: Stop | None = None
    """Ends tasks early."""


class Hardware(Model):
    """What a task takes of its node."""

    cpus: float = Field(default=1.0, gt=0)
    """Cores."""
    memory: Bytes = 0
    """Such as `2G`."""
    gpus: int | None = Field(default=None, ge=0)
    """GPUs."""
    gpu: str | None = None
    """Type of the GPU, such as k80; one of it, unless `gpus` says more."""
    nodes: int = Field(default=1, ge=1)
    """How many nodes with all this one task takes at once; its command runs on each."""
    instance: str | None = None
    """Instance type of the nodes, for the price."""
    spot: bool = True
    """Take interruptible nodes."""

    @model_validator(mode="after")
    def _one_gpu(self) -> Hardware:
        if (self.gpus or 0) > 1:
            raise ValueError(
                f"has {self.gpus} GPUs for a task, which takes one: write gpus: 1 and"
                f" nodes: {self.gpus}, for a process on each"
            )
        return self


class Retries(Model):
    """How often a task is tried again."""

    task: int = Field(default=2, ge=0)
    """After its command has failed."""
    node: int = Field(default=20, ge=0)
    """After its node was lost."""


class Experiment(Model):
    """Tasks of one kind."""

    command: Annotated[tuple[str, ...], BeforeValidator(_lines)]
    """What runs: text, or a list of lines that run one after another. No shell reads it."""
    shell: bool = False
    """Give the lines to bash."""
    parameters: dict[str, Annotated[Parameter, BeforeValidator(_parameter)]] = Field(
        default_factory=dict
    )
    """What the placeholders of the command stand for."""
    samples: int | None = Field(default=None, ge=1)
    """How many tasks are drawn; empty: the whole product."""
    needs: Annotated[tuple[str, ...], BeforeValidator(_names)] = ()
    """Experiments that are done before this one starts."""
    search: Search = Search()
    """How samples are chosen."""
    hardware: Hardware = Hardware()
    """What a task takes."""
    workers: int | None = Field(default=None, ge=1)
    """Most tasks at a time, and how many nodes are wished for."""
    retries: Retries = Retries()
    """How often a task is tried again."""
    timeout: Duration | None = None
    """Longest that one try may take, such as `20m`."""
    environment: dict[str, Any] = Field(default_factory=dict)
    """Variables of the command, which are stored: no secrets."""
    result: Annotated[str, AfterValidator(_inside)] = "result.json"
    """Where a task leaves its results, in its output directory; else a line of JSON it prints."""
    framework: str | None = None
    """What must be installed, such as pytorch."""
    image: str | None = None
    """Runtime or container image."""

    @model_validator(mode="before")
    @classmethod
    def _samples_among_parameters(cls, value: Any) -> Any:
        """As published, `samples` may stand among the parameters."""
        parameters = value.get("parameters") if isinstance(value, dict) else None
        if not isinstance(parameters, dict) or "samples" not in parameters:
            return value
        if "samples" in value:
            raise ValueError("has samples twice: beside the parameters and among them")
        rest = {name: each for name, each in parameters.items() if name != "samples"}
        return {**value, "parameters": rest, "samples": parameters["samples"]}

    @field_validator("parameters")
    @classmethod
    def _plain_names(cls, value: dict[str, Parameter]) -> dict[str, Parameter]:
        for name in value:
            if not re.fullmatch(r"[A-Za-z_]\w*", name) or name in ("data", "output"):
                raise ValueError(f"has {name!r}: take letters, digits and _, not data or output")
        return value

    @field_validator("environment")
    @classmethod
    def _no_secrets(cls, value: dict[str, Any]) -> dict[str, str]:
        for name, text in value.items():
            if not re.fullmatch(r"[A-Za-z_]\w*", name) or not isinstance(text, Scalar):
                raise ValueError(f"has {name!r}: take a variable's name, and text or a number")
            if _SECRET_NAME.search(name) or CREDENTIALS_IN_URL.search(str(text)):
                raise ValueError(f"{name} looks like a secret, and would be stored")
        return {name: str(text) for name, text in value.items()}

    @model_validator(mode="after")
    def _samples_fit(self) -> Experiment:
        drawn = [name for name, each in self.parameters.items() if each.sampling or each.choice]
        if drawn and self.samples is None:
            raise ValueError(f"draws {drawn[0]}, and has no samples: say how many")
        if self.search.sampler == GRID and (self.samples or drawn):
            raise ValueError("has sampler grid, which runs the whole product: leave samples out")
        if self.search.sampler == TPE and not (self.samples and self.search.objective):
            raise ValueError("has sampler tpe, which needs samples and an objective")
        if self.search.stop and not self.search.objective:
            raise ValueError("has a stop rule, which needs search.objective")
        if self.search.stop and self.hardware.nodes > 1:
            raise ValueError("has a stop rule, which ends no task on several nodes: leave it out")
        if self.samples and not self.parameters:
            raise ValueError("has samples and no parameters: say what is drawn")
        return self

    def plain(self, name: str) -> document.Experiment:
        """For head and workers."""
        return document.Experiment(
            name=name,
            command=self.command,
            parameters=tuple(each.plain(key) for key, each in self.parameters.items()),
            needs=self.needs,
            shell=self.shell,
            environment=tuple(self.environment.items()),
            samples=self.samples or 0,
            search=self._search(),
            hardware=self._hardware(),
            workers=self.workers or 0,
            task_retries=self.retries.task,
            node_retries=self.retries.node,
            timeout_s=self.timeout or 0,
            result=self.result,
        )

    def _search(self) -> document.Search:
        search = self.search
        return document.Search(
            sampler=search.sampler,
            seed=search.seed,
            objective=search.objective or "",
            direction=search.direction,
            generation=search.generation,
            stop_after=search.stop.after if search.stop else 0,
        )

    def _hardware(self) -> document.Hardware:
        wanted = self.hardware
        return document.Hardware(
            cpus=wanted.cpus,
            memory=wanted.memory,
            gpus=int(bool(wanted.gpu)) if wanted.gpus is None else wanted.gpus,
            gpu=wanted.gpu or "",
            nodes=wanted.nodes,
            instance=wanted.instance or "",
            spot=wanted.spot,
        )


class RecipeFile(Model):
    """A recipe: experiments, and what is common to them."""

    name: str = Field(pattern=r"^[a-z][a-z0-9-]*$", max_length=40)
    """What the run is called."""
    experiments: dict[Annotated[str, Field(pattern=NAME, max_length=60)], Experiment] = Field(
        min_length=1
    )
    """Tasks of each kind, by name."""
    image: str | None = None
    """Runtime or container image."""
    framework: str | None = None
    """What must be installed, such as pytorch."""
    source: str | None = "."
    """Directory that each task gets a copy of, seen from the recipe; null: none."""
    data: str | None = None
    """What {{data}} stands for; empty: a prefix of the run's own."""

    def plain(self) -> document.Recipe:
        """For head and workers, in the order of the file."""
        experiments = tuple(each.plain(name) for name, each in self.experiments.items())
        image = self.image or self.framework or ""
        return document.Recipe(self.name, experiments, image, (self.data or "").rstrip("/"))
