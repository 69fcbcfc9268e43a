"""`mayfly verify-clean` and `mayfly gc`: what is left, of one run and of all."""

# typer makes options of parameters; --debug is read by `main`.
# ruff: noqa: ARG001, PLR0913, PLR0917

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from mayfly.auth.find import find_credential
from mayfly.clouds import known_clouds, load_cloud
from mayfly.console import emit
from mayfly.destroy import Destroyer, destroyer_of
from mayfly.display import Phases, make_display
from mayfly.errors import MayflyError, RemoteError, UserError, unknown
from mayfly.im import Manager, SilentManager
from mayfly.ledger import Ledger, Record
from mayfly.local import platform
from mayfly.local.paths import find_paths
from mayfly.run_lock import Busy
from mayfly.services import LOCAL, reopen_services
from mayfly.sweep import im as sweep_im
from mayfly.sweep import leftovers, proof
from mayfly.sweep.find import SWEPT, find_account
from mayfly.sweep.leftovers import Leftover
from mayfly.sweep.loop import Sweeper
from mayfly.sweep.things import Listing, Marks, Place
from mayfly.watch import Pace

GC_PACE = Pace(interval=1.0, patience=600.0)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Run = Annotated[str | None, typer.Argument(metavar="[RUN]", help="Run; the latest when absent.")]


def verify_command(run: Run = None, as_json: Json = False, debug: Debug = False) -> None:
    """Prove that nothing is left of a run: list all that it could have made, count, and remove
    nothing.

    Exit code 0 when every listing was answered and empty, 1 when something is left or unknown. The
    proof is kept with the run, and as clean.json below its URI.
    """
    ledger = _ledger()
    record = ledger.get(run)
    with make_display(plain=as_json) as display, Phases(display).phase("verify"):
        destroyer = _destroyer(record, ledger)
        found = destroyer.prove(record)
        document = destroyer.keep(found)
        with suppress(RemoteError):
            destroyer.im.wipe(())  # ends a service of ours that was only started to be asked
    if found.count and record.destroyed:
        ledger.set_state(record.run, "destroying")  # so that destroy takes it up again
    emit(document, proof.lines(document), as_json=as_json)
    if not found.clean:
        raise typer.Exit(RemoteError.exit_code)


