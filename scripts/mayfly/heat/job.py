"""What a template is made from, checked once, as one frozen `HeatJob`.

The checks are functions of one value, so that a question on a terminal and a flag give the same
reason for the same mistake.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from ipaddress import IPv4Network
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, ValidationError, model_validator

from mayfly.errors import UserError, nearest
from mayfly.heat import subnet
from mayfly.spec import ClusterSpec, Duration, Model, S3Uri, load_spec, parse_git

ACCELERATORS = ("auto", "cpu", "gpu")
LAUNCHERS = ("torchrun", "plain")
# A stack's creation ends after an hour on most clouds (Heat's stack_action_timeout), so only a run
# that is over by then can be what the stack waits for. The rest of the hour is for booting.
LONGEST_WAIT_S = 50 * 60
BOOT_S = 9 * 60
SHORTEST_S = 60
# What a value in the stack's form may have: no line break or other control character.
ONE_LINE = r"[^\x00-\x1f\x7f]*"
REF = r"(\w[\w./+-]*)?"


def check_repository(value: str) -> str:
    """An HTTPS Git URL; carried to nodes exactly. Raises ValueError that says what is wrong."""
    if re.match(r"(ssh|git)://|[\w.-]+@[\w.-]+:", value):
        raise ValueError("ssh needs a key, which a template must not hold: give its https:// URL")
    parts = urlsplit(value)
    if parts.scheme != "https" or not parts.hostname or len(parts.path) < len("/x"):
        raise ValueError("write the https:// URL that `git clone` takes")
    if "@" in parts.netloc:
        raise ValueError("has credentials, which everybody who reads the template would see")
    if not value.isascii() or not value.isprintable() or " " in value:
        raise ValueError("has blanks or other characters that no URL has: encode them as %20")
    return value


def check_ref(value: str) -> str:
    """A branch, tag or commit; empty for the repository's default branch."""
    if not re.fullmatch(REF, value):
        raise ValueError("write a branch, a tag or a commit")
    return value


def check_directory(value: str) -> str:
    """A directory in the repository, seen from its root (`.`)."""
    return _inside(value, "the directory of requirements.txt")


def check_entrypoint(value: str) -> str:
    """A Python file, seen from the directory."""
    if not _inside(value, "the Python file").endswith(".py"):
        raise ValueError("is not a Python file: its name must end in .py")
    return value


def check_workers(value: int, network: IPv4Network) -> int:
    """How many workers beside the main node; raises ValueError when the subnet has no room."""
    most = subnet.max_workers(network)
    if not 0 <= value <= most:
        raise ValueError(f"{network} has addresses for 0 to {most} workers beside the main node")
    return value


def check_arguments(value: str) -> str:
    """The entrypoint's arguments, as one would type them in a shell; nothing is expanded."""
    if not re.fullmatch(ONE_LINE, value):
        raise ValueError("has a line break or another control character: write it on one line")
    try:
        shlex.split(value)
    except ValueError as error:
        raise ValueError(f"cannot be split into words ({error}): quote as in a shell") from None
    return value


def check_accelerator(value: str) -> str:
    """What processes compute on."""
    return _one_of(value, ACCELERATORS)


def check_launcher(value: str) -> str:
    """What starts the entrypoint."""
    return _one_of(value, LAUNCHERS)


def check_cidr(value: str) -> str:
    """The stack's subnet."""
    return str(subnet.parse_cidr(value))


def _name(value: str) -> str:
    if not value.strip() or not re.fullmatch(ONE_LINE, value):
        raise ValueError("write the name that `openstack` lists")
    return value


def _addresses(values: tuple[str, ...]) -> tuple[str, ...]:
    for value in values:
        if not re.fullmatch(r"[0-9a-fA-F.:]+", value):
            raise ValueError(f"{value!r} is not an IP address")
    return values


def _endpoint(value: str) -> str:
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
        raise ValueError("write the address of an S3 service: https://host[:port]")
    return value


def _inside(value: str, what: str) -> str:
    """A path that stays in the repository; any printable name is carried exactly."""
    if not value or value != value.strip():
        raise ValueError(f"write {what}, without blanks around it")
    if not value.isprintable():
        raise ValueError("has a line break or another control character")
    if value.startswith(("/", "-", "~")) or ".." in Path(value).parts:
        raise ValueError(f"write {what} as a path inside the repository, without ..")
    return value


