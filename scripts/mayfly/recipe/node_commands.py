"""What `mayfly recipe` does for a run on nodes: the plan's price, the question, and the run."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import asdict, replace
from typing import Any

import typer

from mayfly import views
from mayfly.cloud_commands import around
from mayfly.clouds import completed, load_cloud
from mayfly.console import emit, report_error
from mayfly.display import make_display
from mayfly.errors import RunFailed, UserError
from mayfly.job import Job, Tools
from mayfly.ledger import Ledger
from mayfly.local.paths import find_paths
from mayfly.offer import Offer, make_offer
from mayfly.offer import Options as OfferOptions
from mayfly.recipe import cluster, look, node_place, runs
from mayfly.recipe import plan as planning
from mayfly.recipe import views as recipe_views
from mayfly.recipe.load import Loaded
from mayfly.recipe.model import WORKERS
from mayfly.recipe.on_nodes import OnNodes, run_on_nodes
from mayfly.recipe.wanted import NOTED, Wanted
from mayfly.spending import Basis
from mayfly_train.recipe import lock, names
from mayfly_train.recipe.document import Recipe
from mayfly_train.recipe.head import SUCCEEDED, Run


def offer_of(loaded: Loaded, wanted: Wanted, store: str | None) -> Offer:
    """The nodes of a recipe and their price, before anything of it is stored. Raises UserError."""
    planned = planning.make_plan(loaded, planning.Where())
    profile = load_cloud(str(wanted.cloud))
    least = cluster.least_of(loaded.recipe)
    wish = cluster.wish_of(wanted.workers, planned["nodes"], profile, least)
    wanted = replace(wanted, workers=wish)
    base = node_place.bucket_of(profile, store, os.environ)
    return offer_at(loaded.recipe, wanted, f"{base}/{runs.PREFIX}/{loaded.recipe.name}")


def offer_at(recipe: Recipe, wanted: Wanted, address: str) -> Offer:
    """The nodes for a run at an address, and their price. Raises UserError."""
    planned = max((each.workers or WORKERS) * each.hardware.nodes for each in recipe.experiments)
    profile, least = load_cloud(str(wanted.cloud)), cluster.least_of(recipe)
    workers = cluster.wish_of(wanted.workers, planned, profile, least)
    options = cluster.Options(
        str(wanted.cloud), workers, wanted.region, wanted.budget, wanted.max_duration
    )
    spec = cluster.spec_of(recipe, address, options, os.environ)
    spec, profile = completed(spec, os.environ)
    return make_offer(spec, profile, OfferOptions(prices=wanted.prices), around())


def confirm(offer: Offer, wanted: Wanted) -> None:
    """Ask, unless the nodes cost nothing or the answer was given before. Raises UserError where
    nobody can answer, KeyboardInterrupt for a no."""
    plan = offer.plan
    for line in plan.notices:
        sys.stderr.write(f"{line}\n")
    if wanted.yes or not plan.profile.needs_confirmation:
        return
    if wanted.as_json or not sys.stdin.isatty():
        raise UserError(f"nodes on {plan.profile.title} cost money", "say so with --yes")
    count = sum(group.count for group in plan.nodes)
    sys.stderr.write(f"{views.price_line(plan)}\n")
    if not typer.confirm(f"Make {count} nodes on {plan.profile.title}?", err=True):
        raise KeyboardInterrupt


def forgive(place: runs.Place) -> int:
    """Let failed tasks run again: the store's copy of the ledger says so to the next head. Raises
    BadInput and UserError while somebody works on the run."""
    lock.require_free(place.store)
    with runs.worked_on(place) as ledger:
        count = ledger.forgive()
        copy = place.state / "forgiven.sqlite"
        try:
            ledger.copy_to(copy)
            place.store.upload(names.LEDGER, copy)
        finally:
            copy.unlink(missing_ok=True)
    return count


def work(run: Run, place: runs.Place, wanted: Wanted, offer: Offer) -> None:
    """Run to the end and show where that is. Exits with the error's code when it is no good one."""
    count = offer.job.spec.count("worker")
    noted = {name: value for name, value in asdict(wanted).items() if name in NOTED}
    node_place.note(place, str(wanted.cloud), {**noted, "workers": count})
    signal.signal(signal.SIGTERM, _interrupt)
    following = OnNodes(cluster.Cluster(run.recipe, place.store.address), place.store, count)
    with make_display(plain=wanted.as_json) as display:
        ask = None if wanted.yes or wanted.as_json or not sys.stdin.isatty() else _ask
        tools = Tools(
            Ledger(find_paths().state.parent / "ledger.sqlite"),
            display,
            os.environ,
            find_paths().cache,
            price_now=_price_now(wanted),
            ask=ask,
        )
        if offer.plan.profile.needs_confirmation:
            display.say(views.price_line(offer.plan))
        outcome = run_on_nodes(offer.job, following, tools)
    status = look.status(run, place, runs.read_ledger(place))
    document = {**outcome.document, **{k: v for k, v in status.items() if k != "run"}}
    emit(document, recipe_views.status_view({**status, "run": place.name}), as_json=wanted.as_json)
    error = outcome.error
    if error is None and document["outcome"] != SUCCEEDED:
        error = RunFailed(f"run {place.name!r} was {document['outcome']}", "`resume` goes on")
    if error is not None:
        code = report_error(error, debug=wanted.debug, redact=display.redact)
        sys.stderr.write(f"go on with: mayfly recipe resume {place.name}\n")
        raise typer.Exit(code)


def _price_now(wanted: Wanted) -> Any:
    """What looks the nodes' price up again, just before fewer of them are made."""

    def price(job: Job) -> Basis | None:
        options = OfferOptions(prices=wanted.prices)
        return make_offer(job.spec, job.profile, options, around()).plan.basis

    return price


def _ask(question: str) -> bool:
    return typer.confirm(question, err=True)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt
