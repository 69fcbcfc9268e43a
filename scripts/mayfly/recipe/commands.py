"""`mayfly recipe`: one short function per verb."""

# typer makes options of parameters; --debug is read by `main`.
# ruff: noqa: ARG001, PLR0913, PLR0917

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from mayfly import prices
from mayfly.clouds import load_cloud
from mayfly.console import emit
from mayfly.local.paths import find_paths
from mayfly.places import find_place
from mayfly.recipe import plan as planning
from mayfly.recipe import views
from mayfly.recipe.load import load
from mayfly.spec import validate

app = typer.Typer(help="Graphs of experiments and sweeps.", no_args_is_help=True)

File = Annotated[Path, typer.Argument(metavar="FILE", help="Recipe, or a built-in one's name.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Cloud = Annotated[str | None, typer.Option(help="Whose nodes: a file in radl/clouds/.")]
Region = Annotated[str | None, typer.Option(help="Region of the cloud.")]
Prices = Annotated[Path | None, typer.Option(help="Price list; docs/costs.md has its form.")]


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
