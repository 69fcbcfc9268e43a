"""Run a job from its data in S3 to a verified model in S3, and leave nothing running.

Nothing is created before everything that can be checked was checked. Whatever happens afterwards
(an error, Ctrl-C), the nodes are destroyed, unless the user asked to keep them.
"""

from __future__ import annotations

import secrets
import signal
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mayfly import collection, data, export, fashion_mnist, images, inputs, juicefs, preflight
from mayfly.choices import label, pool
from mayfly.clouds import CloudProfile
from mayfly.destroy import Destroyer
from mayfly.display import Display, Phases
from mayfly.engines import image_extras
from mayfly.errors import LimitReached, MayflyError, OverBudget, RemoteError, UserError
from mayfly.failover import Attempt, Cause, NotMade, Pool, classify, next_offer, telling_line
from mayfly.im import Manager
from mayfly.ledger import Ledger, Record, Unwritable
from mayfly.meter import Meter
from mayfly.places import Place, Target
from mayfly.radl_render import render, write_radl
from mayfly.redact import Secret
from mayfly.run import Run, new_run_id
from mayfly.run_store import RunStore, preprocess_progress, staging_progress
from mayfly.services import Services, local_image, open_services, reopen_services
from mayfly.spec import CHECKOUT, ClusterSpec
from mayfly.spending import Basis
from mayfly.steps import GROUPS, load_stages
from mayfly.summary import PHASES, failure_document, stopped_document, success_document
from mayfly.watch import (
    EXPORTING,
    STOPPED,
    SUCCEEDED,
    Broken,
    NotExported,
    Pace,
    Report,
    Status,
    stopped,
    wait_for_nodes,
    wait_for_status,
    wait_until_configured,
)
from mayfly_train.errors import NodeError

# Nodes report every few seconds; a whole epoch of evaluation is shorter than this.
SILENCE_S = 150.0
# Nodes end an idle run themselves, the start of which may take this long anyway; and this is how
# much later it ends when they do not.
START_S, IDLE_MARGIN_S = 900.0, 300.0


@dataclass(frozen=True)
class Job:
    """What to run and where; complete and valid."""

    spec: ClusterSpec
    profile: CloudProfile
    keep: bool = False
    place: Place = Place()
    finder: images.Finder | None = None
    """Who looks up images at the provider, where somebody has to."""
    basis: Basis | None = None
    """What its cost is computed from; None where no price is known."""
    others: tuple[Job, ...] = ()
    """What to try, in this order, when the provider has no such nodes."""

    @property
    def target(self) -> Target:
        """What is made, and where."""
        return Target(self.spec, self.profile, self.place)


@dataclass(frozen=True)
class Tools:
    """What a deployment works with."""

    ledger: Ledger
    display: Display
    environ: MutableMapping[str, str]
    cache: Path
    build: Path = CHECKOUT / "build"
    price_now: Callable[[Job], Basis | None] | None = None
    """Looks the price of an offer up again; raises OverBudget."""
    ask: Callable[[str], bool] | None = None
    """Asks the user; None where nobody can answer."""


@dataclass(frozen=True)
class Ready:
    """A run that was checked, and of which nothing exists yet but its record."""

    job: Job
    run: Run
    uri: str
    services: Services
    store: RunStore
    radl: str
    path: Path  # where the RADL was written


@dataclass(frozen=True)
class Ending:
    """What is known at the end: the last status, what went wrong, and how much is left."""

    status: Status
    error: BaseException | None
    leftovers: int
    cost: dict[str, Any] | None
    attempts: list[Attempt]


@dataclass(frozen=True)
class Course:
    """What a deployment keeps account of: its cost, and the offers that were tried."""

    meter: Meter
    attempts: list[Attempt]

    def tried(self, job: Job, cause: Cause | None = None, message: str | None = None) -> None:
        """Add an attempt; without a cause its nodes were made."""
        price, currency = (job.basis.per_hour, job.basis.currency) if job.basis else (None, None)
        offer = label(job.target)
        self.attempts.append(Attempt(offer, price, currency, cause, message))


@dataclass(frozen=True)
class Outcome:
    """How a run ended: the document for --json, and the error if it did not end well."""

    document: dict[str, Any]
    error: BaseException | None = None


