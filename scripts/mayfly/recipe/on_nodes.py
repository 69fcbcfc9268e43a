"""A run on nodes, from before there are any to after they are gone.

The head on its node does the work, and needs nobody: who started the run only follows through the
store, adds and removes nodes, and destroys them at the end. Whatever ends it, `resume` goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from mayfly.attempts import Course, make_nodes
from mayfly.configuring import configure
from mayfly.deploy import deploy
from mayfly.display import Phases, duration
from mayfly.ending import Outcome
from mayfly.engines import COMMAND, image_extras
from mayfly.errors import LimitReached, RemoteError, RunFailed
from mayfly.job import Job, Ready, Tools
from mayfly.recipe.cluster import HEAD, TLS, Cluster, framework_of
from mayfly.recipe.elastic import GONE
from mayfly.recipe.execute import progress as line_of
from mayfly.recipe.fleet import Fleet
from mayfly.recipe.outlook import Outlook
from mayfly.redact import Secret
from mayfly.watch import SUCCEEDED, Broken, Pace, Silence, Status
from mayfly_train.errors import NodeError
from mayfly_train.recipe import head as heads
from mayfly_train.recipe import lock, names, tls
from mayfly_train.recipe.patience import PATIENCE_S
from mayfly_train.recipe.progress import OVER
from mayfly_train.recipe.store import Store, read_json, to_bytes

PHASE = "tasks"
SILENCE_S = 300.0  # a head that is started again on its node is back sooner
LOOK_S = 2.0
GOODBYE_S = 40.0  # for a head to end its tasks and to copy its ledger
OF_TRAINING = ("model_uri", "accuracy", "global_step", "samples_seen", "samples_processed", "steps")
LEFT_BY_NODES = (names.ENDED, names.SCHEDULER, names.PROGRESS, names.CANCEL)


@dataclass(frozen=True)
class OnNodes:
    """What is followed, and how many nodes are wished for."""

    cluster: Cluster
    store: Store
    wish: int
    pace: Pace = Pace(interval=LOOK_S, patience=SILENCE_S)


def run_on_nodes(job: Job, following: OnNodes, tools: Tools) -> Outcome:
    """Run a recipe's tasks on nodes, and destroy these; errors of ours and the user's are returned.

    Raises BadInput while another head works on the run.
    """
    lock.require_free(following.store)
    for name in LEFT_BY_NODES:
        following.store.delete(name)
    work = _Work(following)
    outcome = deploy(carrying(job, following), tools, work)
    return Outcome(_document(outcome.document, work), outcome.error)


def carrying(job: Job, following: OnNodes) -> Job:
    """The job with what its nodes are for; when there is no room for all, fewer nodes will do."""
    keys = Secret(tls.bundle(following.cluster.recipe.name))
    framework = framework_of(following.cluster.recipe)
    job = replace(
        job,
        render=following.cluster.render,
        trains=False,
        extras=image_extras(COMMAND, framework) if framework else (),
        secrets={TLS: keys},
    )
    fewer, count = [], job.spec.count("worker")
    while count > 1:
        count //= 2
        worker = job.spec.nodes.worker.model_copy(update={"count": count})
        nodes = job.spec.nodes.model_copy(update={"worker": worker})
        fewer.append(replace(job, spec=job.spec.model_copy(update={"nodes": nodes})))
    return replace(job, others=tuple(fewer))


@dataclass
class _Work:
    """What happens while there are nodes, and how long tasks took of it."""

    following: OnNodes
    tasks_s: float = 0.0
    status: Status = Status()

    def __call__(self, ready: Ready, tools: Tools, phases: Phases, course: Course) -> Status:
        run, meter, following = ready.run.id, course.meter, self.following
        with phases.phase("infrastructure") as report:
            ready, infrastructure = make_nodes(ready, tools, course, report)
        tools.ledger.set_state(run, "configuring")
        try:
            configure(ready, infrastructure, tools, phases, meter)
        except Broken as error:
            if read_json(following.store, names.PROGRESS) is None:
                raise  # else the head works: nodes that are of no use are replaced
            tools.display.say(f"going on with the nodes that there are: {error}")
        tools.ledger.set_state(run, "training")
        fleet = Fleet(
            run,
            infrastructure,
            affordable(following.wish, ready.job, tools.display.say),
            ready.services.im,
            tools.ledger,
            tools.display.say,
            following.pace.clock,
        )
        pace = meter.to_the_end(following.pace)
        limit_s = float(ready.job.spec.limits.max_duration)
        try:
            with phases.phase(PHASE) as report:
                self.status = Follower(following.store, fleet, pace, limit_s).follow(report)
        except BaseException:
            say_goodbye(following.store, following.pace)
            raise
        finally:
            self.tasks_s = phases.seconds.get(PHASE, 0.0)
        return self.status


def affordable(wish: int, job: Job, say: Callable[[str], None]) -> int:
    """How many workers there may be. A budget is counted for those that were made: the others
    would spend it unseen."""
    made = job.spec.count("worker")
    if job.spec.limits.budget is None or made >= wish:
        return wish
    say(f"the budget is counted for {made} workers: no others will be added")
    return made


class Follower:
    """Follows a head through the store until it says that the run has ended."""

    def __init__(self, store: Store, fleet: Fleet, pace: Pace, limit_s: float) -> None:
        self._store, self._fleet, self._pace = store, fleet, pace
        self._limit_s = limit_s
        self._outlook = Outlook(pace.clock)
        self._silence = Silence(pace.clock, pace.patience)
        self._store_away = Silence(pace.clock, PATIENCE_S)
        self._answers = 0

    def follow(self, report: Any) -> Status:
        """Return when every experiment has ended well, or the run was cancelled.

        Raises RunFailed when it has ended otherwise, Broken when the head is gone or silent, and
        LimitReached after the longest time. A store that does not answer is waited for as long as
        the head waits for it.
        """
        began, known = self._pace.clock(), dict[str, Any]()
        while True:
            ended, known = self._read(known)
            if ended is not None:
                return _judge(ended, known)
            if known:
                report(*describe(known, self._outlook.eta_s(known["experiments"])))
                self._fleet.look(known)
            if self._silence.too_long(known.get("time")):
                raise Broken(f"the head has given no sign of life: {self._head()}")
            if self._store_away.too_long(self._answers):
                minutes = f"{PATIENCE_S / 60:g} minutes"
                raise Broken(f"{self._store.address} has not answered for {minutes}")
            if self._pace.clock() - began > self._limit_s:
                raise LimitReached(
                    "max_duration",
                    f"tasks have run for {self._limit_s:.0f} s (limits.max_duration)",
                    "go on with `mayfly recipe resume`, and a longer --max-duration",
                )
            self._pace.sleep(self._pace.interval)

    def _read(self, before: dict[str, Any]) -> tuple[dict[str, Any] | None, dict[str, Any]]:
        try:
            ended = read_json(self._store, names.ENDED)
            known = read_json(self._store, names.PROGRESS) or before
        except NodeError:
            # Nobody hears the head, and it may take a while to speak again when the store is back.
            self._silence = Silence(self._pace.clock, self._pace.patience)
            return None, before
        self._answers += 1
        return ended, known

    def _head(self) -> str:
        """What IM knows of the head's node."""
        try:
            nodes = self._fleet.im.nodes(self._fleet.infrastructure)
        except RemoteError as error:
            return str(error)
        states = [node.state for node in nodes if node.group == HEAD]
        if set(states) & set(GONE) or not states:
            return "its node is gone"
        return f"its node is {states[0]}, see `mayfly ssh {self._fleet.run} head-0`"


