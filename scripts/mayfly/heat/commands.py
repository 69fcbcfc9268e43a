"""`mayfly heat`: a template by questions, flags or a job file, and the end of its stack."""

# typer makes options of parameters; `_wanted` reads those that no body names.
# ruff: noqa: ARG001, PLR0913, PLR0917

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from mayfly.console import emit
from mayfly.errors import UserError
from mayfly.heat import output, questions, stack
from mayfly.heat.job import HeatJob, check_cidr, job_file_values, make_job
from mayfly.heat.repository import check_repository
from mayfly.heat.subnet import DEFAULT_CIDR, parse_cidr
from mayfly.heat.template import build, dump, node_names, notices
from mayfly.spec import parse_duration, s3_uri


class _TemplateByDefault(TyperGroup):
    """`mayfly heat --repo …` is `mayfly heat template --repo …`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words = args if args and args[0] in self.commands else ["template", *args]
        return super().parse_args(ctx, words)


app = typer.Typer(help="OpenStack without IM: a Heat template.", cls=_TemplateByDefault)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
_DEFAULTS = {"max_duration": "45m", "start_timeout": "15m"}  # as one types them
# Parameters of `template` that are no settings of the job.
_OWN = ("job", "to", "force", "check", "as_json", "debug")


def _help(field: str) -> str:
    """The description of a setting, which the model holds, and its default."""
    setting = HeatJob.model_fields[field]
    text = " ".join((setting.description or "").split())
    default = _DEFAULTS.get(field, setting.get_default())
    if isinstance(default, bool) or default in (None, "", ()) or setting.is_required():
        return text
    shown = " ".join(default) if isinstance(default, tuple) else default
    return f"{text} [default: {shown}]"


def _flag(field: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=_help(field), **more)


@app.command(
    epilog="Example: mayfly heat template --repo https://example.org/team/repo.git"
    " --entrypoint train.py --workers 2; mayfly heat (asks four questions)",
)
def template(
    context: typer.Context,
    job: Annotated[
        Path | None, typer.Argument(metavar="[JOB]", help="Job file with engine torch.")
    ] = None,
    repository: Annotated[str | None, _flag("repository", "--repo")] = None,
    workers: Annotated[int | None, _flag("workers")] = None,
    directory: Annotated[str | None, _flag("directory")] = None,
    entrypoint: Annotated[str | None, _flag("entrypoint")] = None,
    ref: Annotated[str | None, _flag("ref")] = None,
    arguments: Annotated[str | None, _flag("arguments")] = None,
    launcher: Annotated[str | None, _flag("launcher")] = None,
    processes: Annotated[int | None, _flag("processes")] = None,
    accelerator: Annotated[str | None, _flag("accelerator")] = None,
    max_duration: Annotated[str | None, _flag("max_duration")] = None,
    start_timeout: Annotated[str | None, _flag("start_timeout")] = None,
    image: Annotated[str | None, _flag("image")] = None,
    image_user: Annotated[str | None, _flag("image_user")] = None,
    main_flavor: Annotated[str | None, _flag("main_flavor")] = None,
    worker_flavor: Annotated[str | None, _flag("worker_flavor")] = None,
    key: Annotated[str | None, _flag("key")] = None,
    reservation: Annotated[str | None, _flag("reservation")] = None,
    external_network: Annotated[str | None, _flag("external_network")] = None,
    cidr: Annotated[str | None, _flag("cidr")] = None,
    main_address: Annotated[str | None, _flag("main_address")] = None,
    dns: Annotated[list[str] | None, _flag("dns")] = None,
    security_groups: Annotated[
        list[str] | None, _flag("security_groups", "--security-group")
    ] = None,
    ssh_from: Annotated[str | None, _flag("ssh_from")] = None,
    results: Annotated[str | None, _flag("results")] = None,
    s3_endpoint: Annotated[str | None, _flag("s3_endpoint")] = None,
    s3_region: Annotated[str | None, _flag("s3_region")] = None,
    keep: Annotated[bool, _flag("keep", "--keep")] = False,
    to: Annotated[str, typer.Option("--output", "-o", help="File; - prints.")] = "template.yml",
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
    check: Annotated[
        bool, typer.Option("--check/--no-check", help="Look into the repository first.")
    ] = True,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Write a Heat template: distributed PyTorch training on nodes that switch themselves off.

    Without flags it asks four questions. `mayfly heat delete STACK` removes what is left."""
    path = None if to == output.STANDARD_OUTPUT else Path(to)
    if path is not None:
        output.check_free(path, force=force)
    wanted = _wanted(context, check_repository if check else None)
    text = dump(build(wanted))
    for notice in notices(wanted, text):
        sys.stderr.write(f"mayfly: the template may be refused: {notice}\n")
    if path is None:
        emit({**_document(wanted, to), "text": text}, text.rstrip("\n"), as_json=as_json)
        return
    output.write_template(text, path, force=force)
    emit(_document(wanted, to), _next_steps(wanted, path), as_json=as_json)


