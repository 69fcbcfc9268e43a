"""The `mayfly` command: one short function per verb."""

# typer makes options of parameters; `_job` and `main` read those that no body names.
# ruff: noqa: ARG001, PLR0913, PLR0917

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from mayfly import access, check, data, logs, views
from mayfly.auth.find import CLOUDS
from mayfly.cloud_commands import around, clouds_command, prices_app
from mayfly.clouds import load_cloud, load_job
from mayfly.console import emit, report_error
from mayfly.deploy import deploy, export_again
from mayfly.destroy import destroyer_of
from mayfly.display import Display, Phases, make_display
from mayfly.dry_run import write as write_artefacts
from mayfly.entry import main, root
from mayfly.errors import UserError
from mayfly.explain import explain_job
from mayfly.heat import commands as heat
from mayfly.job import Job, Tools
from mayfly.ledger import Ledger, Record, Unwritable
from mayfly.local import platform
from mayfly.local.paths import find_paths
from mayfly.meter import cost_of
from mayfly.offer import Offers, Options, about_data, make_offer, make_offers
from mayfly.places import Target
from mayfly.prepare import prepare
from mayfly.radl_lint import lint
from mayfly.recipe import commands as recipe
from mayfly.redact import Redactor, hide
from mayfly.report import make_report, render_terminal, write_html
from mayfly.run_store import RunStore, preprocess_progress
from mayfly.services import LOCAL, Services, open_bucket, reopen_services
from mayfly.spec import CHECKOUT, json_schema, load_spec, parse_assignment
from mayfly.spending import Basis
from mayfly.summary import table
from mayfly.sweep import proof
from mayfly.sweep_commands import gc_command, verify_command
from mayfly_train import convert
from mayfly_train.explain import as_text

app = root()
data_app = typer.Typer(help="Datasets in S3.", no_args_is_help=True)
local_app = typer.Typer(help="What CLOUD=local runs on this machine.", no_args_is_help=True)
app.add_typer(data_app, name="data")
app.add_typer(local_app, name="local")
app.add_typer(heat.app, name="heat")
app.add_typer(prices_app, name="prices")
app.add_typer(recipe.app, name="recipe")
app.command("clouds", epilog="Example: mayfly clouds")(clouds_command)
app.command("verify-clean", epilog="Example: mayfly verify-clean; mayfly verify-clean RUN --json")(
    verify_command
)
app.command("gc", epilog="Example: mayfly gc --cloud aws --region us-east-1 --region eu-west-1")(
    gc_command
)

