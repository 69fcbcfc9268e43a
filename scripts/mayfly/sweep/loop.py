"""List, remove, and list again, until nothing of a run is left in its places."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from mayfly.sweep.things import Listing, Marks, Place, Refused, Thing
from mayfly.watch import Pace

Journal = Callable[[str, str], AbstractContextManager[object]]
"""Action and target → a block around a call, which is written down before and after it."""

LONGEST_PAUSE_S = 5.0
DEAF_S = 60.0  # how long to ask a place again that answers to nothing else
ROUNDS = 2  # empty listings that are needed where something may just have been made


@dataclass
class Swept:
    """How a sweep ended: the last listing of each place, and who refused what."""

    listings: list[Listing]
    marks: Marks
    refusals: dict[tuple[str, str, str], Refused] = field(default_factory=dict)
    notes: dict[str, None] = field(default_factory=dict)  # in order, each once

    @property
    def things(self) -> list[Thing]:
        """What was there at the last look."""
        return [thing for listing in self.listings for thing in listing.things]

    @property
    def unlisted(self) -> bool:
        """Whether a kind could not be listed."""
        return any(listing.unlisted for listing in self.listings)


@dataclass(frozen=True)
class Sweeper:
    """How to sweep: whom to tell, and with how much patience.

    `fresh` says that something may just have been made, so that one empty listing proves nothing.
    `learn` is told the infrastructures that become known, before anything by which they became so
    is removed.
    """

    journal: Journal
    report: Callable[[str], None]
    pace: Pace
    fresh: bool = False
    learn: Callable[[Mapping[str, str]], None] = lambda _: None

    def sweep(self, places: Sequence[Place], marks: Marks) -> Swept:
        """Remove what carries the marks, in the order in which it can go, until nothing is listed.

        Ends earlier when the pace's patience is over, or nothing more can be done: what is left,
        and what could not be listed, is in the result.
        """
        swept = Swept([], marks)
        started, pause, empty = self.pace.clock(), self.pace.interval, 0
        lag = max((place.lag_s for place in places), default=0.0) if self.fresh else 0.0
        while True:
            _look(places, swept)
            self.learn(swept.marks.infrastructures)
            waited = self.pace.clock() - started
            if not swept.things and not _is_deaf(swept, waited):
                empty += 1
                if swept.unlisted or not lag or empty == ROUNDS:
                    return swept
                self.report("nothing is listed; looking once more")
                self.pace.sleep(lag)
                continue
            empty = 0
            if waited > self.pace.patience or _is_hopeless(swept):
                return swept
            for place, listing in zip(places, swept.listings, strict=True):
                if waited >= place.grace_s:
                    _remove(place, listing, swept, self.journal)
            self.report(_progress(swept))
            self.pace.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)


def _look(places: Sequence[Place], swept: Swept) -> None:
    """Look at every place; an infrastructure that one of them tells of is known from then on."""
    swept.listings = [place.look(swept.marks) for place in places]
    for listing in swept.listings:
        swept.marks = swept.marks.knowing(listing.infrastructures)
        swept.notes |= dict.fromkeys(listing.notes)


def _remove(place: Place, listing: Listing, swept: Swept, journal: Journal) -> None:
    """Ask for the removal of what nothing that comes before it is in the way of."""
    for stage in listing.stages:
        things = [thing for thing in listing.things if thing.kind in stage]
        for thing in things:
            if not thing.going:
                _ask(place, thing, swept, journal)
        # What is refused does not go by waiting: perhaps what comes after it does.
        if any(_key(thing) not in swept.refusals for thing in things):
            return


def _ask(place: Place, thing: Thing, swept: Swept, journal: Journal) -> None:
    try:
        with journal("remove", f"{thing} in {place.name}"):
            place.remove(thing)
    except Refused as refused:
        swept.refusals[_key(thing)] = refused
    else:
        swept.refusals.pop(_key(thing), None)


def _key(thing: Thing) -> tuple[str, str, str]:
    return thing.place, thing.kind, thing.id


def _is_deaf(swept: Swept, waited: float) -> bool:
    """Whether a place did not answer, and may yet."""
    unlisted = [each for listing in swept.listings for each in listing.unlisted]
    return waited < DEAF_S and any(not each.for_good for each in unlisted)


def _is_hopeless(swept: Swept) -> bool:
    """Whether all that is left was refused, and some of it for good: more rounds do not help."""
    refusals = [swept.refusals.get(_key(thing)) for thing in swept.things if not thing.going]
    return all(refusals) and any(refusal and refusal.for_good for refusal in refusals)


def _progress(swept: Swept) -> str:
    count = len(swept.things)
    refusals = [swept.refusals[_key(t)] for t in swept.things if _key(t) in swept.refusals]
    text = f"waiting for {count} to go away" if count else "waiting for an answer"
    return f"{text}: {refusals[0].message}" if refusals else text