def _judge(ended: Mapping[str, Any], known: Mapping[str, Any]) -> Status:
    """The status of a run that has ended; raises RunFailed for one that has failed."""
    if ended["outcome"] == heads.FAILED:
        why = ended["message"] or "see its results"
        raise RunFailed(f"the recipe has failed: {why}", "see `mayfly recipe results`")
    return Status(state=SUCCEEDED, raw={**known, "outcome": ended["outcome"]})


def describe(known: Mapping[str, Any], eta_s: float | None = None) -> tuple[str, float | None]:
    """The progress of a run on one line, and the fraction of its known tasks that are done."""
    nodes = known["nodes"]
    running = sum(each["running"] for each in nodes.values())
    begun = [each for each in known["experiments"] if each["state"] != "waiting"]
    now = [each for each in begun if each["state"] == "running"] or begun[-1:]
    text = "; ".join(line_of(each) for each in now) + f" · {running} run on {len(nodes)} nodes"
    if eta_s is not None:
        text += f" · ETA {duration(eta_s)}"
    total = sum(each["tasks"] or 0 for each in begun)
    states = [each["states"] for each in begun]
    done = sum(each.get(name, 0) for each in states for name in OVER)
    return text, done / total if total else None


def say_goodbye(store: Store, pace: Pace) -> None:
    """Have the head end what runs and copy its ledger, before its node goes; for some time only.

    A run that is ended in this way is no cancelled one.
    """
    with suppress(NodeError):
        store.write(names.CANCEL, to_bytes({}))
        deadline = pace.clock() + GOODBYE_S
        while lock.is_held(store) and pace.clock() < deadline:
            pace.sleep(pace.interval)
        store.delete(names.CANCEL)


def _document(document: Mapping[str, Any], work: _Work) -> dict[str, Any]:
    """How it went, for --json: nothing of training is in it."""
    kept = {name: value for name, value in document.items() if name not in OF_TRAINING}
    return {
        **kept,
        "recipe": work.following.cluster.recipe.name,
        "address": work.following.store.address,
        "outcome": work.status.raw.get("outcome"),
        "phases": {**document["phases"], PHASE: round(work.tasks_s, 2)},
    }