def gc_command(
    cloud: Annotated[str | None, typer.Option(help="Whose account.")] = None,
    region: Annotated[
        list[str] | None,
        typer.Option(help="Region to look in; may be repeated. Those of this machine's runs."),
    ] = None,
    run: Annotated[
        list[str] | None, typer.Option("--run", help="Only of this run; may be repeated.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Remove without asking.")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Find what any run has left in an account, show it by run, and remove it when you say so.

    Also finds runs that this machine does not know, by the tag mayfly-run, and nodes that their own
    timer has powered off. What a run of this machine still works with is shown and never removed;
    whether a run of another machine goes on is not known here, so look at its age: while nodes of
    it are on, --yes removes it only when --run names it. --json only lists, unless there is --yes.

    Where we cannot list an account (all but aws and openstack), IM is asked for the nodes of this
    machine's runs, and what goes is destroyed through IM, whose word the end is.
    """
    name = _checked_cloud(cloud)
    ledger = _ledger()
    with make_display(plain=as_json) as display, Phases(display).phase("look"):
        if name in SWEPT:
            view = _look(name, region or [], ledger)
        else:
            view = _ask_im(name, region or [], ledger)
    _require_found(run or [], view)
    offered = [each for each in view.found if _is_offered(each, run or [], unasked=yes)]
    if not as_json:
        print(_text(view))
    left: list[str] = []
    wanted = bool(offered) and _is_wanted(offered, yes, as_json)
    if wanted:
        with make_display(plain=as_json) as display, Phases(display).phase("remove") as report:
            for each in offered:
                left += _remove(each, view, ledger, lambda text: report(text, None))
    document = _document(view, offered if wanted else [], left)
    emit(document, _ending(document) if wanted else None, as_json=as_json)
    if not document["ok"]:
        raise typer.Exit(RemoteError.exit_code)


@dataclass(frozen=True)
class View:
    """What was found in an account."""

    cloud: str
    who: str | None
    records: list[Record]
    places: list[Place]
    listings: list[Listing]
    found: list[Leftover]
    moment: datetime
    destroyers: Mapping[str, Destroyer] = field(default_factory=dict)
    """What removes a run where the account is not ours to list, by run."""

    def unlisted(self) -> list[str]:
        """Name what could not be listed."""
        return [
            f"{what.kind}s in {listing.place}: {what.why}"
            for listing in self.listings
            for what in listing.unlisted
        ]


def _checked_cloud(cloud: str | None) -> str:
    """Return the cloud to look in; raises UserError where we cannot, or there are no keys."""
    name = cloud or os.environ.get("MAYFLY_CLOUD")
    rented = [each for each in known_clouds() if load_cloud(each).needs_confirmation]
    if not name:
        raise UserError("no cloud to look in", f"choose one with --cloud: {', '.join(rented)}")
    load_cloud(name)  # else it is unknown, and the nearest is named
    if name not in rented:
        raise UserError(f"nodes on cloud {name!r} cost nothing", "`mayfly destroy RUN` ends a run")
    find_credential(name, os.environ)
    return name


def _look(cloud: str, regions: list[str], ledger: Ledger) -> View:
    """List what any run has: in the given regions, or in those that runs of here were made in."""
    account = find_account(cloud, os.environ)
    if account is None:
        raise UserError(f"there is no sweep of ours for cloud {cloud!r}", "choose another")
    records = [record for record in ledger.runs() if record.cloud == cloud]
    known = [place.region for each in records for place in ledger.places(each.run)]
    wanted: list[str | None] = [*regions] or [None, *known]
    # The default region may be one of the others.
    by_name = {place.name: place for place in map(account.place, dict.fromkeys(wanted))}
    places, moment = list(by_name.values()), datetime.now(UTC)
    listings = [place.look(leftovers.marks_of_any(records)) for place in places]
    # Again, and after the listings: a run that has just begun is to be known.
    records = [record for record in ledger.runs() if record.cloud == cloud]
    at_work = frozenset(each.run for each in records if ledger.at_work(each.run))
    found = leftovers.group(listings, records, moment, at_work)
    return View(cloud, account.who(), records, places, listings, found, moment)


def _ask_im(cloud: str, regions: list[str], ledger: Ledger) -> View:
    """List what IM has of the runs of here that are not destroyed, as nobody else can be asked."""
    if regions:
        advice = "IM is asked for all runs of this machine: leave it out"
        raise UserError(f"--region {regions[0]} does not go with cloud {cloud!r}", advice)
    moment = datetime.now(UTC)
    records = [each for each in ledger.runs() if each.cloud == cloud and not each.destroyed]
    destroyers: dict[str, Destroyer] = {}

    def manager_of(record: Record) -> Manager:
        destroyers[record.run] = _destroyer(record, ledger)
        return destroyers[record.run].im

    listings = [sweep_im.look(records, manager_of)]
    for each in destroyers.values():
        with suppress(RemoteError):
            each.im.wipe(())  # ends a service of ours that was only started to be asked
    records = [each for each in ledger.runs() if each.cloud == cloud]
    at_work = frozenset(each.run for each in records if ledger.at_work(each.run))
    found = leftovers.group(listings, records, moment, at_work)
    return View(cloud, None, records, [], listings, found, moment, destroyers)


def _is_offered(each: Leftover, named: list[str], *, unasked: bool) -> bool:
    """Whether a run may be removed; without being asked, only what cannot be at work elsewhere."""
    if named:
        return each.run in named and not each.goes_on
    return not each.goes_on and not (unasked and each.state is None and each.works)


def _require_found(runs: list[str], view: View) -> None:
    """Raise UserError for a run that was named and is not there, or that goes on."""
    found = {each.run: each for each in view.found}
    for run in runs:
        if run not in found:
            raise unknown("leftover run", run, found, "nothing of it was found; see --region")
        if found[run].goes_on:
            raise UserError(f"run {run} goes on: {found[run].state}", f"`mayfly destroy {run}`")


def _is_wanted(offered: list[Leftover], yes: bool, as_json: bool) -> bool:
    """Whether it is to be removed: by --yes, or the answer to a question."""
    if yes or as_json:
        return yes
    if not sys.stdin.isatty():
        raise UserError(f"{len(offered)} runs have leftovers", "say that they can go with --yes")
    count = sum(len(each.things) for each in offered)
    return typer.confirm(f"Remove these {count} things of {len(offered)} runs?", err=True)


def _remove(
    leftover: Leftover, view: View, ledger: Ledger, report: Callable[[str], None]
) -> list[str]:
    """Remove what there is of a run, and name what is left of it.

    Nothing of one is that another process has taken up since it was listed.
    """
    with ExitStack() as stack:
        if leftover.state is not None:  # else no process of this machine's works on it
            try:
                stack.enter_context(ledger.alone(leftover.run, "mayfly gc"))
            except Busy as busy:
                return [f"{thing} in {thing.place}: {busy.message}" for thing in leftover.things]
        return _remove_alone(leftover, view, ledger, report)


def _remove_alone(
    leftover: Leftover, view: View, ledger: Ledger, report: Callable[[str], None]
) -> list[str]:
    run = leftover.run
    if run in view.destroyers:
        return _destroy(leftover, view, ledger, report)
    if leftover.state not in (None, "destroyed"):
        ledger.set_state(run, "destroying")  # IM may know of it: `mayfly destroy` asks there
    known = leftovers.infrastructures_of(run, view.listings, view.records)
    sweeper = Sweeper(lambda action, what: ledger.intent(run, action, what), report, GC_PACE)
    swept = sweeper.sweep(view.places, Marks(frozenset([run]), known))
    reasons = {key: refused.message for key, refused in swept.refusals.items()}
    unknown_now = [
        f"{what.kind}s in {listing.place} could not be listed: {what.why}"
        for listing in swept.listings
        for what in listing.unlisted
    ]
    return unknown_now + [
        f"{thing} in {thing.place}: "
        + reasons.get((thing.place, thing.kind, thing.id), "it does not go away")
        for thing in swept.things
    ]


def _destroy(
    leftover: Leftover, view: View, ledger: Ledger, report: Callable[[str], None]
) -> list[str]:
    """Have IM remove a run, and name what may be left of it when it does not."""
    try:
        view.destroyers[leftover.run].destroy(ledger.get(leftover.run), report)
    except MayflyError as error:
        return [f"{thing} in {thing.place}: {error}" for thing in leftover.things]
    return []


def _document(view: View, offered: list[Leftover], left: list[str]) -> dict[str, Any]:
    unlisted = view.unlisted()
    return {
        "ok": not (left or unlisted),
        "cloud": view.cloud,
        "account": view.who,
        "places": [listing.place for listing in view.listings],
        "runs": [leftovers.document(each, view.moment) for each in view.found],
        "notes": [note for listing in view.listings for note in listing.notes],
        "unlisted": unlisted,
        "removed": sum(len(each.things) for each in offered) - len(left),
        "left": left,
    }


def _text(view: View) -> str:
    """What was found, for people."""
    rows = [f"looked in {listing.place}, {listing.taken}" for listing in view.listings]
    for each in view.found:
        rows += leftovers.lines(each, view.moment)
    rows += [f"not listed: {text}" for text in view.unlisted()]
    rows += [f"note: {note}" for listing in view.listings for note in listing.notes]
    nothing = [] if view.found or view.unlisted() else ["nothing is left of any run"]
    return "\n".join([*rows, *nothing])


def _ending(document: dict[str, Any]) -> str:
    return "\n".join([f"removed {document['removed']}", *(f"left: {x}" for x in document["left"])])


def _destroyer(record: Record, ledger: Ledger) -> Destroyer:
    """What can look for a run; nothing is started where the platform of CLOUD=local is gone."""
    if record.cloud == LOCAL and not find_paths().state.exists():
        gone = RemoteError("`mayfly local down` has removed it with all its nodes")
        return Destroyer(SilentManager(gone), ledger, None, platform)
    services = reopen_services(record, os.environ, _say, need_im=False)
    return destroyer_of(services, ledger)


def _say(text: str) -> None:
    if not text.endswith("reused"):
        sys.stderr.write(f"{text}\n")


def _ledger() -> Ledger:
    return Ledger(find_paths().state.parent / "ledger.sqlite")
