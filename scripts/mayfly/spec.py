"""What the user asks for: the job file, checked once, as one frozen `ClusterSpec`.

`load_spec` merges the layers (flags over file over environment over defaults) and validates them.
Everything after it takes the result and never looks at a file, a flag or the environment again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from mayfly.engines import (
    COMMAND,
    ENGINES,
    ESTIMATOR,
    FRAMEWORKS,
    PREPROCESSED,
    PROGRAM_FRAMEWORKS,
    PROGRAMS,
    TFRECORD,
)
from mayfly.errors import UserError, nearest

CHECKOUT = Path(__file__).resolve().parents[2]
COLLECTION = "mayfly.training"  # as galaxy.yml names it
DEFAULT_JOB = CHECKOUT / "training/jobs/default.yml"
JUICEFS = "juicefs"

# Samples in a global step where a program's own default is another than the common one.
BATCH_SIZE = 128
BATCH_SIZES = dict.fromkeys((name for name in PROGRAMS if name.startswith("builtin:mnist_")), 64)

# The short names of flags and of MAYFLY_<NAME> variables, and the key of the job file each sets.
SHORT_NAMES = {
    "name": "name",
    "cloud": "cloud",
    "region": "region",
    "image": "image",
    "ps": "nodes.ps.count",
    "workers": "nodes.worker.count",
    "engine": "trainer.engine",
    "mode": "trainer.mode",
    "steps": "trainer.steps",
    "bucket": "model.destination",
    "budget": "limits.budget",
    "collection": "collection",
    "tensorboard": "tensorboard",
}

Scalar = bool | int | float | str
_SCALARS = ["boolean", "number", "string"]
_ARGS_SCHEMA = {
    "type": "object",
    "additionalProperties": {"type": [*_SCALARS, "array"], "items": {"type": _SCALARS}},
}

_DURATION = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")
_BUDGET = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Z]{3})")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_PREFIX = re.compile(r"[A-Za-z0-9._=+/-]*")
_GIT = re.compile(
    r"git\+(?P<url>(?P<scheme>https?|ssh|git|file)://(?:(?P<user>[^\s'\"/@]+)@)?[^\s'\"/@]*/[^\s'\"@]+)"
    r"(?:@(?P<ref>\w[\w./-]*))?"
)
_RELEASE = re.compile(r"\d+\.\d+\.\d+([-+][0-9A-Za-z.+-]+)?")
_TARBALL = re.compile(r"https?://[^\s'\"/@,?#]+/[^\s'\"@,?#]+\.tar\.gz")
_TEMPLATE_MARKS = ("{{", "{%", "{#", "@input.")
_SECRET_NAME = re.compile(r"SECRET|PASSW|TOKEN|ACCESS_KEY|PRIVATE_KEY|CREDENTIAL", re.IGNORECASE)
_URL_USER = re.compile(r"(?<=://)[^/@\s]*@")


def without_users(text: str) -> str:
    """A text to show, without the users and passwords of the URLs in it."""
    return _URL_USER.sub("…@", text)


# --- values -----------------------------------------------------------------------------------


def parse_duration(value: object) -> int:
    """Seconds in a duration such as `4h`, `20m`, `1h30m` or a whole number of seconds."""
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    text = str(value).strip()
    match = _DURATION.fullmatch(text)
    if text and match:
        days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
        total = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
        if total > 0:
            return total
    raise ValueError("write a duration such as 90s, 20m, 4h or 1h30m")


def s3_uri(value: str) -> str:
    """`value` as `s3://bucket/prefix/`, always with a final slash; a bare bucket name is accepted.

    Bucket names follow S3's rules for general purpose buckets:
    https://docs.aws.amazon.com/AmazonS3/latest/userguide/bucketnamingrules.html
    """
    uri = value if "://" in value else f"s3://{value}"
    scheme, _, rest = uri.partition("://")
    bucket, _, prefix = rest.partition("/")
    if scheme != "s3" or not _BUCKET.fullmatch(bucket) or ".." in bucket:
        raise ValueError("write s3://bucket/prefix/ (bucket: 3 to 63 of a-z, 0-9, dot and dash)")
    return f"s3://{bucket}/{_key_prefix(prefix)}"


def split_s3_uri(uri: str) -> tuple[str, str]:
    """The bucket and the key prefix (empty, or ending in a slash) of a checked S3 URI."""
    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    return bucket, prefix


def _key_prefix(prefix: str) -> str:
    parts = prefix.rstrip("/").split("/") if prefix.strip("/") else []
    if not _PREFIX.fullmatch(prefix) or any(part in ("", ".", "..") for part in parts):
        raise ValueError("write the path as plain words between single slashes, without . or ..")
    return "".join(f"{part}/" for part in parts)


def _data_source(value: str) -> str:
    """An S3 URI, or a path that is looked up in the bucket of `model.destination`."""
    return s3_uri(value) if "://" in value else _key_prefix(value)


def _relative_path(value: str) -> str:
    parts = Path(value).parts
    if value.startswith("/") or ".." in parts or not re.fullmatch(r"[\w./ +-]+", value):
        raise ValueError("write a path inside the program's repository, without ..")
    return value


def _engine(value: object) -> object:
    if value not in ENGINES:
        guess = nearest(str(value), ENGINES)
        raise ValueError(f"did you mean {guess!r}?" if guess else f"known: {', '.join(ENGINES)}")
    return value


def _plain(value: Any) -> Any:
    """`value`, refused where Ansible or an IM client would read it as a template."""
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, str) and any(mark in item for mark in _TEMPLATE_MARKS):
            raise ValueError(f"contains one of {' '.join(_TEMPLATE_MARKS)}: nodes would expand it")
        if isinstance(item, str) and not item.isprintable():
            raise ValueError("contains a line break or another control character")
    return value


def _command(value: object) -> object:
    """The words of a command; text is read by bash, which ends at the first command that fails."""
    if isinstance(value, str) and value.strip():
        return ["bash", "-e", "-o", "pipefail", "-c", value.strip("\n")]
    if not (isinstance(value, list) and value and all(isinstance(word, str) for word in value)):
        raise ValueError("write text for bash, or a list of words")
    return value


def _command_words(words: tuple[str, ...]) -> tuple[str, ...]:
    for word in words:
        _plain(word.replace("\n", " ").replace("\t", " "))
        if re.search(r"^\s*@", word, re.MULTILINE):
            raise ValueError("has a line that begins with @, which ends a block of RADL")
    return words


Command = Annotated[
    tuple[str, ...],
    BeforeValidator(_command),
    AfterValidator(_command_words),
    WithJsonSchema({"type": ["string", "array"], "items": {"type": "string"}}),
]


def _environment(value: object) -> object:
    """Variables as text; one that looks like a secret's is refused, for it would be written."""
    if not isinstance(value, dict):
        return value
    for name, text in value.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", str(name)):
            raise ValueError(f"{name!r} is not a variable's name: use letters, digits and _")
        if _SECRET_NAME.search(str(name)):
            raise ValueError(f"{name} looks like a secret, and would be written into the RADL")
        if not isinstance(text, Scalar):
            raise ValueError(f"{name} must be text, a number, true or false")
        _plain(text)
    return {name: str(text) for name, text in value.items()}


