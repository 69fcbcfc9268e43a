"""`mayfly clouds`, and `mayfly prices`: what clouds can do, and what they cost."""

# typer makes options of parameters; --debug is read by `main`.
# ruff: noqa: ARG001

from __future__ import annotations

import os
from datetime import date
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group

from mayfly import prices, views
from mayfly.clouds import CloudProfile, load_cloud
from mayfly.console import emit
from mayfly.errors import UserError
from mayfly.heat import stack
from mayfly.local.paths import find_paths
from mayfly.offer import Around
from mayfly.places import Place, find_place, require
from mayfly.prices import Found
from mayfly.providers import ask
from mayfly.spec import validate

prices_app = typer.Typer(help="What nodes cost.", no_args_is_help=True)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Cloud = Annotated[str, typer.Option(help="A file in radl/clouds/.")]
Region = Annotated[str | None, typer.Option(help="Region of the cloud.")]


def around() -> Around:
    """Return what plans look at: environment, stored prices, and the providers' own clients.

    Boto3 and openstacksdk find the user's keys where they always do.
    """
    clients = ask.Clients(aws=_aws_client, openstack=stack.connect)
    return Around(os.environ, clients, stored_prices(), date.today())


def _aws_client(service: str, region: str) -> Any:
    import boto3  # noqa: PLC0415 (it takes long to import)

    return boto3.client(service, region_name=region)  # type: ignore[call-overload]


def stored_prices() -> Path:
    """Return the directory of fetched price lists."""
    return find_paths().state.parent / "prices"


def clouds_command(as_json: Json = False, debug: Debug = False) -> None:
    """List the clouds: what each can do, and how far it was exercised."""
    documents = views.clouds_document()
    emit({"clouds": documents}, views.clouds_table(documents), as_json=as_json)


@prices_app.command("update", epilog="Example: mayfly prices update --cloud aws")
def update(
    cloud: Cloud,
    region: Region = None,
    types: Annotated[
        list[str] | None, typer.Option("--type", help="A further instance type; may be repeated.")
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Fetch the provider's prices of a region's well-known types, and keep them."""
    profile, place = _where(cloud, region)
    require(place, profile)
    look = around()
    wanted = list(dict.fromkeys([*profile.types, *(types or [])]))
    fetched = ask.fetch(wanted, profile, place, look.clients, look.today)
    if not fetched.types:
        raise UserError(
            f"the provider has no prices of {cloud} in {place.region}", "check the region"
        )
    path = prices.store(fetched, look.stored_prices)
    _show([Found(fetched, str(path))], look.today, as_json)


@prices_app.command("show", epilog="Example: mayfly prices show --cloud aws")
def show(
    cloud: Annotated[str | None, typer.Option(help="Only of this cloud.")] = None,
    file: Annotated[
        Path | None, typer.Option("--prices", help="A price list; else those that were fetched.")
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show and check a price list, or all that were fetched."""
    look = around()
    named = file or look.environ.get("MAYFLY_PRICES")
    paths = [Path(named)] if named else sorted(look.stored_prices.glob("*.json"))
    lists = [Found(found, str(path)) for path in paths for found in prices.read(path)]
    _show([each for each in lists if cloud in (None, each.prices.cloud)], look.today, as_json)


def _where(cloud: str, region: str | None) -> tuple[CloudProfile, Place]:
    profile = load_cloud(cloud)
    spec = validate({"cloud": cloud, **({"region": region} if region else {})}, [])
    return profile, find_place(spec, profile, os.environ)


def _show(lists: list[Found], today: date, as_json: bool) -> None:
    documents = [
        {
            **found.prices.model_dump(mode="json"),
            "file": found.origin,
            "age_days": found.prices.age(today),
            "stale": found.prices.is_stale(today),
        }
        for found in lists
    ]
    tables = [views.prices_table(found.prices, found.origin, today) for found in lists]
    nothing = "there are no prices: fetch some with `mayfly prices update --cloud aws`"
    emit({"prices": documents}, Group(*tables) if tables else nothing, as_json=as_json)