JobFile = Annotated[
    Path | None, typer.Argument(metavar="[JOB]", help="Job file; the default job when absent.")
]
Run = Annotated[str | None, typer.Argument(metavar="[RUN]", help="Run; the latest when absent.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Cloud = Annotated[str | None, typer.Option(help="Where: a file in radl/clouds/.")]
Workers = Annotated[int | None, typer.Option(help="Number of workers, the chief included.")]
Ps = Annotated[int | None, typer.Option(help="Number of parameter servers.")]
Mode = Annotated[str | None, typer.Option(help="async or sync.")]
Steps = Annotated[int | None, typer.Option(help="Global steps.")]
Engine = Annotated[str | None, typer.Option(help="Training engine.")]
Bucket = Annotated[str | None, typer.Option(help="Bucket, or s3://bucket/prefix/, of the model.")]
Region = Annotated[str | None, typer.Option(help="Region of the cloud.")]
Image = Annotated[str | None, typer.Option(help="Image of the nodes instead of the cloud's.")]
Budget = Annotated[str | None, typer.Option(help="Most that the run may cost, such as '5 USD'.")]
Prices = Annotated[Path | None, typer.Option(help="Price list; docs/costs.md has its form.")]
Inventory = Annotated[
    Path | None, typer.Option(help="Inventory of machines of your own, for --cloud static.")
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Write the artefacts; start, ask and make nothing.")
]
Name = Annotated[str | None, typer.Option(help="Name; the run's identifier starts with it.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Any key of the job file; may be repeated."),
]
LAYOUT = convert.Layout()
BUILD = CHECKOUT / "build"
FLAGS = (
    *("cloud", "workers", "ps", "mode", "steps", "engine", "bucket", "region", "image"),
    *("budget", "name"),
)


def _example(*lines: str) -> str:
    return "Example: " + "; ".join(lines)


@app.command("deploy", epilog=_example("mayfly deploy --cloud local --workers 2"))
def deploy_command(
    context: typer.Context,
    job: JobFile = None,
    cloud: Cloud = None,
    workers: Workers = None,
    ps: Ps = None,
    mode: Mode = None,
    steps: Steps = None,
    engine: Engine = None,
    bucket: Bucket = None,
    region: Region = None,
    image: Image = None,
    budget: Budget = None,
    name: Name = None,
    settings: Set = None,
    prices: Prices = None,
    inventory: Inventory = None,
    dry_run: DryRun = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask before it costs money.")] = False,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the nodes at the end.")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Run a job to its end: nodes, data, training, verified model, nothing left."""
    options = Options(dry_run, prices, inventory)
    offers = _offers(context, options)
    if dry_run:
        _write_only(offers, options, as_json)
        return
    wanted = replace(offers.job, keep=keep)
    asks = wanted.profile.needs_confirmation and not yes
    if asks:
        _confirm(offers, as_json)
    signal.signal(signal.SIGTERM, _interrupt)
    with make_display(plain=as_json) as display:
        asked = None if yes or as_json or not sys.stdin.isatty() else _ask
        tools = replace(_tools(display), ask=asked, price_now=_price_now(options))
        _say_what_is_left(tools.ledger, display)
        if not asks:  # else the table with the question had them
            for notice in offers.all_notices:
                display.say(notice)
        if wanted.profile.needs_confirmation:
            display.say(views.price_line(offers.first.plan))
        outcome = deploy(wanted, tools)
    emit(
        outcome.document,
        table(outcome.document) if outcome.document.get("model_uri") else None,
        as_json=as_json,
    )
    if outcome.error is not None:
        code = report_error(outcome.error, debug=debug, redact=display.redact)
        if run := outcome.document["run"]:
            sys.stderr.write(f"what happened, on one page: mayfly report {run}\n")
        raise typer.Exit(code)


@app.command(epilog=_example("mayfly plan job.yml --workers 4"))
def plan(
    context: typer.Context,
    job: JobFile = None,
    cloud: Cloud = None,
    workers: Workers = None,
    ps: Ps = None,
    mode: Mode = None,
    steps: Steps = None,
    engine: Engine = None,
    bucket: Bucket = None,
    region: Region = None,
    image: Image = None,
    budget: Budget = None,
    name: Name = None,
    settings: Set = None,
    prices: Prices = None,
    inventory: Inventory = None,
    dry_run: DryRun = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Check everything, show what deploy would make, at what price, and write the rendered RADL;
    make no node."""
    options = Options(dry_run, prices, inventory)
    offers = _offers(context, options)
    if dry_run or offers.job.profile.backend == "inventory":
        _write_only(offers, options, as_json)
        return
    with make_display(plain=as_json) as display:
        ready = prepare(offers.job, _tools(display), Phases(display), only_look=True)
    document = views.offers_document(offers, views.ready_document(ready), dry_run=False)
    emit(document, views.plan_table(document), as_json=as_json)


@app.command("check", epilog=_example("mayfly check --cloud aws"))
def check_command(cloud: Cloud = None, as_json: Json = False, debug: Debug = False) -> None:
    """Say what a cloud needs and what of it is missing, and who we are there; make nothing."""
    name = cloud or os.environ.get("MAYFLY_CLOUD")
    if not name:
        raise UserError("no cloud to check", f"choose one with --cloud: {', '.join(CLOUDS)}")
    findings = list(check.look(name, os.environ))
    emit(check.document(name, findings), check.lines(findings), as_json=as_json)
    if code := check.exit_code(findings):
        raise typer.Exit(code)


@app.command("explain", epilog=_example("mayfly explain --engine torch --task worker-0"))
def explain_command(
    context: typer.Context,
    job: JobFile = None,
    task: Annotated[
        str | None, typer.Option(help="Task, such as chief-0 or ps-0; all when absent.")
    ] = None,
    workers: Workers = None,
    ps: Ps = None,
    mode: Mode = None,
    steps: Steps = None,
    engine: Engine = None,
    settings: Set = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Print the command line and the environment that a job's training processes would get.

    Addresses are examples. On a node of a run, `mayfly-node explain` prints the true ones.
    """
    file, overrides = _layers({**context.params, "cloud": LOCAL})
    document = explain_job(load_spec(file, overrides, os.environ), task)
    emit(document, as_text(document["tasks"]), as_json=as_json)


@app.command(epilog=_example("mayfly status"))
def status(run: Run = None, as_json: Json = False, debug: Debug = False) -> None:
    """Show a run: its nodes, its tasks and how far it is."""
    record = _ledger().get(run)
    reported, nodes, shards = None, {}, ""
    if not record.destroyed:
        services = _services(record)
        store = RunStore(services.client, record.uri)
        reported = store.status()
        if reported is None:
            shards, _ = preprocess_progress(store.preprocessing())
        nodes = access.states(services.im, record)
    cost = cost_of(record, _ledger().journal(record.run), reported, datetime.now(UTC))
    document = views.status_document(record, reported, nodes, shards, cost)
    emit(document, views.status_table(document, reported), as_json=as_json)


@app.command("ls", epilog=_example("mayfly ls --json"))
def list_runs(as_json: Json = False, debug: Debug = False) -> None:
    """List the runs that were started from here, newest first."""
    runs = [views.run_document(record) for record in _ledger().runs()]
    emit({"runs": runs}, views.runs_table(runs), as_json=as_json)


@app.command("logs", epilog=_example("mayfly logs", "mayfly logs RUN chief-0 --lines 200"))
def show_logs(
    run: Run = None,
    task: Annotated[str | None, typer.Argument(help="Task, such as chief-0 or ps-0.")] = None,
    lines: Annotated[int, typer.Option(min=1, help="How many of the last lines.")] = 100,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show a task's log: from the bucket when it was uploaded, else from its node."""
    record, task = _run_and_name(run, task)
    services = _services(record)
    found = logs.read(record, task or "chief-0", lines, services.im, services.client)
    found = hide(found, Redactor().knowing(services.s3.secrets))
    emit(found, "\n".join(found["lines"]), as_json=as_json)


@app.command(epilog=_example("mayfly report", "mayfly report RUN --html report.html"))
def report(
    run: Run = None,
    html: Annotated[Path | None, typer.Option(help="Write the page as one HTML file.")] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Say what happened to a run: timeline, first error, who is at fault, what to do next."""
    made = make_report(run, _ledger(), os.environ)
    if html is not None:
        write_html(made, html)
    emit(made, f"wrote {html}" if html else render_terminal(made), as_json=as_json)


@app.command(epilog=_example("mayfly ssh", "mayfly ssh RUN worker-1 -- df -h"))
def ssh(
    context: typer.Context,
    run: Run = None,
    node: Annotated[str | None, typer.Argument(help="Node, such as ps-0 or worker-1.")] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Log in to a node (worker-0, the chief's, when none is named), or run a command there."""
    record, node = _run_and_name(run, node)
    command: list[str] = context.obj or []
    im = _services(record).im
    if as_json:
        emit(access.describe_login(im, record, node, command), None, as_json=True)
    else:
        raise typer.Exit(access.log_in(im, record, node, command))


@app.command(epilog=_example("mayfly tensorboard --port 6006"))
def tensorboard(
    run: Run = None,
    port: Annotated[int, typer.Option(help="Local port; 0 picks a free one.")] = 0,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Open a tunnel to a run's TensorBoard, until Ctrl-C."""
    record = _ledger().get(run)
    with access.tunnel(_services(record).im, record, port) as (url, wait):
        emit({"run": record.run, "url": url}, f"TensorBoard: {url} (Ctrl-C ends)", as_json=as_json)
        wait()


@app.command(epilog=_example("mayfly destroy", "mayfly destroy RUN"))
def destroy(run: Run = None, as_json: Json = False, debug: Debug = False) -> None:
    """Remove what is left of a run, through IM and by a sweep of the account, and prove it.

    Machines of your own are freed of it; see docs/clouds.md.

    Harmless when repeated. On clouds that Mayfly can sweep (aws, openstack) it works without IM.
    A run that another process works on is refused: end that process first, or wait.
    """
    ledger = _ledger()
    record = ledger.get(run)
    already, found = record.destroyed, ledger.proof(record.run)
    if not already:
        already, found = _destroy(record.run, ledger, plain=as_json)
    document = {
        "ok": True,
        "run": record.run,
        "already_destroyed": already,
        "leftovers": 0,
        "proof": found,
    }
    shown = "" if already or found is None else f"{proof.lines(found)}\n"
    text = f"run {record.run}: {'already destroyed' if already else 'destroyed, nothing is left'}"
    emit(document, shown + text, as_json=as_json)


def _destroy(run: str, ledger: Ledger, *, plain: bool) -> tuple[bool, dict[str, Any] | None]:
    """Destroy a run; whether somebody else has done so meanwhile, and the proof."""
    with make_display(plain=plain) as display, ExitStack() as stack:
        _keep_others_off(stack, ledger, run, "mayfly destroy", display.say)
        record = ledger.get(run)
        if record.destroyed:
            return True, ledger.proof(run)
        with Phases(display).phase("destroy") as report:
            services = reopen_services(record, os.environ, _say_what_is_new, need_im=False)
            destroyer = destroyer_of(services, ledger)
            made = destroyer.destroy(record, lambda text: report(text, None))
    return False, proof.document(made)


@app.command("export", epilog=_example("mayfly export", "mayfly export RUN --keep"))
def export_command(
    run: Run = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the nodes afterwards.")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Take up a failed export with the keys of now, and destroy the nodes afterwards."""
    record = _ledger().get(run)
    signal.signal(signal.SIGTERM, _interrupt)
    with make_display(plain=as_json) as display:
        outcome = export_again(record, _tools(display), keep=keep)
    if outcome.error is None:
        emit(outcome.document, table(outcome.document), as_json=as_json)
        return
    emit(outcome.document, None, as_json=as_json)
    raise typer.Exit(report_error(outcome.error, debug=debug, redact=display.redact))


@data_app.command(
    "put",
    epilog=_example("mayfly data put ./faces s3://bucket/datasets/faces/ --image-size 224"),
)
def data_put(
    source: Annotated[Path, typer.Argument(help="Directory or archive.")],
    uri: Annotated[str, typer.Argument(help="s3://bucket/prefix/ to put it at.")],
    kind: Annotated[
        str, typer.Option("--format", help=f"{', '.join(data.FORMATS)} (as it is).")
    ] = "auto",
    name: Annotated[str | None, typer.Option(help="Name of the dataset.")] = None,
    classes: Annotated[str | None, typer.Option(help="Class names by label: a,b,c.")] = None,
    pad: Annotated[bool, typer.Option("--pad", help="IDX: pad 28x28x1 to 32x32x3.")] = False,
    image_size: Annotated[int | None, typer.Option(min=1, help="Images: side in pixels.")] = None,
    shards: Annotated[int, typer.Option(min=1, help="Files of each split.")] = LAYOUT.shards,
    single_file: Annotated[
        bool, typer.Option("--single-file", help="One file for each split: train.tfrecords.")
    ] = False,
    validation: Annotated[
        float, typer.Option(help="Part of the training images that is set aside.")
    ] = LAYOUT.validation_fraction,
    seed: Annotated[int, typer.Option(help="Decides the order of the examples.")] = LAYOUT.seed,
    cloud: Annotated[
        str, typer.Option(help="Whose S3: local, or another for your own keys.")
    ] = LOCAL,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Convert a directory or an archive and put it into a bucket, with a SHA-256 manifest."""
    options = convert.Options(
        format=kind,
        name=name,
        class_names=tuple(classes.split(",")) if classes else None,
        padded=pad,
        image_size=image_size,
        layout=convert.Layout(shards, single_file, validation, seed),
    )
    load_cloud(cloud)
    with make_display(plain=as_json) as display, Phases(display).phase("data") as report:
        client = open_bucket(cloud, os.environ, lambda text: report(text, None))
        done = data.put(source, uri, client, options, report)
    text = f"{done.uri}: {done.name}, {done.files} files, {done.uploaded_files} of them uploaded"
    emit({"ok": True, **asdict(done)}, text, as_json=as_json)


@app.command(epilog=_example("mayfly schema > job.schema.json"))
def schema(as_json: Json = False, debug: Debug = False) -> None:
    """Print the JSON Schema of a job file, for editors."""
    emit(json_schema(), None, as_json=True)


@app.command("lint", epilog=_example("mayfly lint build/cluster.radl"))
def lint_file(
    file: Annotated[Path, typer.Argument(help="RADL file.")],
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Check a RADL file for what IM refuses, and for what it silently ignores."""
    try:
        findings = lint(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {file}: {error}", "give the path of a RADL file") from error
    document = {
        "ok": not findings,
        "file": str(file),
        "findings": [{"line": found.line, "message": found.message} for found in findings],
    }
    text = "\n".join(f"{file}:{found}" for found in findings) or f"{file}: nothing to complain of"
    emit(document, text, as_json=as_json)
    if findings:
        raise typer.Exit(UserError.exit_code)


@local_app.command("up", epilog=_example("mayfly local up"))
def local_up(as_json: Json = False, debug: Debug = False) -> None:
    """Start what CLOUD=local needs: Docker Engine, node image, S3 server, IM service."""
    with make_display(plain=as_json) as display, Phases(display).phase("services"):
        made = platform.up(display.say)
    document = views.platform_document(made)
    emit(document, views.platform_table(document), as_json=as_json)


@local_app.command("down", epilog=_example("mayfly local down"))
def local_down(as_json: Json = False, debug: Debug = False) -> None:
    """Stop and remove all of it, and say what was removed; no run may be at work on it."""
    ledgers = [_ledger()] if _ledger_file().exists() else []  # without one, none is made
    alive = [
        (ledger, each.run)
        for ledger in ledgers
        for each in ledger.runs()
        if each.cloud == LOCAL and not each.destroyed
    ]
    with ExitStack() as stack:
        display = stack.enter_context(make_display(plain=as_json))
        for ledger, run in alive:
            _keep_others_off(stack, ledger, run, "mayfly local down", display.say)
        report = stack.enter_context(Phases(display).phase("local down"))
        removed = platform.down(lambda text: report(text, None))
        for ledger, run in alive:  # with the platform, the nodes of all runs on it are gone
            ledger.set_state(run, "destroyed")
    text = "\n".join(f"removed {item}" for item in removed) or "nothing was there"
    emit({"removed": removed}, text, as_json=as_json)


@local_app.command("status", epilog=_example("mayfly local status"))
def local_status(as_json: Json = False, debug: Debug = False) -> None:
    """Show what of it is running."""
    document = platform.status()
    emit(document, views.services_table(document), as_json=as_json)


def _offers(context: typer.Context, options: Options) -> Offers:
    """Return the job that the command line asks for, with a plan for each of its offers."""
    file, overrides = _layers(context.params)
    spec, profile = load_job(file, overrides, os.environ, dry_run=options.dry_run)
    offers = make_offers(spec, profile, options, around())
    return replace(offers, notices=tuple(about_data(spec, profile)))


def _price_now(options: Options) -> Callable[[Job], Basis | None]:
    """What looks an offer's price up again, just before its nodes are made."""
    return lambda job: make_offer(job.spec, job.profile, options, around()).plan.basis


def _ask(question: str) -> bool:
    return typer.confirm(question, err=True)


def _write_only(offers: Offers, options: Options, as_json: bool) -> None:
    """Write a run's artefacts, those of its first offer, and show the plan."""
    job = offers.job
    target = Target(job.spec, job.profile, job.place)
    made = write_artefacts(target, BUILD, os.environ, options.inventory)
    document = views.offers_document(
        offers, made.document(job.spec, job.profile), dry_run=options.dry_run
    )
    emit(document, views.plan_table(document), as_json=as_json)


def _layers(given: Mapping[str, Any]) -> tuple[Path | None, dict[str, Any]]:
    """Return the job file and what stands above it; a flag wins over the same key in --set."""
    assigned = dict(parse_assignment(text) for text in given["settings"] or [])
    flags = {name: given.get(name) for name in FLAGS}
    return (Path(given["job"]) if given["job"] else None), {**assigned, **flags}


def _confirm(offers: Offers, as_json: bool) -> None:
    """Show the plan and ask. Raises UserError where nobody can, KeyboardInterrupt for a no."""
    plan = offers.first.plan
    if as_json or not sys.stdin.isatty():
        raise UserError(f"nodes on {plan.profile.title} cost money", "say so with --yes")
    document = views.offers_document(offers, {}, dry_run=False)
    Console(stderr=True).print(views.plan_table(document))
    count = sum(group.count for group in plan.nodes)
    more = f", by the first of {len(offers.offers)} offers that has room" if offers.order else ""
    if not _ask(f"Make {count} nodes on {plan.profile.title}{more}?"):
        raise KeyboardInterrupt


def _interrupt(*_: object) -> None:
    """End as Ctrl-C does, so that a terminated deploy destroys what it made."""
    raise KeyboardInterrupt


def _tools(display: Display) -> Tools:
    return Tools(_ledger(), display, os.environ, find_paths().cache)


def _ledger() -> Ledger:
    return Ledger(_ledger_file())


def _ledger_file() -> Path:
    return find_paths().state.parent / "ledger.sqlite"


def _services(record: Record) -> Services:
    return reopen_services(record, os.environ, _say_what_is_new)


def _say_what_is_new(text: str) -> None:
    if not text.endswith("reused"):
        sys.stderr.write(f"{text}\n")


def _keep_others_off(
    stack: ExitStack, ledger: Ledger, run: str, command: str, say: Callable[[str], None]
) -> None:
    """Be alone on a run until the stack ends, as far as the disk has room for that.

    Raises Busy while another process works on it.
    """
    try:
        stack.enter_context(ledger.alone(run, command))
    except Unwritable as error:  # what costs money is to go all the same
        say(f"others are not kept off run {run} meanwhile: {error.message}")


def _say_what_is_left(ledger: Ledger, display: Display) -> None:
    for record in ledger.runs():
        if not record.destroyed:
            display.say(
                f"run {record.run} was not destroyed yet ({record.state}):"
                f" `mayfly destroy {record.run}`, unless it is wanted"
            )


def _run_and_name(run: str | None, name: str | None) -> tuple[Record, str | None]:
    """Return the run and the node or task; a lone word that is no run but looks like one is it."""
    ledger = _ledger()
    if run is not None and name is None and access.looks_like_task(run):
        return ledger.get(None), run
    return ledger.get(run), name


if __name__ == "__main__":
    main()