Duration = Annotated[
    int,
    BeforeValidator(parse_duration),
    WithJsonSchema({"type": ["string", "integer"], "examples": ["90s", "20m", "4h", "1h30m"]}),
]
S3Uri = Annotated[str, AfterValidator(s3_uri)]
RelativePath = Annotated[str, AfterValidator(_relative_path)]


class Model(BaseModel):
    """What all parts of the job file share: frozen, unknown keys refused, defaults validated."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


@dataclass(frozen=True)
class GitSource:
    """Where a program lives in Git; `ref` is empty for the repository's default branch."""

    url: str
    ref: str


def parse_git(program: str) -> GitSource:
    """The parts of `git+URL[@ref]`. Raises ValueError when it has another form."""
    match = _GIT.fullmatch(program)
    if not match:
        raise ValueError(
            "write builtin:NAME, or git+https://host/repository[@branch, tag or commit]"
        )
    user = match["user"]
    if user and (match["scheme"] != "ssh" or ":" in user):
        raise ValueError("has credentials in its URL, which would be written into the RADL")
    return GitSource(match["url"], match["ref"] or "")


def collection_name(value: str) -> str:
    """A job's `collection` as IM's application names it: `mayfly.training,1.2.0`.

    Raises ValueError when it is neither a version, nor a tag in Git, nor a tarball's URL.
    """
    if _RELEASE.fullmatch(value):
        return f"{COLLECTION},{value}"
    if _TARBALL.fullmatch(value):
        return value
    if not value.startswith("git+") or "," in value:
        raise ValueError(
            "write a version (1.2.0), git+https://host/repository@tag, or the URL of a .tar.gz"
            " without a query, which may be a secret and would be written into the RADL"
        )
    git = parse_git(value)
    if not git.ref:
        raise ValueError("names no tag, so that each node could get other roles: add @tag")
    return f"git+{git.url},{git.ref}"


