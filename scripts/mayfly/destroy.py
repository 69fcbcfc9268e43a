"""Remove the nodes of a run, again and again until nothing of it is left.

IM's answer to a DELETE proves nothing (it may have lost sight of a node), so the end is decided by
looking: IM lists no infrastructure of the run, and the cloud lists nothing that carries its label.
What a shared file system has left in the bucket goes last, when nobody is there to write to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol

from mayfly import juicefs
from mayfly.errors import RemoteError
from mayfly.im import Manager
from mayfly.ledger import Ledger, Record, Step, Unwritable
from mayfly.watch import Pace

ORPHAN_S = 5.0  # what is there so long after IM forgot it has nobody else to remove it
AGAIN_S = 60.0  # an IM that was restarted says "deleting" for ever, until it is asked again


class Traces(Protocol):
    """The cloud's own listing of what carries an infrastructure's label."""

    def leftovers(self, infrastructure_id: str) -> list[str]: ...
    def remove(self, infrastructure_id: str) -> None: ...
    def wipe(self, infrastructure_id: str) -> object: ...


@dataclass(frozen=True)
class Destroyer:
    """What is needed to remove a run: IM, and boto3's client of the S3 service that the run has.

    `traces` is None where the cloud has no listing of ours.
    """

    im: Manager
    ledger: Ledger
    client: Any
    traces: Traces | None = None
    pace: Pace = Pace(interval=1.0, patience=600.0)

    def destroy(self, run: Record, report: Callable[[str], None]) -> list[str]:
        """Remove what a run made and return what is left, which is nothing.

        Raises RemoteError, naming what is left, when it does not go away in the pace's patience.
        A ledger that cannot be written keeps nothing alive: nodes cost, and destroying again is
        harmless.
        """
        with suppress(Unwritable):
            self.ledger.set_state(run.run, "destroying")
        removed = []
        for infrastructure in self._infrastructures(run):
            with self._journalled(run.run, "destroy", infrastructure):
                self._remove(infrastructure, report)
            removed.append(infrastructure)
        self._empty_store(run, report)
        self.im.wipe(removed)  # last: it may end a service of ours
        with suppress(Unwritable):
            self.ledger.set_state(run.run, "destroyed")
        return []

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

    def _remove(self, infrastructure: str, report: Callable[[str], None]) -> None:
        self._until_im_forgets(infrastructure, report)
        if self.traces:
            self._until_nothing_carries_the_label(self.traces, infrastructure, report)
            self.traces.wipe(infrastructure)

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

    def _until_nothing_carries_the_label(
        self, traces: Traces, infrastructure: str, report: Callable[[str], None]
    ) -> None:
        started = self.pace.clock()
        while left := traces.leftovers(infrastructure):
            waited = self.pace.clock() - started
            if waited > ORPHAN_S:
                traces.remove(infrastructure)
            if waited > self.pace.patience:
                names = ", ".join(left[:5])
                raise RemoteError(
                    f"still there after destroy: {names}",
                    f"remove what carries the label im.infrastructure={infrastructure} by hand",
                )
            report(f"waiting for {len(left)} to go away")
            self.pace.sleep(self.pace.interval)