def deploy(job: Job, tools: Tools) -> Outcome:
    """Run a job to its end, and return how that was; errors of ours and the user's are returned."""
    phases = Phases(tools.display)
    try:
        ready = prepare(job, tools, phases)
        _register(ready, tools)
    except (MayflyError, NodeError, KeyboardInterrupt) as early:
        document = failure_document(None, early, phases.seconds, 0, tools.display.redact)
        return Outcome(document, early)
    status, error, attempts = Status(), None, list[Attempt]()
    meter = Meter(job.basis, job.spec.limits.max_duration, Pace().clock)
    try:
        status = _work(ready, tools, phases, Course(meter, attempts))
        if status.state == STOPPED:
            raise stopped(status)
        tools.ledger.set_outcome(ready.run.id, "succeeded")
    except (Exception, KeyboardInterrupt) as caught:
        error = caught
        _note_failure(ready, tools, caught)
    try:
        keep = (job.keep or isinstance(error, NotExported)) and not meter.over()
        hurried = isinstance(error, KeyboardInterrupt)
        leftovers = _kept(ready, tools) if keep else _destroy(ready, tools, phases, hurried)
    except (MayflyError, KeyboardInterrupt) as caught:
        error = error or caught
        leftovers = (
            _say_what_is_left(ready, tools)
            if isinstance(caught, KeyboardInterrupt)
            else _count_leftovers(ready.services, tools, tools.ledger.get(ready.run.id))
        )
    cost = meter.document(status, gone=not leftovers)
    return _conclude(ready, tools, phases, Ending(status, error, leftovers, cost, attempts))


def prepare(job: Job, tools: Tools, phases: Phases) -> Ready:
    """Start what the cloud needs, check keys, buckets and data, and render the RADL.

    Raises an error for everything that is known to be wrong now.
    """
    spec, display = job.spec, tools.display
    require_deployable(job)
    with phases.phase("services"):
        services = open_services(spec.cloud, tools.environ, display.say)
    display.redact = display.redact.knowing(services.secrets)
    preflight.check_bucket(services.client, str(spec.model.destination))
    preflight.check_store(spec.store, services.s3.endpoint, local=services.platform is not None)
    _provide_data(job, tools, services, phases)
    dataset = preflight.check_dataset(services.client, spec.data.source)
    preflight.check_preprocess(spec, dataset)
    display.say(f"data: {dataset.uri}, {dataset.describe()}")
    with phases.phase("image"):
        image = _image(job, services, tools)
    with phases.phase("collection"):
        run = _new_run(job, tools, services, image)
    uri = run.uri(spec)
    radl = render(spec, job.profile, run, load_stages())
    path = tools.build / f"{run.id}.radl"
    write_radl(radl, path)
    display.say(f"run {run.id}: {_nodes(spec)} on {job.profile.title}; RADL in {path}")
    return Ready(job, run, uri, services, RunStore(services.client, uri), radl, path)


def require_deployable(job: Job) -> None:
    """Raise UserError for what can be planned, but not deployed yet."""
    profile = job.profile
    if profile.backend == "inventory":
        raise UserError(
            f"mayfly does not run the playbooks on {profile.title} yet",
            f"`mayfly plan --cloud {profile.name} --inventory FILE` prints the command to run",
        )


def _image(job: Job, services: Services, tools: Tools) -> str:
    if services.platform is None:
        return images.resolve(job.spec, job.profile, job.place, job.finder)
    extras = image_extras(job.spec.trainer.engine, job.spec.trainer.runtime)
    extras += juicefs.image_extras(job.spec.store)
    return local_image(extras, tools.display.say)


def _nodes(spec: ClusterSpec) -> str:
    groups = [f"{spec.count(group)} {group}" for group in GROUPS if spec.count(group)]
    return f"{' + '.join(groups)} nodes"


def _register(ready: Ready, tools: Tools) -> None:
    """Make the run known, here and in the bucket, which also shows that the keys can write."""
    spec = ready.job.spec.model_dump(mode="json")
    ready.store.write_job(spec)
    cloud, im = ready.job.spec.cloud, ready.services.im_url
    tools.ledger.add(ready.run.id, cloud, ready.uri, spec, im)
    _note_place(ready, ready.job, tools)
    if ready.job.basis:
        tools.ledger.set_cost(ready.run.id, ready.job.basis.document())


def _note_place(ready: Ready, job: Job, tools: Tools) -> None:
    """Record where nodes are about to be made: destroy sweeps there."""
    if account := ready.services.account:
        tools.ledger.add_place(ready.run.id, job.place.region, account.who())


def _provide_data(job: Job, tools: Tools, services: Services, phases: Phases) -> None:
    """Put the default jobs' data into the local bucket, where it is not yet."""
    source = job.spec.data.source
    known = fashion_mnist.made_for(source)
    if services.platform is None or known is None:
        return
    if services.s3.endpoint != services.platform.s3_endpoint or not preflight.is_unfinished(
        services.client, source
    ):
        return
    with phases.phase("data") as report:
        directory = known.prepare(tools.cache, report)
        data.put(directory, source, services.client, known.options, report)