def _collection(value: str) -> str:
    collection_name(value)
    return str(_plain(value))


# --- the job file -----------------------------------------------------------------------------


class NodeGroup(Model):
    """The nodes of one kind."""

    count: int = Field(ge=1)
    """How many nodes."""
    instance: str | None = Field(default=None, pattern=r"^[A-Za-z0-9._-]+$")
    """Instance type of the cloud; the cloud's default when empty. CLOUD=local has none."""
    gpu: int = Field(default=0, ge=0)
    """How many GPUs each node must have; an instance type without them is refused, and so is a node
    whose driver shows fewer, before it trains."""
    spot: bool | Literal["prefer"] = False
    """Take interruptible capacity; `prefer` does where the cloud and its IM have that at all, and
    else pays in full. When there is no room for it now, only another offer (`any_of`) helps."""


class ParameterServers(NodeGroup):
    """The parameter servers; the first one also runs the HDFS NameNode, without any it is on the
    first worker."""

    count: int = Field(default=1, ge=0)
    """How many parameter servers; engine torch has none."""


class Workers(NodeGroup):
    """The trainers; the first one is the chief (torch: it is where the others meet)."""

    count: int = Field(default=2, ge=1)
    """How many workers, the chief included."""


class Nodes(Model):
    """The machines of the cluster."""

    ps: ParameterServers = ParameterServers()
    """The parameter servers."""
    worker: Workers = Workers()
    """The workers."""


class ChoiceTypes(Model):
    """Instance types of an offer, by group; the job's own where empty."""

    ps: str | None = Field(default=None, pattern=r"^[A-Za-z0-9._-]+$")
    """Of the parameter servers."""
    worker: str | None = Field(default=None, pattern=r"^[A-Za-z0-9._-]+$")
    """Of the workers."""


class Choice(Model):
    """One offer: a place and types that the job would take. What is left out is the job's own."""

    region: str | None = Field(default=None, pattern=r"^[A-Za-z0-9-]+$")
    """Region of the cloud."""
    zone: str | None = Field(default=None, pattern=r"^[A-Za-z0-9._-]+$")
    """Availability zone in it."""
    instance: ChoiceTypes = ChoiceTypes()
    """Instance types by group."""
    spot: bool | Literal["prefer"] | None = None
    """Whether the workers are interruptible, as in `nodes.worker.spot`."""


class Network(Model):
    """Networks of the cloud to use, by name or identifier, where IM would pick the wrong one."""

    public: str | None = Field(default=None, pattern=r"^[\w.-]+$")
    """The one with public addresses."""
    private: str | None = Field(default=None, pattern=r"^[\w.-]+$")
    """The one between the nodes."""


