"""Make the nodes of a job: try its offers one after another, until one has room."""

from __future__ import annotations

import secrets
from contextlib import suppress
from dataclasses import dataclass, replace

from mayfly import inputs
from mayfly.choices import label, pool
from mayfly.destroy import destroyer_of
from mayfly.errors import MayflyError, OverBudget, RemoteError, UserError
from mayfly.failover import Attempt, Cause, NotMade, Pool, classify, next_offer, telling_line
from mayfly.im import Manager
from mayfly.images import NoImage
from mayfly.job import Job, Ready, Tools
from mayfly.meter import Meter
from mayfly.prepare import image_of, note_place
from mayfly.radl_render import write_radl
from mayfly.redact import Secret
from mayfly.spending import Basis
from mayfly.watch import Broken, Pace, Report, wait_for_nodes


@dataclass(frozen=True)
class Course:
    """What a deployment keeps account of: its cost, and the offers that were tried."""

    meter: Meter
    attempts: list[Attempt]

    def tried(self, job: Job, cause: Cause | None = None, message: str | None = None) -> None:
        """Add an attempt; without a cause its nodes were made."""
        self.attempts.append(job.tried(cause, message))


def make_nodes(ready: Ready, tools: Tools, course: Course, report: Report) -> tuple[Ready, str]:
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
        destroyer = destroyer_of(ready.services, tools.ledger)
        destroyer.destroy(tools.ledger.get(ready.run.id), lambda text: report(text, None))
        tools.ledger.set_infrastructure(ready.run.id, None)
        while (changed := _with_offer(ready, jobs[at], tools, course)) is None:
            later = next_offer(Cause.PRICE, at, pools, used_up)
            if later is None:
                last = course.attempts[-1]
                raise NotMade(Cause(last.cause or Cause.OTHER), last.message or "")
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
    if not infrastructure:
        return "\n".join(lines)
    with suppress(MayflyError):
        state = im.state(infrastructure)
        failed = [number for number, what in state.nodes.items() if what == "failed"]
        lines = [*(im.node_messages(infrastructure, number) for number in failed), *lines]
    return "\n".join(lines)


def _with_offer(ready: Ready, job: Job, tools: Tools, course: Course) -> Ready | None:
    """The run on another offer; None when there is no such type or image, or it is too dear now."""
    said = label(job.target)
    try:
        price = _price_now(job, tools)
        if not _agreed(job, price, said, tools):
            course.tried(job, Cause.PRICE, "dearer than the plan said")
            tools.display.say(course.attempts[-1].line())
            return None
        image = image_of(job, ready.services, tools)
        basis = course.meter.switch(price)
    except UserError as error:  # one of the other offers may do
        course.tried(job, _cause_of(error), str(error))
        tools.display.say(course.attempts[-1].line())
        return None
    tools.display.say(f"next offer: {said}")
    job = replace(job, keep=ready.job.keep, basis=basis)
    note_place(ready, job, tools)
    if basis:
        tools.ledger.set_cost(ready.run.id, basis.document())
    run = replace(
        ready.run,
        image=image,
        region=job.place.region,
        train_s=basis.train_s if basis else None,
        end_s=basis.end_s if basis else None,
    )
    radl = job.render(job.spec, job.profile, run)
    path = tools.build / f"{run.id}-{len(course.attempts) + 1}.radl"
    write_radl(radl, path)
    return replace(ready, job=job, run=run, radl=radl, path=path)


def _cause_of(error: UserError) -> Cause:
    if isinstance(error, OverBudget):
        return Cause.PRICE
    return Cause.IMAGE if isinstance(error, NoImage) else Cause.OTHER


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
    given = {
        **ready.services.s3.inputs(),
        inputs.STORE_PASSWORD: password,
        **ready.job.secrets,
        **ready.secrets,
    }
    text = inputs.fill(ready.radl, {name: secret.reveal() for name, secret in given.items()})
    with tools.ledger.intent(ready.run.id, "create", "infrastructure") as step:
        step.detail = ready.services.im.create(text)
    tools.ledger.set_infrastructure(ready.run.id, step.detail)
    return step.detail