def _new_run(job: Job, tools: Tools, services: Services, image: str) -> Run:
    destination = str(job.spec.model.destination)
    client, endpoint = services.client, services.s3.endpoint
    tarball = collection.build(CHECKOUT, tools.cache)
    return Run(
        id=new_run_id(job.spec.name),
        image=image,
        collection=collection.publish(tarball, client, job.profile, destination, endpoint),
        s3_endpoint=services.s3.endpoint,
        s3_region=services.s3.region,
        session_token=services.s3.session_token is not None,
        keep=job.keep,
        region=job.place.region,
        train_s=job.basis.train_s if job.basis else None,
        end_s=job.basis.end_s if job.basis else None,
    )


def _work(ready: Ready, tools: Tools, phases: Phases, course: Course) -> Status:
    """Create, configure, train, export; returns the status of a run whose model was verified."""
    run, ledger, meter = ready.run.id, tools.ledger, course.meter
    with phases.phase("infrastructure") as report:
        ready, infrastructure = _make_nodes(ready, tools, course, report)
    ledger.set_state(run, "configuring")
    _configure(ready, infrastructure, tools, phases, meter)
    ledger.set_state(run, "training")
    return _train(ready, infrastructure, tools, phases, meter)


def _make_nodes(ready: Ready, tools: Tools, course: Course, report: Report) -> tuple[Ready, str]:
    """Try the job's offers until one has room; what another has made is gone before the next.

    Returns the run as it was made. Raises NotMade, or what IM said, when no offer can help.
    """
    jobs = (ready.job, *ready.job.others)
    pools = [pool(job.target) for job in jobs]
    used_up: set[Pool] = set()
    at: int | None = 0
    while True:
        try:
            return ready, _try(ready, tools, course, report)
        except NotMade as error:
            at = next_offer(error.cause, at or 0, pools, used_up)
            if at is None:
                raise
        destroyer = _destroyer(ready.services, tools)
        destroyer.destroy(tools.ledger.get(ready.run.id), lambda text: report(text, None))
        tools.ledger.set_infrastructure(ready.run.id, None)
        while (changed := _with_offer(ready, jobs[at], tools, course)) is None:
            later = next_offer(Cause.PRICE, at, pools, used_up)
            if later is None:
                raise NotMade(Cause.PRICE, course.attempts[-1].message or "")
            at = later
        ready = changed


def _try(ready: Ready, tools: Tools, course: Course, report: Report) -> str:
    """Make one offer's nodes and return the infrastructure. Raises NotMade for a known cause."""
    job, run, im = ready.job, ready.run.id, ready.services.im
    tools.ledger.set_state(run, "creating")
    course.meter.begin()
    count = job.spec.count("ps") + job.spec.count("worker")
    infrastructure = ""
    with tools.ledger.intent(run, "offer", label(job.target)):
        try:
            infrastructure = _create(ready, tools)
            pace = course.meter.before_training(Pace())
            wait_for_nodes(im, infrastructure, count, pace, report)
        except (Broken, RemoteError) as error:
            text = _what_im_says(im, infrastructure, error)
            cause = classify(text)
            course.tried(job, cause, telling_line(tools.display.redact(text)))
            tools.display.say(course.attempts[-1].line())
            if cause is Cause.OTHER:
                raise  # its own words are better than ours, and no other offer can help
            raise NotMade(cause, tools.display.redact(text)) from error
    course.tried(job)
    return infrastructure


def _what_im_says(im: Manager, infrastructure: str, error: MayflyError) -> str:
    """All that is known of a failure, that of single nodes too: IM tells it there only."""
    lines = [*(error.log_tail if isinstance(error, Broken) else []), str(error)]
    with suppress(MayflyError):
        state = im.state(infrastructure)
        failed = [number for number, what in state.nodes.items() if what == "failed"]
        lines = [*(im.node_messages(infrastructure, number) for number in failed), *lines]
    return "\n".join(lines)