class Trainer(Model):
    """What trains, and how long."""

    engine: Annotated[
        str, BeforeValidator(_engine), Field(json_schema_extra={"enum": [*ENGINES]})
    ] = ESTIMATOR
    """How tasks find each other and share the model: `estimator` (TensorFlow 2.15 Estimator with
    parameter servers), `torch` (torchrun, and gradients averaged over gloo or NCCL), `horovod`,
    `keras-ps` and `mwms` (current TensorFlow's ParameterServerStrategy and MultiWorkerMirrored),
    `tf-server` (TensorFlow's own servers, for scripts older than Estimator) or `command` (your
    command on every node)."""
    framework: Annotated[str | None, Field(json_schema_extra={"enum": [*FRAMEWORKS, None]})] = None
    """What is installed for the program: `tensorflow` (2.15), `tensorflow2` (2.21, Keras 3) or
    `torch`; empty: the program's or the engine's."""
    mode: Literal["async", "sync"] = "async"
    """`async`: each worker updates the parameter servers alone; `sync`: all average first.
    Most engines have one of the two. With `sync` a run fails without one of its workers."""
    program: str = "builtin:cifar10"
    """`builtin:NAME`, or `git+https://host/repository[@ref]`."""
    directory: RelativePath = "."
    """Directory inside the Git repository where the program runs."""
    entrypoint: RelativePath | None = None
    """Python file to run, seen from `directory`; needed with a Git repository."""
    command: Annotated[Command | None, Field(min_length=1)] = None
    """What engine `command` runs on every node, in the program's directory: a list of words, or
    text that bash reads. The cluster is in its environment."""
    steps: int = Field(default=1600, ge=1)
    """Global steps: all workers together, so samples seen do not depend on their number."""
    environment: Annotated[dict[str, str], BeforeValidator(_environment)] = Field(
        default_factory=dict
    )
    """Variables for the program's environment. It is written into the RADL: no secrets."""
    args: Annotated[dict[str, Any], WithJsonSchema(_ARGS_SCHEMA)] = Field(default_factory=dict)
    """Further arguments: `key_name: value` becomes `--key-name value`, true becomes the bare flag,
    a list repeats the flag. `batch_size` also turns steps into samples (128 when absent, 64 for
    builtin:mnist_…)."""

    @property
    def runtime(self) -> str:
        """The framework that is installed."""
        own = PROGRAM_FRAMEWORKS.get(self.program, ENGINES[self.engine].frameworks[0])
        return self.framework or own

    @property
    def batch_size(self) -> int:
        """Examples in one global step, whatever the number of workers."""
        return int(self.args.get("batch_size", BATCH_SIZES.get(self.program, BATCH_SIZE)))

    @field_validator("program")
    @classmethod
    def _known_form(cls, program: str) -> str:
        name = program.removeprefix("builtin:")
        if program.startswith("builtin:"):
            if not re.fullmatch(r"[a-z0-9_]+", name):
                raise ValueError("write builtin:NAME, NAME in a-z, 0-9 and _")
        else:
            parse_git(program)
        return str(_plain(program))

    @field_validator("args")
    @classmethod
    def _safe_arguments(cls, args: dict[str, Any]) -> dict[str, Any]:
        for key, value in args.items():
            if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", key):
                raise ValueError(f"{key!r} is not an argument's name: use letters, digits, _ and -")
            if not all(
                isinstance(x, Scalar) for x in (value if isinstance(value, list) else [value])
            ):
                raise ValueError(f"{key!r} must be text, a number, true, false or a list of these")
            _plain(value)
        batch = args.get("batch_size", 1)
        if isinstance(batch, bool) or not isinstance(batch, int) or batch < 1:
            raise ValueError(f"batch_size is {batch!r}: write a whole number above 0")
        return args

    @model_validator(mode="after")
    def _entrypoint_goes_with_git(self) -> Trainer:
        if (self.command is None) != (self.engine != COMMAND):
            raise ValueError(
                f"engine is {self.engine!r}: command goes with engine command, which needs one"
            )
        if self.engine == COMMAND and self.entrypoint is not None:
            raise ValueError("entrypoint goes with other engines: name the file in command")
        git = self.program.startswith("git+")
        if git and self.entrypoint is None and self.engine != COMMAND:
            raise ValueError("entrypoint is missing: name the Python file that the program starts")
        if self.program.startswith("builtin:") and self.entrypoint is not None:
            raise ValueError(
                "entrypoint goes with a Git repository: remove it for a built-in program"
            )
        return self


class Preprocess(Model):
    """What the workers convert the data to, together, before they train."""

    to: Literal["tfrecord", "tensors"]
    """`tensors`: NumPy files of float32 images with their labels; `tfrecord`: records as
    `mayfly data put` makes them, or with float32 images when `mean` and `std` are given."""
    shards: int | None = Field(default=None, ge=1)
    """Files of the training split, each made by one worker at a time; empty: four for each worker,
    at least eight. Other splits get files of the same size."""
    mean: float | None = Field(default=None, allow_inf_nan=False)
    """Taken from pixels that go from 0 to 1; 0.1307 for MNIST's programs. Goes with `std`."""
    std: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """What the rest is divided by; 0.3081 for MNIST's programs."""
    image_size: int = Field(default=224, ge=1)
    """Side in pixels that image files are resized to; IDX files keep their size."""

    @property
    def normalise(self) -> list[float]:
        """Mean and standard deviation; empty without."""
        return [] if self.mean is None or self.std is None else [self.mean, self.std]

    @model_validator(mode="after")
    def _mean_goes_with_std(self) -> Preprocess:
        if (self.mean is None) != (self.std is None):
            raise ValueError("mean and std go together: give both or neither")
        return self