def _one_of(value: str, known: tuple[str, ...]) -> str:
    if value not in known:
        guess = nearest(value, known)
        raise ValueError(f"did you mean {guess!r}?" if guess else f"choose {', '.join(known)}")
    return value


Name = Annotated[str, AfterValidator(_name)]


class HeatJob(Model):
    """One training job on OpenStack: a main node and its workers."""

    repository: Annotated[str, AfterValidator(check_repository)]
    """HTTPS URL of the Git repository to clone."""
    entrypoint: Annotated[str, AfterValidator(check_entrypoint)]
    """Python file to run, seen from `directory`."""
    directory: Annotated[str, AfterValidator(check_directory)] = "."
    """Directory of requirements.txt in the repository, where the program runs."""
    workers: int = 2
    """Workers beside the main node, which trains too."""
    ref: Annotated[str, AfterValidator(check_ref)] = ""
    """Branch, tag or commit; empty for the default branch."""
    arguments: Annotated[str, AfterValidator(check_arguments)] = ""
    """Arguments for the entrypoint, quoted as in a shell; nothing in them is expanded."""
    launcher: Annotated[str, AfterValidator(check_launcher)] = "torchrun"
    """`torchrun` (restarts lost processes) or `plain` (python, with the variables set)."""
    processes: int = Field(default=1, ge=1)
    """Processes on each node; one for each GPU."""
    accelerator: Annotated[str, AfterValidator(check_accelerator)] = "auto"
    """`auto`, `cpu` (GPUs are hidden) or `gpu` (a node without enough of them fails at once)."""
    cidr: Annotated[str, AfterValidator(check_cidr)] = subnet.DEFAULT_CIDR
    """The stack's own subnet."""
    main_address: str = ""
    """The main node's address in it; the last one when empty."""
    external_network: Name = "public"
    """Network with a way out, which also gives the floating IP."""
    dns: Annotated[tuple[str, ...], AfterValidator(_addresses)] = ("1.1.1.1", "8.8.8.8")
    """Name servers of the subnet."""
    image: Name = "CC-Ubuntu24.04"
    """Image of all nodes: systemd, python3 and cloud-init (Ubuntu, Debian, Rocky, …)."""
    image_user: Annotated[str, Field(pattern=r"^[a-z_][a-z0-9_-]*$")] = "cc"
    """Who logs in to it: cc on Chameleon's images, ubuntu or debian on those distributions'."""
    main_flavor: Name = "m1.large"
    """Flavour of the main node."""
    worker_flavor: Name = "m1.large"
    """Flavour of the workers."""
    key: str = ""
    """Key pair for SSH; chosen in the stack's form when empty."""
    security_groups: tuple[str, ...] = ()
    """Further security groups of all nodes, beside the stack's own."""
    ssh_from: Annotated[str, AfterValidator(lambda value: str(IPv4Network(value)))] = "0.0.0.0/0"
    """Network from which SSH is let in."""
    reservation: str = ""
    """Blazar reservation of all nodes (Chameleon's bare metal needs one)."""
    max_duration: Duration = 45 * 60
    """Time after which a node ends whatever happens."""
    start_timeout: Duration = 15 * 60
    """How long workers wait for the main node."""
    results: S3Uri | None = None
    """Where logs and results go: s3://bucket/prefix/, on any service with S3's interface."""
    s3_endpoint: Annotated[str, AfterValidator(_endpoint)] | None = None
    """Address of the S3 service; Amazon's when empty. Swift and Ceph have one too."""
    s3_region: Annotated[str, Field(pattern=r"^[A-Za-z0-9-]+$")] = "us-east-1"
    """Region of the S3 service."""
    keep: bool = False
    """Leave the nodes running at the end."""

    @property
    def machines(self) -> str:
        """How many there are, in words."""
        return f"a main node and {self.workers} worker{'' if self.workers == 1 else 's'}"

    @property
    def network(self) -> IPv4Network:
        """The subnet."""
        return IPv4Network(self.cidr)

    @property
    def waits_for(self) -> Literal["trained", "started"]:
        """What CREATE_COMPLETE means: trained, or only started when that takes too long."""
        return "trained" if self.max_duration <= LONGEST_WAIT_S else "started"

    @model_validator(mode="before")
    @classmethod
    def _default_address(cls, values: dict[str, Any]) -> dict[str, Any]:
        if not values.get("main_address"):
            cidr = check_cidr(values.get("cidr") or subnet.DEFAULT_CIDR)
            address = subnet.default_main_address(IPv4Network(cidr))
            return {**values, "main_address": str(address)}
        return values

    @model_validator(mode="after")
    def _fits_together(self) -> HeatJob:
        try:
            check_workers(self.workers, self.network)
        except ValueError as error:
            raise ValueError(f"workers is {self.workers}: {error}") from None
        try:
            subnet.check_main_address(self.main_address, self.network)
        except ValueError as error:
            raise ValueError(f"main address {self.main_address} {error}") from None
        if self.max_duration < SHORTEST_S:
            raise ValueError(f"max duration is {self.max_duration} s: give a minute or more")
        if self.s3_endpoint and self.results is None:
            raise ValueError("an S3 endpoint without results: give --results s3://bucket/prefix/")
        return self