def _with_offer(ready: Ready, job: Job, tools: Tools, course: Course) -> Ready | None:
    """The run on another offer; None when that has become dearer than the user has agreed to."""
    said = label(job.target)
    try:
        price = _price_now(job, tools)
        if not _agreed(job, price, said, tools):
            course.tried(job, Cause.PRICE, "dearer than the plan said")
            tools.display.say(course.attempts[-1].line())
            return None
        basis = course.meter.switch(price)
    except OverBudget as error:
        course.tried(job, Cause.PRICE, str(error))
        tools.display.say(course.attempts[-1].line())
        return None
    tools.display.say(f"next offer: {said}")
    job = replace(job, keep=ready.job.keep, basis=basis)
    _note_place(ready, job, tools)
    if basis:
        tools.ledger.set_cost(ready.run.id, basis.document())
    run = replace(
        ready.run,
        image=_image(job, ready.services, tools),
        region=job.place.region,
        train_s=basis.train_s if basis else None,
        end_s=basis.end_s if basis else None,
    )
    radl = render(job.spec, job.profile, run, load_stages())
    path = tools.build / f"{run.id}-{len(course.attempts) + 1}.radl"
    write_radl(radl, path)
    return replace(ready, job=job, run=run, radl=radl, path=path)


def _price_now(job: Job, tools: Tools) -> Basis | None:
    """The price of an offer now; the plan's, which is minutes old, when nobody answers."""
    try:
        return tools.price_now(job) if tools.price_now else job.basis
    except RemoteError:
        return job.basis


def _agreed(job: Job, price: Basis | None, said: str, tools: Tools) -> bool:
    """Whether an offer still costs what the plan said; if not, the user is asked, if there is one.

    An offer of unknown price was called so in the plan.
    """
    planned = job.basis
    if price is None or (planned is not None and price.per_hour <= planned.per_hour):
        return planned is None or price is not None
    before = f"{planned.per_hour:.3f}" if planned else "an unknown price"
    question = f"{said} costs {price.per_hour:.3f} {price.currency} an hour, not {before}. Take it?"
    return tools.ask is not None and tools.ask(question)


def _create(ready: Ready, tools: Tools) -> str:
    """Send the RADL with its secrets filled in, which happens in memory only."""
    password = Secret(secrets.token_hex(24))
    tools.display.redact = tools.display.redact.knowing([password])
    given = {**ready.services.s3.inputs(), inputs.STORE_PASSWORD: password}
    text = inputs.fill(ready.radl, {name: secret.reveal() for name, secret in given.items()})
    with tools.ledger.intent(ready.run.id, "create", "infrastructure") as step:
        step.detail = ready.services.im.create(text)
    tools.ledger.set_infrastructure(ready.run.id, step.detail)
    return step.detail


def _configure(
    ready: Ready, infrastructure: str, tools: Tools, phases: Phases, meter: Meter
) -> None:
    """Wait for contextualization; the staging inside it is shown, and counted, as its own phase."""
    im, display = ready.services.im, tools.display

    def show_staging() -> None:
        text, fraction = staging_progress(ready.store.staging())
        if text:
            display.update("staging", text, fraction)
        if ready.job.spec.data.preprocess:
            text, fraction = preprocess_progress(ready.store.preprocessing())
            if text:
                display.update("preprocessing", text, fraction)

    try:
        with phases.phase("contextualization") as report:
            pace = meter.before_training(Pace())
            wait_until_configured(im, infrastructure, pace, report, show_staging)
    finally:
        _keep_messages(ready, infrastructure, tools)
        if reports := ready.store.staging():
            _split_staging(phases, staging_seconds(reports))
        if ready.job.spec.data.preprocess and (reports := ready.store.preprocessing()):
            text, _ = preprocess_progress(reports)
            whole = not any(report.get("error") for report in reports)
            display.finish("preprocessing", staging_seconds(reports), ok=whole, text=text)


def _split_staging(phases: Phases, seconds: float) -> None:
    """Count `seconds` of contextualization as staging, replacing what was counted before."""
    whole = phases.seconds["contextualization"] + phases.seconds.get("staging", 0.0)
    staging = min(seconds, whole)
    phases.seconds["contextualization"] = whole - staging
    phases.record("staging", staging, "within contextualization")


def staging_seconds(reports: list[Any]) -> float:
    """Return how long the slowest node took to copy its share, or to convert."""
    return max((float(report.get("seconds") or 0.0) for report in reports), default=0.0)


def _keep_messages(ready: Ready, infrastructure: str, tools: Tools) -> None:
    """Put IM's messages beside the run's logs: they are gone with the infrastructure."""
    try:
        text = tools.display.redact(ready.services.im.messages(infrastructure))
        ready.store.write_log("contextualization.log", text)
    except (MayflyError, NodeError) as error:
        tools.display.say(f"IM's messages could not be kept: {error}")


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