class Data(Model):
    """The training data."""

    source: Annotated[str, AfterValidator(_data_source)] = "datasets/fashion-mnist/"
    """`s3://bucket/prefix/`, or a prefix in the bucket of `model.destination`. It holds a
    manifest.json, written by `mayfly data put`."""
    format: Literal["tfrecord", "files"] = "tfrecord"
    """How the data lies there: `tfrecord`, to which `mayfly data put` converts, or `files`, as they
    were (`mayfly data put --format files`)."""
    preprocess: Preprocess | None = None
    """Convert the data on the nodes before training: MNIST's IDX files, or a directory of images
    for each class, put with `--format files`. Empty: programs read it as it is."""


class ModelOutput(Model):
    """Where the trained model goes."""

    destination: S3Uri | None = None
    """`s3://bucket/prefix/`; the run gets a directory of its own below it. CLOUD=local has one."""


class Budget(Model):
    """An amount of money."""

    amount: float = Field(gt=0)
    """How much."""
    currency: str = Field(pattern=r"^[A-Z]{3}$")
    """ISO 4217 code."""

    def __str__(self) -> str:
        """As it is written in a job file: `5 USD`."""
        return f"{self.amount:g} {self.currency}"


def parse_budget(value: object) -> object:
    """`5 USD` as the fields of a Budget; passes on what has its fields already."""
    if isinstance(value, Budget | Mapping):
        return value
    match = _BUDGET.fullmatch(str(value).strip())
    if not match or float(match[1]) <= 0:
        raise ValueError("write an amount and a currency, such as 5 USD")
    return {"amount": float(match[1]), "currency": match[2]}


class Limits(Model):
    """What ends a run that does not end by itself; durations are in seconds once parsed."""

    budget: Annotated[
        Budget | None,
        BeforeValidator(lambda value: None if value is None else parse_budget(value)),
        WithJsonSchema({"type": "string", "examples": ["5 USD"]}),
    ] = None
    """Most that the run may cost, such as `5 USD`: it is stopped, with its model, before that."""
    max_duration: Duration = 4 * 3600
    """Longest time that training may take, such as `4h`; then it is stopped, with its model."""
    expected: Duration | None = None
    """How long you think that it takes, such as `40m`: the lower end of the plan's price."""
    idle: Duration = 20 * 60
    """Time without a step after which training is stopped, such as `20m`."""


