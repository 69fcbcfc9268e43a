"""The proof that nothing is left of a run: what was listed, where, when, and how much there was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mayfly.sweep.things import Listing, Thing, Unlisted, now

SHOWN = 5  # names in an error
IM_WORD = (
    "there is no sweep of ours for this cloud: that nothing is left is IM's word, by its own list"
)


@dataclass(frozen=True)
class Word:
    """What IM says: the run's infrastructures that it lists, or why it says nothing."""

    listed: tuple[str, ...] = ()
    silent: str | None = None
    taken: str = ""


@dataclass(frozen=True)
class Proof:
    """What is left of a run, by everybody who could be asked."""

    run: str
    cloud: str
    who: str | None  # account or project whose keys were used
    infrastructures: tuple[str, ...]
    listings: tuple[Listing, ...]  # none where the cloud has no sweep of ours
    im: Word | None  # None where it has no part
    objects: tuple[str, int | None] | None = None
    """Address and number of the objects of the run's file system; None when it had none."""
    notes: tuple[str, ...] = ()

    @property
    def things(self) -> list[Thing]:
        """What the account has of the run."""
        return [thing for listing in self.listings for thing in listing.things]

    @property
    def unlisted(self) -> list[tuple[str, Unlisted]]:
        """What could not be listed, with its place."""
        return [(each.place, what) for each in self.listings for what in each.unlisted]

    @property
    def count(self) -> int:
        """How many things are left; a file system in the bucket is one, and so is an
        infrastructure that IM lists while the account shows nothing of it."""
        objects = bool(self.objects and self.objects[1])
        listed = self.im.listed if self.im else ()
        return (len(self.things) or len(listed)) + objects

    @property
    def clean(self) -> bool:
        """Whether all that had to be listed was, and was empty.

        Without an answer of IM's our own listing is enough, where there is one.
        """
        unknown = self.objects is not None and self.objects[1] is None
        blind = not self.listings and (self.im is None or self.im.silent is not None)
        return not (self.count or self.unlisted or unknown or blind)

    def left(self) -> list[str]:
        """Name all that is left, and all that is not known."""
        names = [str(thing) for thing in self.things]
        if not names and self.im:
            names = [f"infrastructure {each} in IM" for each in self.im.listed]
        if self.objects and self.objects[1] != 0:
            uri, count = self.objects
            names.append(f"{uri}: {'not listed' if count is None else f'{count} objects'}")
        for place, each in self.unlisted:
            names.append(f"{each.kind}s in {place} not listed: {each.why}")
        if self.im and self.im.silent and not self.listings:
            names.append(f"IM says nothing: {self.im.silent}")
        return names

    def summary(self) -> str:
        """Name what is left on one line, the first few of it."""
        names = self.left()
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        return f"{', '.join(names[:SHOWN])}{more}"


def document(proof: Proof) -> dict[str, Any]:
    """Return the proof as it is stored and printed with --json."""
    return {
        "ok": proof.clean,
        "run": proof.run,
        "cloud": proof.cloud,
        "taken": now(),
        "account": proof.who,
        "infrastructures": list(proof.infrastructures),
        "count": proof.count,
        "places": [_listing(listing) for listing in proof.listings],
        "im": proof.im and _word(proof.im),
        "bucket": None
        if proof.objects is None
        else {"uri": proof.objects[0], "count": proof.objects[1]},
        "left": proof.left(),
        "notes": [*proof.notes, *([] if proof.listings else [IM_WORD])],
    }


def lines(found: dict[str, Any]) -> str:
    """Return a proof's document as lines for people."""
    title = f"run {found['run']} on {found['cloud']}"
    if found["account"]:
        title += f", account {found['account']}"
    rows = [title]
    for place in found["places"]:
        rows.append(f"{place['place']}, {place['taken']}:")
        rows += [_row(each["kind"], each["count"], each["why"]) for each in place["listed"]]
    if im := found["im"]:
        rows.append(f"IM, {im['taken']}:")
        rows.append(_row("infrastructure", im["count"], im["silent"]))
    if found["bucket"]:
        rows += ["bucket:", _row(found["bucket"]["uri"], found["bucket"]["count"], None)]
    rows += [f"note: {note}" for note in found["notes"]]
    rows += [f"left: {each}" for each in found["left"]]
    rows.append("nothing is left" if found["ok"] else f"NOT clean: {found['count']} left")
    return "\n".join(rows)


def _row(kind: str, count: int | None, why: str | None) -> str:
    return f"  {kind:18} {'not listed: ' + (why or 'no answer') if count is None else count}"


def _word(word: Word) -> dict[str, Any]:
    return {
        "count": None if word.silent else len(word.listed),
        "listed": list(word.listed),
        "silent": word.silent,
        "taken": word.taken,
    }


def _listing(listing: Listing) -> dict[str, Any]:
    why = {each.kind: each.why for each in listing.unlisted}
    return {
        "place": listing.place,
        "taken": listing.taken,
        "listed": [
            {"kind": kind, "count": listing.count(kind), "why": why.get(kind)}
            for kind in listing.kinds
        ],
        "things": things(listing.things),
    }


def things(listed: Sequence[Thing]) -> list[dict[str, Any]]:
    """Return things as documents."""
    return [
        {"kind": each.kind, "id": each.id, "state": each.state, "since": each.since}
        for each in listed
    ]