def _note_failure(ready: Ready, tools: Tools, error: BaseException) -> None:
    """Record why a run failed, and show the last lines of what failed."""
    interrupted = isinstance(error, KeyboardInterrupt)
    outcome = "stopped" if isinstance(error, LimitReached) else "failed"
    outcome = "interrupted" if interrupted else outcome
    cause = "interrupted" if interrupted else tools.display.redact(str(error))
    with suppress(Unwritable):  # the nodes are to be destroyed all the same
        tools.ledger.set_outcome(ready.run.id, outcome, cause)
    if isinstance(error, Broken):
        for line in error.log_tail:
            tools.display.say(f"  | {line}")
    if interrupted:
        tools.display.say(
            "interrupted: destroying what was made;"
            f" Ctrl-C again leaves that to `mayfly destroy {ready.run.id}`"
        )


def _kept(ready: Ready, tools: Tools) -> int:
    """Leave the nodes, say so, and return how many things there are."""
    tools.ledger.set_state(ready.run.id, "kept")
    if not ready.job.keep:
        export.hold_nodes(ready.services.im, tools.ledger.get(ready.run.id), tools.display.say)
    tools.display.say(f"nodes are kept: remove them with `mayfly destroy {ready.run.id}`")
    return _count_leftovers(ready.services, tools, tools.ledger.get(ready.run.id))


def _say_what_is_left(ready: Ready, tools: Tools) -> int:
    """Name what an interrupted destroy left, and return how many things there are."""
    record = tools.ledger.get(ready.run.id)
    try:
        left = _destroyer(ready.services, tools).prove(record).left()
    except MayflyError as error:
        left = [f"what nobody could list ({error.message})"]
    named = ", ".join(left) or f"infrastructure {record.infrastructure or 'unknown'}"
    tools.display.say(f"left: {named}; remove it with `mayfly destroy {record.run}`")
    return len(left)


def _destroyer(services: Services, tools: Tools) -> Destroyer:
    return Destroyer(services.im, tools.ledger, services.client, services.traces, services.account)


def _destroy(ready: Ready, tools: Tools, phases: Phases, hurried: bool) -> int:
    """Destroy the nodes; who has pressed Ctrl-C before leaves with the next one."""
    destroyer = _destroyer(ready.services, tools)
    patience = nullcontext() if hurried else _patiently(tools.display, ready.run.id)
    with phases.phase("destroy") as report, patience:
        record = tools.ledger.get(ready.run.id)
        return destroyer.destroy(record, lambda text: report(text, None)).count


def export_again(record: Record, tools: Tools, *, keep: bool) -> Outcome:
    """Export the model of a run that failed in it; its nodes are destroyed once that is done.

    Raises an error, and leaves everything as it is, when there is nothing to export.
    """
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
        destroyer = _destroyer(services, tools)
        with phases.phase("destroy") as report, _patiently(display, run):
            leftovers = destroyer.destroy(record, lambda text: report(text, None)).count
    else:
        leftovers = _count_leftovers(services, tools, record)
    seconds = {name: phases.seconds.get(name, 0.0) for name in PHASES}
    if error is None:
        document = success_document(run, record.uri, status, seconds, leftovers)
    else:
        document = failure_document(run, error, seconds, leftovers, display.redact)
    tools.ledger.set_summary(run, document)
    return Outcome(document, error)


def _count_leftovers(services: Services, tools: Tools, record: Record) -> int:
    """Return how many things of the run are there now; what nobody can tell counts as one."""
    proof = _destroyer(services, tools).prove(record)
    return proof.count or int(not proof.clean)


def _conclude(ready: Ready, tools: Tools, phases: Phases, ending: Ending) -> Outcome:
    run, error, leftovers = ready.run.id, ending.error, ending.leftovers
    seconds = {name: phases.seconds.get(name, 0.0) for name in PHASES}
    if error is None or isinstance(error, LimitReached):
        document = success_document(run, ready.uri, ending.status, seconds, leftovers)
    else:
        document = failure_document(run, error, seconds, leftovers, tools.display.redact)
    if isinstance(error, LimitReached):
        document = stopped_document(document, ending.status, error)
    document["cost"] = ending.cost
    document["attempts"] = [attempt.document() for attempt in ending.attempts]
    with suppress(Unwritable):
        tools.ledger.set_summary(run, document)
    return Outcome(document, error)


@contextmanager
def _patiently(display: Display, run: str) -> Iterator[None]:
    """While nodes are destroyed, the first Ctrl-C only says so; the second one leaves."""

    def explain(number: int, frame: object) -> None:
        del number, frame
        display.say(f"still destroying; Ctrl-C again leaves that to `mayfly destroy {run}`")
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = signal.signal(signal.SIGINT, explain)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
