"""A job's plan with all that can be found out beforehand: place, types, prices, a budget that fits.

A dry run asks nobody; else the provider is asked whether what the job names is there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

from mayfly import fashion_mnist, inventory, planning, prices
from mayfly.choices import choices, label
from mayfly.clouds import CloudProfile
from mayfly.errors import OverBudget, UserError
from mayfly.job import Job
from mayfly.node_types import Nodes, plan_nodes
from mayfly.places import Place, Target, find_place, require
from mayfly.planning import Plan
from mayfly.prices import Found
from mayfly.providers import ask
from mayfly.spec import ClusterSpec


@dataclass(frozen=True)
class Options:
    """What the command line says beside the job."""

    dry_run: bool = False
    prices: Path | None = None
    inventory: Path | None = None


@dataclass(frozen=True)
class Around:
    """What a plan looks at outside of the job."""

    environ: Mapping[str, str]
    clients: ask.Clients
    stored_prices: Path
    today: date


@dataclass(frozen=True)
class Offer:
    """The job as it would run, and its plan."""

    job: Job
    plan: Plan


@dataclass(frozen=True)
class Offers:
    """What a job would take, in the order in which it is tried."""

    offers: tuple[Offer, ...]
    order: str | None
    """The job's key that lists them, None for a job that has only one."""
    left_out: tuple[str, ...] = ()
    """Those that the budget does not allow, with the reason."""
    notices: tuple[str, ...] = ()
    """What holds for all of them."""

    @property
    def first(self) -> Offer:
        """The one that is tried first."""
        return self.offers[0]

    @property
    def all_notices(self) -> tuple[str, ...]:
        """What there is to say of the one that is tried first, and of them all."""
        return (*self.first.plan.notices, *self.notices, *self.left_out)

    @property
    def job(self) -> Job:
        """The first one's job, which knows the others."""
        return replace(self.first.job, others=tuple(offer.job for offer in self.offers[1:]))


def make_offers(
    spec: ClusterSpec, profile: CloudProfile, options: Options, around: Around
) -> Offers:
    """Return the offers of a job: of `any_of` the cheapest first, of unknown price last.

    Raises what `make_offer` raises, and OverBudget when the budget allows none of them.
    """
    order = "any_of" if spec.any_of else "ordered" if spec.ordered else None
    if order is None:
        return Offers((make_offer(spec, profile, options, around),), None)
    made, left_out, refusal = [], [], None
    for number, one in enumerate(choices(spec, profile)):
        try:
            made.append(make_offer(one, profile, options, around))
        except OverBudget as error:
            refusal = refusal or error
            where = find_place(one, profile, around.environ)
            left_out.append(f"{label(Target(one, profile, where))} is left out: {error}")
        except UserError as error:
            raise UserError(f"{order}.{number}: {error.message}", error.hint) from error
    if not made:
        raise refusal or UserError(f"{order} has no offer", "write one")
    if order == "any_of":
        made.sort(key=_by_price)
    return Offers(tuple(made), order, tuple(left_out))


def about_data(spec: ClusterSpec, profile: CloudProfile) -> list[str]:
    """What `deploy` puts into the user's own bucket for a default job; one line, or none."""
    known = fashion_mnist.made_for_bucket(spec) if profile.bucket is None else None
    return [f"{known.what_is_put(spec)} by deploy, unless it is there"] if known else []


def _by_price(offer: Offer) -> tuple[bool, float, float]:
    estimate = offer.plan.estimate
    if estimate is None:
        return (not offer.plan.free, 0.0, 0.0)
    return (False, estimate.run.high, estimate.run.low)


def make_offer(spec: ClusterSpec, profile: CloudProfile, options: Options, around: Around) -> Offer:
    """Return the offer. Raises UserError for what does not exist and for a budget that is too
    small, RemoteError when the provider does not answer."""
    spec, said = _on_own_machines(spec, profile, options)
    place = find_place(spec, profile, around.environ)
    nodes = plan_nodes(spec, profile)
    if not options.dry_run:
        require(place, profile)
        known = ask.check_types(nodes, profile, place, around.clients)
        nodes = plan_nodes(spec, profile, known)
    found, why = _prices(nodes, profile, place, options, around)
    target = Target(spec, profile, place)
    plan = planning.make_plan(target, nodes, found, why, around.today)
    finder = None if options.dry_run else ask.finder(spec, profile, place, around.clients)
    hosts = options.inventory.absolute() if options.inventory else None
    job = Job(spec, profile, place=place, finder=finder, basis=plan.basis, inventory=hosts)
    return Offer(job, replace(plan, notices=(*said, *plan.notices)))


def _on_own_machines(
    spec: ClusterSpec, profile: CloudProfile, options: Options
) -> tuple[ClusterSpec, list[str]]:
    """The spec with the numbers of nodes that the inventory has, and notices about that."""
    if profile.backend != "inventory":
        if options.inventory is not None:
            raise UserError(
                f"--inventory {options.inventory} goes with machines of your own",
                f"leave it out for cloud {profile.name!r}, or take --cloud static",
            )
        return spec, []
    if options.inventory is not None:
        return inventory.with_hosts(spec, inventory.read(options.inventory))
    if options.dry_run:
        return spec, ["no inventory: give --inventory FILE, as inventory/example/hosts.yml"]
    raise UserError(
        f"cloud {profile.name!r} needs an inventory",
        "give --inventory FILE, as inventory/example/hosts.yml",
    )


def _prices(
    nodes: tuple[Nodes, ...],
    profile: CloudProfile,
    place: Place,
    options: Options,
    around: Around,
) -> tuple[Found | None, str]:
    """The prices: of the user's file, else the provider's own, else those that were stored."""
    if profile.prices == "free":
        return _of_own_machine(profile, options, around), ""
    given = prices.find_given(profile.name, place.region, around.environ, options.prices)
    if given is not None:
        return given, ""
    why = _NO_PRICES
    if not options.dry_run:
        found, why = ask.find_prices(nodes, profile, place, around.clients, around.today)
        if found is not None:
            return found, ""
    return prices.find_stored(profile.name, place.region, around.stored_prices), why


def _of_own_machine(profile: CloudProfile, options: Options, around: Around) -> Found | None:
    """Prices for nodes that cost nothing: only those of a file that has some for this cloud."""
    try:
        return prices.find_given(profile.name, None, around.environ, options.prices)
    except UserError:
        if options.prices is not None:
            raise
        return None  # MAYFLY_PRICES is about other clouds


_NO_PRICES = "a dry run asks nobody: give --prices FILE, or run `mayfly prices update` before"
