"""Run a job from its data in S3 to a verified model in S3, and leave nothing running.

Nothing is created before everything that can be checked was checked. Whatever happens afterwards
(an error, Ctrl-C), the nodes are destroyed, unless the user asked to keep them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from mayfly import export
from mayfly.attempts import Course, make_nodes
from mayfly.configuring import configure
from mayfly.destroy import destroyer_of
from mayfly.display import Phases
from mayfly.ending import (
    Ending,
    Outcome,
    conclude,
    count_leftovers,
    destroy_nodes,
    kept,
    note_failure,
    patiently,
    say_what_is_left,
)
from mayfly.errors import MayflyError
from mayfly.job import Job, Ready, Tools
from mayfly.ledger import Record
from mayfly.meter import Meter
from mayfly.prepare import prepare, register
from mayfly.services import reopen_services
from mayfly.summary import PHASES, failure_document, success_document
from mayfly.watch import (
    EXPORTING,
    STOPPED,
    SUCCEEDED,
    Broken,
    NotExported,
    Pace,
    Status,
    stopped,
    wait_for_status,
)
from mayfly_train.errors import NodeError

# Nodes report every few seconds; a whole epoch of evaluation is shorter than this.
SILENCE_S = 150.0
# Nodes end an idle run themselves, the start of which may take this long anyway; and this is how
# much later it ends when they do not.
START_S, IDLE_MARGIN_S = 900.0, 300.0


Work = Callable[[Ready, Tools, Phases, Course], Status]
"""Makes the nodes and follows what they do to its end."""


def deploy(job: Job, tools: Tools, work: Work | None = None) -> Outcome:
    """Run a job to its end, and return how that was; errors of ours and the user's are returned.

    `work` is what happens while there are nodes: training, unless another is given.
    """
    phases = Phases(tools.display)
    with ExitStack() as stack:
        try:
            ready = prepare(job, tools, phases)
            stack.enter_context(tools.ledger.alone(ready.run.id, "mayfly deploy"))
            register(ready, tools)
        except (MayflyError, NodeError, KeyboardInterrupt) as early:
            document = failure_document(None, early, phases.seconds, 0, tools.display.redact)
            return Outcome(document, early)
        return _run(ready, tools, phases, work or _work)


def _run(ready: Ready, tools: Tools, phases: Phases, work: Work) -> Outcome:
    """Run a registered job to its end; see `deploy`."""
    job = ready.job
    status, error, attempts = Status(), None, list(ready.passed)
    meter = Meter(job.basis, job.spec.limits.max_duration, Pace().clock)
    try:
        status = work(ready, tools, phases, Course(meter, attempts))
        if status.state == STOPPED:
            raise stopped(status)
        tools.ledger.set_outcome(ready.run.id, "succeeded")
    except (Exception, KeyboardInterrupt) as caught:
        error = caught
        note_failure(ready, tools, caught)
    try:
        keep = (job.keep or isinstance(error, NotExported)) and not meter.over()
        hurried = isinstance(error, KeyboardInterrupt)
        leftovers = kept(ready, tools) if keep else destroy_nodes(ready, tools, phases, hurried)
    except (MayflyError, KeyboardInterrupt) as caught:
        error = error or caught
        leftovers = (
            say_what_is_left(ready, tools)
            if isinstance(caught, KeyboardInterrupt)
            else count_leftovers(ready.services, tools, tools.ledger.get(ready.run.id))
        )
    cost = meter.document(status, gone=not leftovers)
    return conclude(ready, tools, phases, Ending(status, error, leftovers, cost, attempts))


def _work(ready: Ready, tools: Tools, phases: Phases, course: Course) -> Status:
    """Create, configure, train, export; returns the status of a run whose model was verified."""
    run, ledger, meter = ready.run.id, tools.ledger, course.meter
    with phases.phase("infrastructure") as report:
        ready, infrastructure = make_nodes(ready, tools, course, report)
    ledger.set_state(run, "configuring")
    configure(ready, infrastructure, tools, phases, meter)
    ledger.set_state(run, "training")
    return _train(ready, infrastructure, tools, phases, meter)


def _train(ready: Ready, infrastructure: str, tools: Tools, phases: Phases, meter: Meter) -> Status:
    idle = max(ready.job.spec.limits.idle, START_S) + IDLE_MARGIN_S
    watched = export.Watched(
        ready.run.id,
        ready.uri,
        ready.services,
        infrastructure,
        meter.to_the_end(Pace(patience=SILENCE_S, idle=idle)),
    )
    with phases.phase("training") as report:
        try:
            wait_for_status(
                (EXPORTING, SUCCEEDED, STOPPED),
                ready.store.status,
                watched.nodes,
                watched.pace,
                lambda now: report(now.line() + meter.line(now), now.fraction),
            )
        except Broken as error:
            raise export.explained(error, ready.run.id) from error
    tools.ledger.set_state(ready.run.id, "exporting")
    status = export.follow(watched, ready.store.status, phases)
    phases.seconds.update({k: v for k, v in status.phases.items() if k in ("training", "export")})
    return status


def export_again(record: Record, tools: Tools, *, keep: bool) -> Outcome:
    """Export the model of a run that failed in it; its nodes are destroyed once that is done.

    Raises an error, and leaves everything as it is, when there is nothing to export, or another
    process works on the run.
    """
    with tools.ledger.alone(record.run, "mayfly export"):
        return _export_again(tools.ledger.get(record.run), tools, keep=keep)


def _export_again(record: Record, tools: Tools, *, keep: bool) -> Outcome:
    run, display, phases = record.run, tools.display, Phases(tools.display)
    with phases.phase("services"):
        services = reopen_services(record, tools.environ, display.say)
    display.redact = display.redact.knowing(services.secrets)
    pace = Pace(patience=SILENCE_S, idle=float(record.spec["limits"]["idle"]))
    error: BaseException | None = None
    status, leftovers = Status(), 0
    try:
        status = export.resume(record, services, phases, pace)
        tools.ledger.set_outcome(run, "stopped" if status.state == STOPPED else "succeeded")
    except NotExported as caught:
        error = caught
        tools.ledger.set_outcome(run, "failed", display.redact(str(caught)))
    if error is None and not keep:
        destroyer = destroyer_of(services, tools.ledger)
        with phases.phase("destroy") as report, patiently(display, run):
            leftovers = destroyer.destroy(record, lambda text: report(text, None)).count
    else:
        leftovers = count_leftovers(services, tools, record)
    seconds = {name: phases.seconds.get(name, 0.0) for name in PHASES}
    if error is None:
        document = success_document(run, record.uri, status, seconds, leftovers)
    else:
        document = failure_document(run, error, seconds, leftovers, display.redact)
    tools.ledger.set_summary(run, document)
    return Outcome(document, error)