class ClusterSpec(Model):
    """One run, as the user wants it."""

    name: str = Field(default="mayfly", pattern=r"^[a-z][a-z0-9-]*$", max_length=29)
    """What the run is called; its identifier starts with it."""
    cloud: str
    """Where the nodes are made: a file in radl/clouds/."""
    region: str | None = Field(default=None, pattern=r"^[A-Za-z0-9-]+$")
    """Region of the cloud (gcp: zone; egi: site); the cloud's default when empty."""
    zone: str | None = Field(default=None, pattern=r"^[A-Za-z0-9._-]+$")
    """Availability zone, where the cloud lets one choose."""
    any_of: tuple[Choice, ...] | None = Field(default=None, min_length=1)
    """Offers to try until one has room, the cheapest first. Goes without `ordered`."""
    ordered: tuple[Choice, ...] | None = Field(default=None, min_length=1)
    """Offers to try until one has room, in this order."""
    image: str | None = Field(default=None, pattern=r"^[^\s'\"@{}]+$")
    """Image of the nodes instead of the cloud's: the provider's name of it, or IM's image URL."""
    image_user: str | None = Field(default=None, pattern=r"^[a-z_][a-z0-9_-]*$")
    """Login user of the image, when it is not that of the cloud's own image."""
    network: Network = Network()
    """Networks that are there already."""
    nodes: Nodes = Nodes()
    """The machines."""
    trainer: Trainer = Trainer()
    """What trains."""
    data: Data = Data()
    """What it trains on."""
    store: Literal["hdfs", "juicefs"] = "hdfs"
    """Where checkpoints and model are until the export: in `hdfs`, or on a file system with data in
    S3 that every node has mounted (`juicefs`), as a path. Data comes through HDFS with both."""
    model: ModelOutput = ModelOutput()
    """Where the result goes."""
    collection: Annotated[str, AfterValidator(_collection)] | None = None
    """Where nodes get our roles: a version on Ansible Galaxy (`1.2.0`), a tag in Git
    (`git+https://host/repository@tag`) or the URL of a tarball. Empty: those of this checkout,
    which `deploy` puts where nodes can fetch them; a release's from Galaxy."""
    limits: Limits = Limits()
    """What ends the run."""
    tensorboard: bool = True
    """Run TensorBoard on the chief, reached by `mayfly tensorboard`; off with engine torch."""

    @model_validator(mode="after")
    def _one_list_of_offers(self) -> ClusterSpec:
        if self.any_of is not None and self.ordered is not None:
            raise ValueError("any_of and ordered are both set: write the offers into one of them")
        return self

    def count(self, group: str) -> int:
        """How many nodes the group `ps` or `worker` has."""
        return self.nodes.ps.count if group == "ps" else self.nodes.worker.count

    @property
    def shards(self) -> int:
        """In how many files preprocessing makes the training split: enough to share them well."""
        wanted = self.data.preprocess.shards if self.data.preprocess else None
        return wanted or max(8, 4 * self.count("worker"))

    def in_bucket(self, default_bucket: str | None) -> ClusterSpec:
        """The spec with full S3 URIs: `default_bucket` fills an empty destination, and a relative
        data source is looked up in the destination's bucket. Raises UserError without a bucket."""
        destination = self.model.destination
        if destination is None and default_bucket is None:
            raise UserError(
                f"no bucket for the model: cloud {self.cloud!r} has no default",
                "give --bucket NAME, model.destination in the job file, or MAYFLY_BUCKET",
            )
        return self.with_destination(destination or s3_uri(str(default_bucket)))

    def with_destination(self, destination: str) -> ClusterSpec:
        """The spec with this S3 URI for its model, and full URIs for all else."""
        bucket, _ = split_s3_uri(destination)
        source = self.data.source
        if "://" not in source:
            source = f"s3://{bucket}/{source}"
        return self.model_copy(
            update={
                "data": self.data.model_copy(update={"source": source}),
                "model": self.model.model_copy(update={"destination": destination}),
            }
        )


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a job file, for editors."""
    return ClusterSpec.model_json_schema()


# --- loading ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layer:
    """Settings from one place; `origin` says in an error where a value came from."""

    origin: str
    values: dict[str, Any]


def load_spec(
    file: Path | None, overrides: Mapping[str, Any], environ: Mapping[str, str]
) -> ClusterSpec:
    """The validated spec of a run: `overrides` (flags) over `file` over `environ` over defaults.

    `overrides` maps short names (`workers`) or dotted keys (`trainer.args.batch_size`) to values;
    None means not given. Without a file, training/jobs/default.yml stands for the defaults.
    Raises UserError for the first thing that is wrong.
    """
    environment = Layer("the environment", expand(environment_settings(environ)))
    flags = Layer("the command line", expand(overrides))
    if file is None:
        engine = _engine_of([environment, flags])
        layers = [Layer("the default job", read_job(default_job(engine))), environment, flags]
    else:
        layers = [environment, Layer(str(file), read_job(file)), flags]
        chosen = ENGINES.get(_engine_of(layers))
        layers = [Layer("the engine's defaults", chosen.defaults if chosen else {}), *layers]
    return validate(merge(layers), layers)


def default_job(engine: str) -> Path:
    """The job that runs with this engine when no job file is given."""
    own = DEFAULT_JOB.with_name(f"{engine}.yml")
    return own if engine in ENGINES and own.exists() else DEFAULT_JOB


def _engine_of(layers: list[Layer]) -> str:
    """The engine that the layers choose, which is not checked yet."""
    trainer = merge(layers).get("trainer")
    engine = trainer.get("engine") if isinstance(trainer, dict) else None
    return engine if isinstance(engine, str) else ESTIMATOR


def merge(layers: list[Layer]) -> dict[str, Any]:
    """The layers' settings as one mapping; later layers win, mappings merge key by key."""
    result: dict[str, Any] = {}
    for layer in layers:
        result = _merged(result, layer.values)
    return result


def validate(values: dict[str, Any], layers: list[Layer]) -> ClusterSpec:
    """`values` as a ClusterSpec. Raises UserError that names key, value, origin and remedy."""
    try:
        spec = ClusterSpec.model_validate(values)
    except ValidationError as error:
        raise _explain(error, layers) from None
    _require_what_the_engine_needs(spec, layers)
    _require_what_preprocessing_needs(spec, layers)
    return spec