def make_job(values: Mapping[str, Any]) -> HeatJob:
    """The checked job; values that are None count as not given. Raises UserError."""
    try:
        return HeatJob.model_validate({k: v for k, v in values.items() if v is not None})
    except ValidationError as error:
        raise _explain(error) from None


def job_file_values(file: Path, environ: Mapping[str, str]) -> dict[str, Any]:
    """The settings of a job file that concern Heat. Raises UserError for a job that it cannot run.

    The main node is the job file's chief: its `worker.count` includes it.
    """
    spec = load_spec(file, {"cloud": "openstack"}, environ)
    trainer = spec.trainer
    if trainer.program.startswith("builtin:"):
        raise UserError(
            f"trainer.program is {trainer.program!r}, which Heat's nodes do not have",
            "give a Git repository: git+https://host/repository.git",
        )
    if trainer.engine != "torch":
        raise UserError(
            f"trainer.engine is {trainer.engine!r}, and Heat's nodes run PyTorch alone",
            "set trainer.engine: torch",
        )
    if spec.store != "hdfs":
        raise UserError(
            f"store is {spec.store!r}, which Heat's nodes do not have",
            "leave it out: each process has its own directory, and results go to S3",
        )
    if trainer.environment:
        names = ", ".join(trainer.environment)
        raise UserError(
            f"trainer.environment has {names}, which Heat's nodes do not get",
            "let the program set it, or give it as an argument",
        )
    source = parse_git(trainer.program)
    return {
        "repository": source.url,
        "ref": source.ref,
        "directory": trainer.directory,
        "entrypoint": trainer.entrypoint,
        "arguments": shlex.join(_words(spec)),
        "workers": spec.nodes.worker.count - 1,
        "worker_flavor": spec.nodes.worker.instance,
        "main_flavor": spec.nodes.worker.instance,
        "max_duration": spec.limits.max_duration,
        "results": spec.model.destination,
    }


def _words(spec: ClusterSpec) -> list[str]:
    """`trainer.args` as words, by the rule of the job file's reference."""
    words: list[str] = []
    for key, value in spec.trainer.args.items():
        flag = f"--{key.replace('_', '-')}"
        for item in value if isinstance(value, list) else [value]:
            if item is True:
                words.append(flag)
            elif item is not False:
                words += [flag, str(item)]
    return words


def _explain(error: ValidationError) -> UserError:
    """The first error as one line: the flag, the value, what to do."""
    first = error.errors(include_url=False)[0]
    field = ".".join(str(part) for part in first["loc"][:1]).replace("_", " ")
    context = first.get("ctx", {})
    problem = str(context["error"]) if first["type"] == "value_error" else first["msg"]
    if not field:
        return UserError(problem)
    if first["type"] == "missing":
        return UserError(f"no {field}", f"give --{_FLAG.get(field, field)}")
    # Credentials in a URL are not repeated.
    shown = re.sub(r"(?<=://)[^/@\s]*@", "…@", repr(first["input"]))
    return UserError(f"{field} is {shown}", problem)


_FLAG = {"repository": "repo"}
