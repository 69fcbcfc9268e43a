"""`mayfly recipe`: one short function per verb."""

# typer makes options of parameters; --debug is read by `main`.
# ruff: noqa: ARG001, PLR0913, PLR0917

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from mayfly import prices
from mayfly.clouds import load_cloud
from mayfly.console import emit
from mayfly.errors import RunFailed, UserError
from mayfly.local.paths import find_paths
from mayfly.places import find_place
from mayfly.recipe import look, node_logs, node_place, runs, views
from mayfly.recipe import plan as planning
from mayfly.recipe.execute import execute
from mayfly.recipe.load import load
from mayfly.recipe.wanted import Wanted, as_before
from mayfly.spec import validate
from mayfly_train.recipe import lock, names
from mayfly_train.recipe.head import SUCCEEDED, Run
from mayfly_train.recipe.store import to_bytes

app = typer.Typer(help="Graphs of experiments and sweeps.", no_args_is_help=True)

File = Annotated[Path, typer.Argument(metavar="FILE", help="Recipe, or a built-in one's name.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Cloud = Annotated[str | None, typer.Option(help="Whose nodes: a file in radl/clouds/.")]
Region = Annotated[str | None, typer.Option(help="Region of the cloud.")]
Prices = Annotated[Path | None, typer.Option(help="Price list; docs/costs.md has its form.")]
RunName = Annotated[
    str | None, typer.Argument(metavar="[RUN]", help="Name of the run; the latest when absent.")
]
SHOWN = 20  # tasks of an experiment
Store = Annotated[
    str | None,
    typer.Option(help="Bucket, s3://bucket/prefix or directory of runs; else MAYFLY_BUCKET's."),
]
Workers = Annotated[
    int | None,
    typer.Option(min=1, help="Tasks at a time on this machine (its cores), or nodes to wish for."),
]
OnCloud = Annotated[
    str | None, typer.Option("--cloud", help="Run on nodes of this: a file in radl/clouds/.")
]
Budget = Annotated[str | None, typer.Option(help="Most that nodes may cost, such as '5 USD'.")]
MaxDuration = Annotated[
    str | None, typer.Option(help="Longest that nodes may run tasks, such as 12h (4h).")
]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask before it costs money.")]
Here = Annotated[bool, typer.Option("--here", help="On this machine, though it was on nodes.")]
APPLICATION = "application"


@app.command(epilog="Example: mayfly recipe plan recipe.yml --cloud aws")
def plan(
    file: File,
    cloud: Cloud = None,
    region: Region = None,
    prices: Prices = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Check a recipe and show its graph, tasks, nodes, price and commands; make nothing."""
    where = _where(cloud or os.environ.get("MAYFLY_CLOUD"), region, prices)
    document = planning.make_plan(load(file), where)
    emit(document, views.plan_view(document), as_json=as_json)


def _where(cloud: str | None, region: str | None, given: Path | None) -> planning.Where:
    """The cloud with the prices of a file, else those that were fetched before."""
    if not cloud:
        return planning.Where()
    profile = load_cloud(cloud)
    spec = validate({"cloud": cloud, **({"region": region} if region else {})}, [])
    place = find_place(spec, profile, os.environ).region
    found = prices.find_given(cloud, place, os.environ, given)
    found = found or prices.find_stored(cloud, place, find_paths().state.parent / "prices")
    why = "" if found else "give --prices FILE, or run `mayfly prices update` before"
    return planning.Where(profile, found, why)


@app.command(epilog="Example: mayfly recipe run recipe.yml --cloud aws --workers 20")
def run(
    file: File,
    name: Annotated[str | None, typer.Option(help="Name instead of the recipe's own.")] = None,
    store: Store = None,
    workers: Workers = None,
    cloud: OnCloud = None,
    region: Region = None,
    budget: Budget = None,
    max_duration: MaxDuration = None,
    prices: Prices = None,
    yes: Yes = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Run a recipe to its end, on this machine or on nodes that are made for it and destroyed.

    Ctrl-C leaves a run that `resume` goes on with."""
    loaded = load(file, name)
    if cloud is None:
        place = runs.find_place(loaded.recipe.name, store)
        _work(runs.create(loaded, place), place, workers, as_json)
        return
    wanted = Wanted(cloud, workers, region, budget, max_duration, prices, yes, as_json, debug)
    from mayfly.recipe import node_commands  # noqa: PLC0415 (a head on this machine needs none of it)

    offer = node_commands.offer_of(loaded, wanted, store)  # before anything is stored
    node_commands.confirm(offer, wanted)
    place = node_place.open_place(loaded.recipe.name, cloud, store, os.environ, _say_news)
    made = runs.create(loaded, place)
    node_commands.work(made, place, wanted, offer)


@app.command(epilog="Example: mayfly recipe resume mnist-search --store s3://bucket")
def resume(
    run: RunName = None,
    recipe: Annotated[
        Path | None, typer.Option(help="The recipe's file, which must be as it was.")
    ] = None,
    store: Store = None,
    workers: Workers = None,
    cloud: OnCloud = None,
    region: Region = None,
    budget: Budget = None,
    max_duration: MaxDuration = None,
    prices: Prices = None,
    yes: Yes = False,
    here: Here = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Go on with a run; on another machine its bucket is enough."""
    given = Wanted(cloud, workers, region, budget, max_duration, prices, yes, as_json, debug)
    _go_on(run, store, given, here=here, recipe=recipe)


@app.command(epilog="Example: mayfly recipe rerun mnist-search --failed")
def rerun(
    run: RunName = None,
    failed: Annotated[bool, typer.Option("--failed", help="Those that failed for good.")] = False,
    store: Store = None,
    workers: Workers = None,
    cloud: OnCloud = None,
    yes: Yes = False,
    here: Here = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Run failed tasks again, with the same arguments and all their retries."""
    if not failed:
        raise UserError("nothing to run again: finished tasks never are", "add --failed")
    given = Wanted(cloud, workers, yes=yes, as_json=as_json, debug=debug)
    _go_on(run, store, given, here=here, again=True)


def _go_on(
    run: str | None,
    store: str | None,
    given: Wanted,
    *,
    here: bool,
    recipe: Path | None = None,
    again: bool = False,
) -> None:
    """Go on with a run where it was before: on nodes, or on this machine."""
    name = run or runs.latest()
    noted = node_place.noted(name, os.environ, store)
    wanted = None if here else as_before(given, noted)
    if wanted is None:
        place = _place(name, store)
        _work(runs.reopen(place, recipe), place, given.workers, given.as_json, again=again)
        return
    from mayfly.recipe import node_commands  # noqa: PLC0415 (as above)

    base = store or _base(noted)
    place = node_place.open_place(name, str(wanted.cloud), base, os.environ, _say_news)
    found = runs.reopen(place, recipe)
    document = look.status(found, place, runs.read_ledger(place))
    failed = any(each["states"].get("failed") for each in document["experiments"])
    if document["state"] == "succeeded" and not (again and failed):  # nothing for nodes to do
        document["outcome"] = SUCCEEDED
        emit(document, views.status_view(document), as_json=given.as_json)
        return
    offer = node_commands.offer_at(found.recipe, wanted, place.store.address)
    node_commands.confirm(offer, wanted)
    if again:
        _say_news(f"{node_commands.forgive(place)} tasks run again")
    node_commands.work(found, place, wanted, offer)


def _base(noted: Mapping[str, Any] | None) -> str | None:
    """The bucket and prefix of a run that this machine knows."""
    return noted["address"].rpartition(f"/{runs.PREFIX}/")[0] if noted else None


def _place(run: str | None, store: str | None) -> runs.Place:
    """Where a run lies, whose nodes may have S3 keys of their own."""
    return node_place.find(run or runs.latest(), store, os.environ, _say_news)


def _say_news(text: str) -> None:
    if not text.endswith("reused"):
        sys.stderr.write(f"{text}\n")


@app.command(epilog="Example: mayfly recipe status")
def status(
    run: RunName = None, store: Store = None, as_json: Json = False, debug: Debug = False
) -> None:
    """Show where a run is."""
    place = _place(run, store)
    document = look.status(runs.reopen(place), place, runs.read_ledger(place))
    emit(document, views.status_view(document), as_json=as_json)


@app.command(epilog="Example: mayfly recipe results mnist-search --csv")
def results(
    run: RunName = None,
    experiment: Annotated[str | None, typer.Option(help="Only this one's.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Show every task.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print one table as CSV.")] = False,
    store: Store = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show what tasks have found, the best first."""
    place = _place(run, store)
    document = look.results(runs.reopen(place), place, runs.read_ledger(place), experiment)
    if as_csv and not as_json:
        print(look.as_csv(document), end="")
        return
    most = sys.maxsize if every else SHOWN
    emit(document, views.results_view(document, most), as_json=as_json)


@app.command(epilog="Example: mayfly recipe logs train/12 --follow")
def logs(
    task: Annotated[
        str | None, typer.Argument(metavar="[TASK]", help="Task, such as train/12.")
    ] = None,
    run: Annotated[str | None, typer.Option(help="Name of the run.")] = None,
    node: Annotated[str | None, typer.Option(help="A node's log, and no task's.")] = None,
    kind: Annotated[
        str, typer.Option(help="application, or of nodes: utilisation, journal.")
    ] = APPLICATION,
    follow: Annotated[bool, typer.Option("--follow", help="Go on until it ends.")] = False,
    stderr: Annotated[bool, typer.Option("--stderr", help="Its standard error.")] = False,
    store: Store = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show what a task has printed, while it runs, too; or what a node was busy with meanwhile, and
    its system's journal."""
    place = _place(run, store)
    pieces = _pieces(place, task, node, kind, "stderr" if stderr else "stdout", follow)
    if as_json:  # one document, so with --follow it comes at the end
        lines = b"".join(pieces).decode(errors="replace").splitlines()
        emit(
            {"run": place.name, "task": task, "node": node, "kind": kind, "lines": lines},
            None,
            as_json=True,
        )
        return
    for piece in pieces:
        sys.stdout.buffer.write(piece)
        sys.stdout.buffer.flush()


def _pieces(
    place: runs.Place, task: str | None, node: str | None, kind: str, stream: str, follow: bool
) -> Iterator[bytes]:
    """The log that is asked for. Raises UserError."""
    if (task is None) == (node is None):
        advice = "such as train/12, or --node worker-1 with --kind utilisation"
        raise UserError("a log is of a task or of a node: name one of them", advice)
    if node is not None:
        return node_logs.read(node, kind, place)
    found = look.find_task(str(task), runs.reopen(place))
    if kind == APPLICATION:
        return look.log(found, stream, place, runs.read_ledger(place), follow)
    return node_logs.of_task(found, kind, place, runs.read_ledger(place))


@app.command(epilog="Example: mayfly recipe cancel mnist-search")
def cancel(
    run: RunName = None, store: Store = None, as_json: Json = False, debug: Debug = False
) -> None:
    """End a run and what it runs; `resume` goes on with it all the same."""
    place = _place(run, store)
    runs.reopen(place)
    alive = lock.is_held(place.store)
    place.store.write(names.CANCEL, to_bytes({}))
    said = "its head ends it within seconds" if alive else "nothing of it was running"
    emit({"run": place.name, "was_running": alive}, f"{place.name}: {said}", as_json=as_json)


def _work(
    run: Run, place: runs.Place, workers: int | None, as_json: bool, again: bool = False
) -> None:
    """Run to the end, and show where that is. Raises RunFailed when it is no good one."""
    try:
        outcome = execute(run, place, workers, again)
    except KeyboardInterrupt:
        sys.stderr.write(f"go on with: mayfly recipe resume {place.name}\n")
        raise
    document = {**look.status(run, place, runs.read_ledger(place)), "outcome": outcome}
    emit(document, views.status_view(document), as_json=as_json)
    if outcome != SUCCEEDED:
        whys = [f"{each['name']}: {each['message']}" for each in document["experiments"]]
        why = "; ".join(each for each in whys if not each.endswith(": "))
        advice = f"see `mayfly recipe results {place.name}`"
        raise RunFailed(f"run {place.name!r} has {outcome}: {why or 'see its status'}", advice)