@app.command(epilog="Example: mayfly heat delete my-training")
def delete(
    name: Annotated[str, typer.Argument(metavar="STACK", help="Name or id of the stack.")],
    timeout: Annotated[str, typer.Option(help="How long to wait until it is gone.")] = "15m",
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Delete a stack made from our template, and check that all of it is gone."""
    try:
        seconds = parse_duration(timeout)
    except ValueError as error:
        raise UserError(f"timeout is {timeout!r}", str(error)) from None
    done = stack.delete(stack.connect(), name, seconds)
    text = (
        f"stack {name}: deleted; {done.resources} resources are gone"
        if done.found
        else f"stack {name}: there is none"
    )
    document = {"ok": True, "stack": name, "found": done.found, "resources": done.resources}
    emit(document, text, as_json=as_json)


def _wanted(context: typer.Context, look: Callable[[HeatJob], None] | None) -> HeatJob:
    """The job by flags over the job file, or by answers to the questions; `look` was taken."""
    given = context.params
    flags = {name: value for name, value in given.items() if name not in _OWN and _is_given(value)}
    if flags.get("results"):
        flags["results"] = _checked("results", s3_uri, flags["results"])
    look = look or (lambda _: None)
    if given["job"] or set(flags) & {"repository", "entrypoint", "workers", "directory"}:
        file = job_file_values(Path(given["job"]), os.environ) if given["job"] else {}
        wanted = make_job({**file, **flags})
        look(wanted)
        return wanted
    if not sys.stdin.isatty():
        raise UserError(
            "nothing to make a template of: no repository and no terminal to ask on",
            "give --repo URL and --entrypoint FILE, or a job file",
        )
    cidr = _checked("cidr", check_cidr, flags.get("cidr") or DEFAULT_CIDR)
    return questions.ask_until_found(
        parse_cidr(cidr),
        lambda question, offer: str(typer.prompt(question, default=offer, err=True)),
        lambda text: typer.echo(text, err=True),
        lambda answers: make_job({**answers, **flags}),
        look,
    )


def _is_given(value: Any) -> bool:
    """Whether a flag was on the command line; typer gives () for a list that was not."""
    return bool(value) or (value == 0 and value is not False)


def _checked(name: str, check: Any, value: str) -> Any:
    try:
        return check(value)
    except ValueError as error:
        raise UserError(f"{name} is {value!r}", str(error)) from None


def _document(job: HeatJob, to: str) -> dict[str, Any]:
    return {
        "ok": True,
        "template": to,
        "nodes": len(node_names(job)),
        "create_complete_means": job.waits_for,
        "job": job.model_dump(mode="json"),
    }


def _next_steps(job: HeatJob, path: Path) -> str:
    """What to type now."""
    key = "" if job.key else " --parameter key=KEY"
    secrets = (
        " --parameter s3_access_key_id=… --parameter s3_secret_access_key=…" if job.results else ""
    )
    meaning = {
        "trained": "CREATE_COMPLETE means trained; CREATE_FAILED says which node failed, and why",
        "started": "CREATE_COMPLETE means that training started",
    }[job.waits_for]
    return (
        f"wrote {path}: {job.machines}. {meaning}.\n"
        f"  in the dashboard: Orchestration > Stacks > Launch Stack, and choose {path.name}\n"
        f"  or: openstack stack create -t {path}{key}{secrets} STACK\n"
        f"  in the end: mayfly heat delete STACK"
    )