def _require_what_the_engine_needs(spec: ClusterSpec, layers: list[Layer]) -> None:
    """Raise UserError when nodes, mode, framework or program do not go with the engine."""
    trainer, engine = spec.trainer, ENGINES[spec.trainer.engine]

    def refuse(key: str, value: object, advice: str) -> UserError:
        return UserError(f"{key} is {value!r}{_origin(key.split('.'), layers)}", advice)

    why = f"engine {trainer.engine} {engine.why}"
    ps = spec.count("ps")
    if engine.ps is not None and engine.ps != (ps > 0):
        raise refuse("nodes.ps.count", ps, f"must be {'1 or more' if engine.ps else '0'}: {why}")
    if trainer.mode not in engine.modes:
        raise refuse("trainer.mode", trainer.mode, f"must be {engine.modes[0]!r}: {why}")
    if trainer.framework not in (None, *engine.frameworks):
        known = " or ".join(f"{name!r} ({FRAMEWORKS[name]})" for name in engine.frameworks)
        needs = f"must be {known} for engine {trainer.engine}"
        raise refuse("trainer.framework", trainer.framework, needs)
    if trainer.engine not in (COMMAND, *PROGRAMS.get(trainer.program, (trainer.engine,))):
        fitting = [name for name, engines in PROGRAMS.items() if trainer.engine in engines]
        advice = f"is written for engine {' or '.join(PROGRAMS[trainer.program])}: with engine "
        advice += f"{trainer.engine} use {' or '.join(fitting)}, or a program of your own"
        raise refuse("trainer.program", trainer.program, advice)


def _require_what_preprocessing_needs(spec: ClusterSpec, layers: list[Layer]) -> None:
    """Raise UserError when the data cannot be preprocessed, or the program cannot read the result.

    What lies in the bucket is looked at later (`preflight`), before anything is created, too.
    """
    wanted, trainer = spec.data.preprocess, spec.trainer
    if wanted is None:
        return
    if spec.data.format != "files":
        advice = "must be 'files': data.preprocess converts files as they were, and these are "
        advice += "TFRecords already"
        where = _origin(["data", "format"], layers)
        raise UserError(f"data.format is {spec.data.format!r}{where}", advice)
    if trainer.engine == COMMAND or not trainer.program.startswith("builtin:"):
        return
    readable = PREPROCESSED.get(trainer.program)
    if readable != wanted.to:
        advice = f"{trainer.program} reads {readable or 'nothing that is preprocessed'}: "
        advice += f"write {readable}" if readable else "leave data.preprocess out"
        where = _origin(["data", "preprocess", "to"], layers)
        raise UserError(f"data.preprocess.to is {wanted.to!r}{where}", advice)
    if readable == TFRECORD and wanted.normalise:
        where = _origin(["data", "preprocess", "mean"], layers)
        advice = f"leave mean and std out: {trainer.program} reads bytes and scales them itself"
        raise UserError(f"data.preprocess.mean is {wanted.mean}{where}", advice)


