"""Remove the nodes of a run, again and again until nothing of it is left.

IM's answer to a DELETE proves nothing (it may have lost sight of a node, and so may we have of IM),
so IM goes first, a sweep of the account follows where we have one, and the end is decided by
looking: the proof. What a shared file system has left in the bucket goes last, when nobody is there
to write to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from mayfly import juicefs
from mayfly.errors import RemoteError, UserError
from mayfly.im import Manager, NoAnswer, SilentManager
from mayfly.ledger import Entry, Ledger, Record, Step, Unwritable
from mayfly.own.manager import Machinist
from mayfly.run_store import RunStore
from mayfly.services import Services
from mayfly.sweep.local import Engine, Traces
from mayfly.sweep.loop import Journal, Sweeper, Swept
from mayfly.sweep.proof import Proof, Word, document
from mayfly.sweep.things import Account, Marks, Place, now
from mayfly.watch import Pace
from mayfly_train.errors import NodeError

AGAIN_S = 60.0  # an IM that was restarted says "deleting" for ever, until it is asked again
FRESH_S = 1800.0  # how long IM may go on creating nodes after it was asked: WAIT_RUNNING_VM


@dataclass(frozen=True)
class Destroyer:
    """What is needed to remove a run: IM, and boto3's client of the S3 service that the run has.

    Where the cloud has a listing of ours, `traces` finds things by an infrastructure's label, or
    `account` by the run's marks; both are None elsewhere.
    """

    im: Manager
    ledger: Ledger
    client: Any
    traces: Traces | None = None
    account: Account | None = None
    pace: Pace = Pace(interval=1.0, patience=600.0)

    def destroy(self, run: Record, report: Callable[[str], None]) -> Proof:
        """Remove what a run made and return the proof that nothing is left.

        Raises RemoteError, naming what is left, when it does not go away in the pace's patience, or
        cannot be listed; UserError for keys to another account. A ledger that cannot be written
        keeps nothing alive: nodes cost, and destroying again is harmless.
        """
        places = self._places(run)
        with suppress(Unwritable):
            self.ledger.set_state(run.run, "destroying")
        marks, rest = self._marks(run), self
        try:
            for infrastructure in self._infrastructures(run):
                marks = marks.knowing({infrastructure: run.run})
                with self._journalled(run.run, "destroy", infrastructure):
                    self._until_im_forgets(infrastructure, report)
        except RemoteError as error:
            if not self.account:
                raise
            report(f"without IM: {error.message}")
            if isinstance(error, NoAnswer):  # to ask again takes as long as it took now
                rest = replace(self, im=SilentManager(error))
        return rest._finish(run, places, marks, report)

    def _finish(
        self, run: Record, places: list[Place], marks: Marks, report: Callable[[str], None]
    ) -> Proof:
        """Do what remains after IM; see `destroy`."""
        swept = self._sweep(run, places, marks, report)
        if not (swept.things or swept.unlisted):
            self._make_im_forget(swept.marks)
            self._empty_store(run, report)
        proof = self.prove(run, swept)
        self.keep(proof)
        if not proof.clean:
            raise _not_clean(proof, swept)
        with suppress(Unwritable):
            self.ledger.set_state(run.run, "destroyed")
        with suppress(RemoteError):  # of an IM that is not there
            self.im.wipe(proof.infrastructures)  # last: it may end a service of ours
        return proof

    def prove(self, run: Record, swept: Swept | None = None) -> Proof:
        """Look at everything once, or take what a sweep has seen last; nothing is removed.

        Raises UserError for keys to another account.
        """
        marks = swept.marks if swept else self._marks(run)
        listings = swept.listings if swept else [p.look(marks) for p in self._places(run)]
        seen = [note for listing in listings for note in listing.notes]
        uri = juicefs.uri_of(run)
        return Proof(
            run=run.run,
            cloud=run.cloud,
            who=self.account.who() if self.account else None,
            infrastructures=tuple(marks.infrastructures),
            listings=tuple(listings),
            im=self._word(run, marks),
            objects=(uri, juicefs.count(self.client, uri)) if uri and self.client else None,
            notes=tuple(swept.notes if swept else dict.fromkeys(seen)),
        )

    def keep(self, proof: Proof) -> dict[str, Any]:
        """Store a proof with the run, here and (when the bucket answers) below its URI."""
        found = document(proof)
        with suppress(Unwritable):
            self.ledger.add_proof(proof.run, found)
        if self.client is not None:
            with suppress(NodeError):  # the bucket may be gone, or the keys to it
                RunStore(self.client, self.ledger.get(proof.run).uri).write_proof(found)
        return found

    def _marks(self, run: Record) -> Marks:
        known = {run.infrastructure: run.run} if run.infrastructure else {}
        return Marks(frozenset([run.run]), known)

    def _places(self, run: Record) -> list[Place]:
        """Return where the run may have something; raises UserError for keys to another account."""
        if self.traces:
            return [Engine(self.traces)]
        if self.account is None:
            return []
        recorded = self.ledger.places(run.run)
        self._require_same_account(run, [place.account for place in recorded])
        regions = [place.region for place in recorded] or [run.spec.get("region")]
        return [self.account.place(region) for region in dict.fromkeys(regions)]

    def _require_same_account(self, run: Record, recorded: Sequence[str | None]) -> None:
        """Another account lists nothing of the run, and that would count as clean."""
        who = self.account.who() if self.account else None
        others = {each for each in recorded if each and who and each != who}
        if others:
            raise UserError(
                f"run {run.run} was made in account {', '.join(sorted(others))},"
                f" and the keys are for {who}",
                "use the keys that it was made with",
            )

    def _sweep(
        self, run: Record, places: list[Place], marks: Marks, report: Callable[[str], None]
    ) -> Swept:
        fresh = is_fresh(self.ledger.journal(run.run))

        def learn(found: Mapping[str, str]) -> None:
            if not run.infrastructure and len(found) == 1:
                with suppress(Unwritable):  # for the next time, when its nodes are gone
                    self.ledger.set_infrastructure(run.run, *found)

        sweeper = Sweeper(self._journal_of(run.run), report, self.pace, fresh, learn)
        swept = sweeper.sweep(places, marks)
        if self.traces and not swept.things:
            for infrastructure in swept.marks.infrastructures:
                self.traces.wipe(infrastructure)
        return swept

    def _journal_of(self, run: str) -> Journal:
        return lambda action, target: self._journalled(run, action, target)

    def _make_im_forget(self, marks: Marks) -> None:
        """Let an IM that could not destroy an infrastructure forget it: nothing of it is left."""
        if self.account is None:
            return
        with suppress(RemoteError):  # the proof asks again, and tells
            for infrastructure in self.im.infrastructures():
                if infrastructure in marks.infrastructures:
                    self.im.forget(infrastructure)

    def _word(self, run: Record, marks: Marks) -> Word | None:
        """Ask IM which of the run's infrastructures it lists; None where it has no part."""
        if isinstance(self.im, Machinist):
            return None
        try:
            listed = self.im.infrastructures()
            known = [each for each in listed if each in marks.infrastructures]
            found = self.im.find(run.run)
        except RemoteError as error:
            return Word(silent=error.message, taken=now())
        return Word(tuple(dict.fromkeys([*known, *found])), taken=now())

    @contextmanager
    def _journalled(self, run: str, action: str, target: str) -> Iterator[Step]:
        """An intent of the ledger's, as far as the ledger can be written."""
        step = Step()
        with suppress(Unwritable), ExitStack() as stack:
            with suppress(Unwritable):
                step = stack.enter_context(self.ledger.intent(run, action, target))
            yield step

    def _infrastructures(self, run: Record) -> Iterator[str]:
        """Give the ids, also of one whose creation was asked for but whose id never came back.

        The known one comes first, before IM is asked for others: it goes away in any case.
        """
        if run.infrastructure:
            yield run.infrastructure
        yield from (i for i in self.im.find(run.run) if i != run.infrastructure)

    def _empty_store(self, run: Record, report: Callable[[str], None]) -> None:
        """Delete what the nodes' shared file system has in the bucket, if the run had one."""
        uri = juicefs.uri_of(run)
        if uri is None:
            return
        report(f"deleting {uri}")
        with self._journalled(run.run, "delete", uri) as step:
            step.detail = f"{juicefs.remove(self.client, uri)} objects"

    def _until_im_forgets(self, infrastructure: str, report: Callable[[str], None]) -> None:
        clock = self.pace.clock
        deadline, asked = clock() + self.pace.patience, float("-inf")
        refusal = ""
        while infrastructure in self.im.infrastructures():
            if clock() > deadline:
                raise RemoteError(
                    f"IM does not destroy {infrastructure}: {refusal or 'it gives no cause'}",
                    "look at the cloud, then run `mayfly destroy` again",
                )
            if clock() - asked > AGAIN_S or self._state(infrastructure) != "deleting":
                asked = clock()
                refusal = self._ask(infrastructure) or refusal
            report(f"waiting for IM{': ' + refusal if refusal else ''}")
            self.pace.sleep(self.pace.interval)

    def _ask(self, infrastructure: str) -> str:
        """Return IM's refusal: it refuses while it still creates nodes, and can be asked again."""
        try:
            self.im.destroy(infrastructure)
        except RemoteError as error:
            return str(error)
        return ""

    def _state(self, infrastructure: str) -> str:
        try:
            return self.im.state(infrastructure).infrastructure
        except RemoteError:
            return "unknown"  # it may be gone by now; the listing decides


def destroyer_of(services: Services, ledger: Ledger) -> Destroyer:
    """Return what removes a run that has these services."""
    return Destroyer(services.im, ledger, services.client, services.traces, services.account)


def is_fresh(journal: Sequence[Entry], moment: datetime | None = None) -> bool:
    """Return whether something may just have been made: nodes were asked for a short while ago."""
    makes = ("create", "grow")
    asked = [entry.intended for entry in journal if entry.action in makes and entry.intended]
    if not asked:
        return False
    age = (moment or datetime.now(UTC)) - datetime.fromisoformat(max(asked))
    return age.total_seconds() < FRESH_S


def _not_clean(proof: Proof, swept: Swept) -> RemoteError:
    """Name what is left, and the first reason that somebody gave."""
    there = {(thing.place, thing.kind, thing.id) for thing in swept.things}
    why = next((f" ({swept.refusals[key].message})" for key in swept.refusals if key in there), "")
    advice = "remove the cause and run `mayfly destroy` again: what is left may cost money"
    return RemoteError(f"still there after destroy: {proof.summary()}{why}", advice)