def expand(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Short names and dotted keys as nested mappings; settings that are None are left out."""
    result: dict[str, Any] = {}
    for name, value in settings.items():
        if value is None:
            continue
        *parents, last = SHORT_NAMES.get(name, name).split(".")
        place = result
        for parent in parents:
            place = place.setdefault(parent, {})
            if not isinstance(place, dict):
                raise UserError(f"{name}: {parent!r} is set twice", "set it once")
        place[last] = value
    return result


def environment_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """The settings that MAYFLY_<NAME> variables give, such as MAYFLY_BUCKET."""
    pairs = ((name, environ.get(f"MAYFLY_{name.upper()}", "")) for name in SHORT_NAMES)
    return {name: value for name, value in pairs if value}


def parse_assignment(text: str) -> tuple[str, Any]:
    """`key=value` of a --set flag; the value is read as YAML. Raises UserError."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise UserError(f"--set {text!r} is not key=value", "write --set trainer.steps=2000")
    try:
        parsed = yaml.safe_load(value)
    except yaml.YAMLError:
        raise UserError(f"--set {key}: {value!r} is not YAML", "quote the value") from None
    if parsed is None:
        raise UserError(f"--set {key} has no value", "write --set trainer.steps=2000")
    return key, parsed


def read_job(file: Path) -> dict[str, Any]:
    """The job file's content as written. Raises UserError when it cannot be read as a mapping."""
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"cannot read the job file {file}: {error.strerror}",
            "give the path of a job file, or none for the default job",
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{file}, line {mark.line + 1}" if mark else str(file)
        problem = getattr(error, "problem", None) or "not UTF-8 text"
        raise UserError(f"{where} is not YAML: {problem}", "correct it there") from None
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise UserError(f"{file} is not a job file: it is not a mapping", "see mayfly schema")
    return content


def _merged(low: dict[str, Any], high: dict[str, Any]) -> dict[str, Any]:
    result = dict(low)
    for key, value in high.items():
        old = result.get(key)
        both = isinstance(old, dict) and isinstance(value, dict)
        result[key] = _merged(old, value) if both else value  # type: ignore[arg-type]
    return result


_MISSING = {
    "cloud": "choose one with --cloud, CLOUD=, MAYFLY_CLOUD or in the job file;"
    " `mayfly clouds` lists them",
}
_HINTS = {
    "nodes.worker.count": "training needs at least one worker",
    "trainer.steps": "give the number of global steps",
    "name": "use a-z, 0-9 and -, a letter first, 29 at most",
}
# What is wrong with a value, by pydantic's type of error; recipes say the same.
PROBLEMS: dict[str, Callable[[dict[str, Any]], str]] = {
    "greater_than_equal": lambda ctx: f"must be {ctx['ge']} or more",
    "greater_than": lambda ctx: f"must be above {ctx['gt']:g}",
    "int_parsing": lambda _: "must be a whole number",
    "int_type": lambda _: "must be a whole number",
    "int_from_float": lambda _: "must be a whole number",
    "bool_parsing": lambda _: "must be true or false",
    "model_type": lambda _: "must be a mapping of keys",
    "dict_type": lambda _: "must be a mapping of keys",
    "string_type": lambda _: "must be text",
    "string_pattern_mismatch": lambda _: "has characters that are not allowed",
    "too_short": lambda _: "must have one entry or more, or be left out",
    "tuple_type": lambda _: "must be a list",
    "model_attributes_type": lambda _: "must be a mapping of keys",
    "string_too_long": lambda ctx: f"must have {ctx['max_length']} characters at most",
    "literal_error": lambda ctx: f"must be {ctx['expected']}",
}


def _explain(error: ValidationError, layers: list[Layer]) -> UserError:
    """The first of the validation errors, unknown keys before others, as one line."""
    errors = error.errors(include_url=False)
    first = min(errors, key=lambda item: item["type"] != "extra_forbidden")
    path = [str(part) for part in first["loc"]]
    key = ".".join(path) or "the job"
    origin = _origin(path, layers) if path else ""
    if first["type"] == "extra_forbidden":
        return _unknown_key(path, origin)
    if first["type"] == "missing":
        return UserError(f"{key} is not set", _MISSING.get(key, "add it to the job file"))
    context = first.get("ctx", {})
    if first["type"] == "value_error":
        problem = str(context["error"])
    else:
        describe = PROBLEMS.get(first["type"])
        problem = describe(context) if describe else first["msg"]
    shown = without_users(repr(first["input"]))
    value = "" if isinstance(first["input"], dict) else f" is {shown}"
    hint = ": ".join(filter(None, (problem, _HINTS.get(key))))
    return UserError(f"{key}{value}{origin}", hint)


def _unknown_key(path: list[str], origin: str) -> UserError:
    *parents, key = path
    known = _known_keys(parents)
    place = f" in {'.'.join(parents)}" if parents else ""
    guess = nearest(key, known)
    advice = f"did you mean {guess!r}?" if guess else f"known keys: {', '.join(known)}"
    return UserError(f"unknown key {key!r}{place}{origin}", advice)


def _known_keys(parents: list[str]) -> list[str]:
    model: type[BaseModel] = ClusterSpec
    for name in parents:
        if name.isdecimal():
            continue  # a place in a list, whose entries' model is known by now
        nested = list(_models_in(model.model_fields[name].annotation))
        if not nested:
            return []
        model = nested[0]
    return sorted(model.model_fields)


def _models_in(annotation: object) -> Iterator[type[BaseModel]]:
    """The models that an annotation is made of, those inside of lists too."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models_in(part)


def _origin(path: list[str], layers: list[Layer]) -> str:
    for layer in reversed(layers):
        place: Any = layer.values
        for name in path:
            place = place.get(name, _origin) if isinstance(place, dict) else _origin
        if place is not _origin:
            return f" (from {layer.origin})"
    return ""
