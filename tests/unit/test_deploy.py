"""A deployment's course: what is created, shown, recorded and destroyed, with services faked."""

from __future__ import annotations

import json
import os
import sqlite3
from dataclasses import dataclass, field, replace

import pytest
from tests.unit.cloud_fakes import FakeEC2
from tests.unit.deploy_fakes import FakeClock, FakeDisplay, FakeIM, FakeTraces
from tests.unit.lock_fakes import working

from mayfly import attempts, configuring, ending
from mayfly import deploy as module
from mayfly import destroy as destroying
from mayfly import prepare as preparing
from mayfly.clouds import load_job
from mayfly.credentials import S3Settings
from mayfly.deploy import deploy
from mayfly.display import Phases
from mayfly.errors import LimitReached, OverBudget, RemoteError, UserError
from mayfly.im import State
from mayfly.images import NoImage
from mayfly.job import Job, Ready, Tools
from mayfly.ledger import Ledger
from mayfly.places import Place
from mayfly.providers.aws import Aws
from mayfly.redact import Secret
from mayfly.run import Run
from mayfly.services import Services
from mayfly.spending import Basis
from mayfly.summary import PHASES
from mayfly.watch import Pace, Status
from mayfly_train.manifest import Entry, Manifest

RUN = "faces-261128-100000-abcd"
URI = f"s3://bucket/{RUN}/"
CANARY = "canary-of-the-tests"
RADL = f"description {RUN} ()\nkey='@input.s3_secret_access_key@' '@input.s3_access_key_id@'"
ATTEMPT = {
    "offer": "the job's own",
    "price_per_hour": None,
    "currency": None,
    "cause": None,
    "message": None,
    "ok": True,
}
DONE = {
    "state": "succeeded",
    "updated": "t9",
    "steps": 100,
    "global_step": 100,
    "samples_seen": 12800,
    "samples_processed": 13000,
    "accuracy": 0.9,
    "phases": {"staging": 1.0, "training": 42.0, "export": 3.0},
}


@dataclass
class FakeStore:
    """A run's objects in S3: the next statuses, and what was written."""

    statuses: list[dict] = field(default_factory=lambda: [DONE])
    reports: list[dict] = field(default_factory=lambda: [{"seconds": 2.0}])
    converted: list[dict] = field(default_factory=list)
    written: dict[str, str] = field(default_factory=dict)
    writable: bool = True

    def write_job(self, spec):
        if not self.writable:
            raise UserError("S3 access denied: s3://bucket/", "check the keys")
        self.written["job.json"] = json.dumps(spec)

    def write_log(self, name, text):
        self.written[name] = text

    def status(self):
        return Status.of(self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0])

    def staging(self):
        return self.reports

    def preprocessing(self):
        return self.converted


@dataclass
class Stage:
    """Everything around one deployment."""

    im: FakeIM
    store: FakeStore
    traces: FakeTraces
    tools: Tools
    display: FakeDisplay
    ready: Ready


@pytest.fixture
def stage(tmp_path, monkeypatch):
    im = FakeIM(states={"infra-0": [State("configured", dict.fromkeys("012", "configured"))]})
    store, traces, display = FakeStore(), FakeTraces(), FakeDisplay()
    keys = S3Settings(Secret("the-key-id"), Secret(CANARY), None, "http://s3", "r", "test")
    spec, profile = load_job(None, {"cloud": "local", "workers": 2}, {})
    run = Run(RUN, "docker://image", "url", "http://s3", "r")
    services = Services(im, keys, None, traces)
    ready = Ready(Job(spec, profile), run, URI, services, store, RADL, tmp_path / "x.radl")
    tools = Tools(Ledger(tmp_path / "ledger.sqlite"), display, {}, tmp_path, tmp_path)
    clock = FakeClock()
    quick = lambda **given: Pace(1.0, 600.0, clock=clock, sleep=clock.sleep)  # noqa: E731
    for each in (module, attempts, configuring):
        monkeypatch.setattr(each, "Pace", quick)
    whole = Manifest("model", (Entry("model/saved_model.pb", 5, "0" * 64),), "now")
    monkeypatch.setattr(module.export, "verify_model", lambda client, uri: whole)
    made = Stage(im, store, traces, tools, display, ready)
    monkeypatch.setattr(module, "prepare", lambda *_: made.ready)
    return made


def run(stage: Stage):
    return deploy(stage.ready.job, stage.tools)


def test_a_run_that_ends_well(stage):
    outcome = run(stage)
    assert outcome.error is None
    document = outcome.document
    assert {**document, "phases": None} == {
        "ok": True,
        "run": RUN,
        "model_uri": f"{URI}model/",
        "accuracy": 0.9,
        "global_step": 100,
        "samples_seen": 12800,
        "samples_processed": 13000,
        "phases": None,
        "leftovers": 0,
        "cost": None,
        "attempts": [ATTEMPT],
    }
    assert list(document["phases"]) == list(PHASES)
    assert (document["phases"]["training"], document["phases"]["export"]) == (42.0, 3.0)
    assert stage.im.radls == {}
    assert stage.traces.wiped == ["infra-0"]
    record = stage.tools.ledger.get(RUN)
    assert (record.state, record.outcome, record.summary) == ("destroyed", "succeeded", document)


def test_secrets_reach_im_and_nothing_else(stage, tmp_path):
    sent: list[str] = []
    create = stage.im.create
    stage.im.create = lambda radl: (sent.append(radl), create(radl))[1]
    stage.im.text = f"debug: {CANARY}"
    stage.display.redact = stage.display.redact.knowing(stage.ready.services.s3.secrets)
    run(stage)
    assert CANARY in sent[0]
    assert CANARY not in "\n".join(stage.display.lines)
    assert CANARY not in json.dumps(stage.store.written)
    for path in tmp_path.rglob("*"):
        assert path.is_dir() or CANARY.encode() not in path.read_bytes()


def test_a_deployment_is_alone_on_its_run_from_before_its_record_to_its_end(stage):
    ledger, seen = stage.tools.ledger, {}

    def look(name, function):
        return lambda *given: (seen.update({name: ledger.at_work(RUN)}), function(*given))[1]

    stage.store.write_job = look("before its record", stage.store.write_job)
    stage.im.create = look("created", stage.im.create)
    stage.im.destroy = look("destroyed", stage.im.destroy)
    assert run(stage).error is None
    assert {name: (who.pid, who.command) for name, who in seen.items()} == dict.fromkeys(
        ("before its record", "created", "destroyed"), (os.getpid(), "mayfly deploy")
    )
    assert ledger.at_work(RUN) is None


def test_a_run_that_another_process_claims_is_not_made_twice(stage, tmp_path):
    with working(tmp_path / "ledger.sqlite", RUN) as other:
        outcome = run(stage)
    assert isinstance(outcome.error, UserError)
    assert f"process {other.pid}" in outcome.document["error"]["message"]
    assert (outcome.document["run"], stage.im.radls, stage.tools.ledger.runs()) == (None, {}, [])


def test_a_failed_training_is_told_and_everything_destroyed(stage):
    error = {"task": "chief-0", "node": "n", "message": "exit code 1", "log_tail": ["boom"]}
    stage.store.statuses = [{"state": "failed", "updated": "t", "error": error}]
    outcome = run(stage)
    assert outcome.error is not None
    document = outcome.document
    assert (document["ok"], document["run"], document["leftovers"]) == (False, RUN, 0)
    assert document["error"]["task"] == "chief-0"
    assert document["error"]["log_tail"] == ["boom"]
    assert any("boom" in line for line in stage.display.lines)
    assert stage.im.radls == {}
    assert stage.tools.ledger.get(RUN).outcome == "failed"


def test_a_model_that_is_not_whole_is_a_failed_run_that_keeps_its_nodes(stage, monkeypatch):
    def broken(client, uri):
        raise RemoteError("the model is not whole")

    monkeypatch.setattr(module.export, "verify_model", broken)
    outcome = run(stage)
    assert outcome.document["ok"] is False
    assert f"mayfly export {RUN}" in outcome.document["error"]["message"]
    assert list(stage.im.radls) == ["infra-0"]
    record = stage.tools.ledger.get(RUN)
    assert (record.state, record.outcome) == ("kept", "failed")


def test_an_export_that_failed_between_two_looks_keeps_the_nodes(stage):
    error = {"message": "export failed: S3 access denied"}
    stage.store.statuses = [{"state": "failed", "updated": "t", "error": error}]
    assert "S3 access denied" in run(stage).document["error"]["message"]
    assert stage.tools.ledger.get(RUN).state == "kept"


def test_ctrl_c_destroys_what_was_made(stage):
    def interrupted(infrastructure):
        raise KeyboardInterrupt

    stage.im.state = interrupted
    outcome = run(stage)
    assert isinstance(outcome.error, KeyboardInterrupt)
    assert stage.im.asked == ["infra-0"]
    assert any("destroying what was made" in line for line in stage.display.lines)
    assert stage.tools.ledger.get(RUN).outcome == "interrupted"


def test_a_second_ctrl_c_leaves_and_says_what_is_left(stage):
    def interrupted(infrastructure):
        raise KeyboardInterrupt

    stage.im.state = interrupted
    stage.im.destroy = interrupted
    stage.traces.left, stage.traces.stuck = ["container 1", "network 2"], True
    outcome = run(stage)
    assert isinstance(outcome.error, KeyboardInterrupt)
    assert outcome.document["leftovers"] == 2
    said = next(line for line in stage.display.lines if line.startswith("left: "))
    assert said == f"left: container 1, network 2; remove it with `mayfly destroy {RUN}`"


def test_a_bug_of_ours_destroys_too(stage):
    stage.store.reports = [{"seconds": "not a number"}]
    outcome = run(stage)
    assert isinstance(outcome.error, ValueError)
    assert outcome.document["error"]["kind"] == "InternalError"
    assert stage.im.radls == {}


def test_kept_nodes_are_left_and_counted(stage):
    stage.ready = replace(stage.ready, job=replace(stage.ready.job, keep=True))
    stage.traces.left, stage.traces.stuck = ["node-1", "node-2"], True
    outcome = run(stage)
    assert outcome.document["leftovers"] == 2
    assert stage.im.asked == []
    assert stage.tools.ledger.get(RUN).state == "kept"
    assert any(f"mayfly destroy {RUN}" in line for line in stage.display.lines)


def test_what_cannot_be_destroyed_is_a_failure_that_counts_it(stage, monkeypatch):
    stage.traces.left, stage.traces.stuck = ["node-1"], True
    clock = FakeClock()

    def quick(im, ledger, client, traces, account):
        pace = Pace(1.0, 5.0, clock=clock, sleep=clock.sleep)
        return real(im, ledger, client, traces, account, pace)

    real = destroying.Destroyer
    monkeypatch.setattr(destroying, "Destroyer", quick)
    outcome = run(stage)
    assert outcome.document["ok"] is False
    assert outcome.document["leftovers"] == 1
    assert "node-1" in outcome.document["error"]["message"]


def test_preprocessing_is_shown_where_a_job_asks_for_it(stage, monkeypatch):
    wanted = {"cloud": "local", "engine": "horovod", "data.preprocess.to": "tensors"}
    spec, profile = load_job(None, wanted, {})
    stage.ready = replace(stage.ready, job=Job(spec, profile))
    monkeypatch.setattr(module, "prepare", lambda *_: stage.ready)
    stage.store.converted = [{"seconds": 3.0, "files_done": 8, "files_total": 8, "error": None}]
    assert run(stage).error is None
    assert "preprocessing done" in stage.display.lines


def test_the_shared_file_system_has_a_password_that_nobody_sees(stage):
    stage.ready = replace(stage.ready, radl=f"{RADL} '@input.store_password@'")
    attempts._create(stage.ready, stage.tools)
    password = stage.im.radls["infra-0"].split("'")[-2]
    assert len(password) == 48
    assert password not in stage.display.redact(f"IM says: {password}")
    attempts._create(stage.ready, stage.tools)
    assert password not in stage.im.radls["infra-1"], "each run draws its own"


def test_a_kept_run_counts_the_file_system_that_it_has_in_the_bucket(stage, client):
    client.create_bucket(Bucket="bucket")
    stage.ready = replace(
        stage.ready,
        job=replace(stage.ready.job, keep=True),
        services=replace(stage.ready.services, client=client),
    )
    stage.tools.ledger.add(RUN, "local", URI, {"store": "juicefs"})
    stage.tools.ledger.set_infrastructure(RUN, "infra-0")
    stage.traces.left, stage.traces.stuck = ["node-1", "network-1"], True
    assert ending.kept(stage.ready, stage.tools) == 2
    client.put_object(Bucket="bucket", Key=f"{RUN}-store/juicefs_uuid", Body=b"x")
    assert ending.kept(stage.ready, stage.tools) == 3


def test_staging_is_not_counted_twice(stage):
    """Contextualization is reported without the staging that happens inside it."""
    phases = Phases(stage.display)
    phases.seconds["contextualization"] = 100.0
    configuring._split_staging(phases, 30.0)
    assert (phases.seconds["contextualization"], phases.seconds["staging"]) == (70.0, 30.0)
    configuring._split_staging(phases, 40.0)
    assert (phases.seconds["contextualization"], phases.seconds["staging"]) == (60.0, 40.0)


def test_keys_that_cannot_write_are_refused_before_anything_is_made(stage):
    stage.store.writable = False
    outcome = run(stage)
    assert isinstance(outcome.error, UserError)
    assert outcome.document["run"] is None
    assert stage.im.asked == []
    assert stage.tools.ledger.runs() == []


def fill_the_disk(ledger: Ledger) -> None:
    """Let no more be written into the ledger, as on a full disk."""

    def full(statement, values):
        raise ledger._unwritable(sqlite3.OperationalError("database or disk is full"))

    ledger._write = full


def test_a_full_disk_creates_nothing(stage):
    fill_the_disk(stage.tools.ledger)
    outcome = run(stage)
    assert "disk is full" in str(outcome.error)
    assert outcome.document["run"] is None
    assert (stage.im.radls, stage.im.asked) == ({}, [])


def test_a_disk_that_is_full_when_the_intent_is_written_creates_nothing(stage, monkeypatch):
    ledger, intent = stage.tools.ledger, stage.tools.ledger.intent

    def filled(*given):
        fill_the_disk(ledger)
        return intent(*given)

    monkeypatch.setattr(ledger, "intent", filled)
    outcome = run(stage)
    assert "disk is full" in str(outcome.error)
    assert stage.im.radls == {}


def test_a_disk_that_fills_up_later_keeps_no_node_alive(stage):
    create = stage.im.create

    def created(radl):
        fill_the_disk(stage.tools.ledger)
        return create(radl)

    stage.im.create = created
    outcome = run(stage)
    assert "disk is full" in str(outcome.error)
    assert (stage.im.radls, stage.im.asked) == ({}, ["infra-0"])
    assert outcome.document["leftovers"] == 0


def test_where_a_run_is_to_be_is_written_before_anything_is_made(stage):
    """Destroy sweeps there, whatever region and keys the shell has by then."""

    class FakeAccount:
        def who(self):
            return "123456789012"

    stage.ready = replace(
        stage.ready,
        job=replace(stage.ready.job, place=Place({"region": "eu-west-1"})),
        services=replace(stage.ready.services, account=FakeAccount()),
    )
    stage.store.write_job = lambda spec: None
    preparing.register(stage.ready, stage.tools)
    (place,) = stage.tools.ledger.places(RUN)
    assert (place.region, place.account) == ("eu-west-1", "123456789012")
    assert stage.im.radls == {}


# --- limits and money -------------------------------------------------------------------------

BASIS = Basis("USD", 36.0, 0.5, 1.0, 30, 90, {"source": "made up"})
STOPPED = {**DONE, "state": "stopped", "global_step": 40, "reason": "budget"}
STOPPED |= {"stopped_because": "longer would cost more than limits.budget"}


def priced(stage, basis=BASIS) -> None:
    stage.ready = replace(stage.ready, job=replace(stage.ready.job, basis=basis))


@pytest.mark.parametrize(
    ("reason", "because"),
    [
        ("budget", STOPPED["stopped_because"]),
        ("max_duration", "training took longer than limits.max_duration, 7200 s"),
        ("idle", "no step was made for limits.idle, 1200 s"),
    ],
)
def test_a_run_that_its_nodes_stopped_has_a_model_a_reason_and_an_exit_code(stage, reason, because):
    stage.store.statuses = [{**STOPPED, "reason": reason, "stopped_because": because}]
    outcome = run(stage)
    assert isinstance(outcome.error, LimitReached)
    assert (outcome.error.exit_code, outcome.error.reason) == (3, reason)
    document = outcome.document
    assert (document["ok"], document["reason"], document["steps"]) == (False, reason, 100)
    assert document["model_uri"] == f"{URI}model/"
    assert document["leftovers"] == 0
    assert document["error"]["message"].startswith(f"{because}: stopped at step 40 of 100")
    record = stage.tools.ledger.get(RUN)
    assert (record.state, record.outcome) == ("destroyed", "stopped")
    assert stage.im.radls == {}


def test_a_run_that_was_stopped_without_a_checkpoint_says_so(stage):
    because = STOPPED["stopped_because"]
    error = {"message": f"{because}: stopped before there was a checkpoint"}
    stage.store.statuses = [{**STOPPED, "state": "failed", "error": error}]
    outcome = run(stage)
    assert outcome.error.exit_code == 3
    assert outcome.document["model_uri"] is None
    assert "before there was a checkpoint" in outcome.document["error"]["message"]
    assert stage.tools.ledger.get(RUN).state == "destroyed"


def test_a_run_that_fails_while_a_limit_stops_it_has_failed(stage):
    error = {"message": "HDFS has not answered for 100 s"}
    stage.store.statuses = [{**STOPPED, "state": "failed", "error": error}]
    outcome = run(stage)
    assert outcome.error.exit_code == 1
    assert "HDFS has not answered" in str(outcome.error)
    assert stage.tools.ledger.get(RUN).outcome == "failed"


def test_a_budget_that_is_used_up_while_nodes_are_configured_ends_the_run(stage):
    priced(stage)
    stage.im.states["infra-0"] = [State("running", {"0": "running", "1": "running"})]
    outcome = run(stage)
    assert isinstance(outcome.error, LimitReached)
    assert "0.31 USD are spent" in str(outcome.error)
    assert (outcome.document["reason"], outcome.document["model_uri"]) == ("budget", None)
    assert stage.im.radls == {}
    record = stage.tools.ledger.get(RUN)
    assert (record.outcome, record.cost) == ("stopped", BASIS.document())
    cost = outcome.document["cost"]
    assert (cost["budget"], cost["currency"]) == (1.0, "USD")
    assert cost["spent"] == cost["forecast"] >= 0.31


def test_nodes_that_do_not_stop_by_themselves_are_destroyed_before_the_budget_ends(stage):
    priced(stage)
    training = {**DONE, "state": "training", "eta_s": 500.0}
    stage.store.statuses = [{**training, "updated": f"t{n}", "global_step": n} for n in range(99)]
    outcome = run(stage)
    assert isinstance(outcome.error, LimitReached)
    assert outcome.document["cost"]["spent"] <= 1.0
    assert stage.im.radls == {}
    shown = [line for line in stage.display.lines if line.startswith("training: step")]
    assert "of 1 USD spent" in shown[-1] and "it will be stopped before" in shown[-1]


def test_a_budget_that_is_used_up_keeps_no_node_alive(stage):
    """Neither --keep nor an export that failed is worth more than was allowed."""
    priced(stage, replace(BASIS, train_s=0))
    stage.ready = replace(stage.ready, job=replace(stage.ready.job, keep=True))
    error = {"message": "export failed: S3 access denied"}
    training = {**DONE, "state": "training", "updated": "t1"}
    stage.store.statuses = [training, {**STOPPED, "state": "failed", "error": error}]
    outcome = run(stage)
    assert "export failed" in str(outcome.error)
    assert stage.im.radls == {}
    assert stage.tools.ledger.get(RUN).state == "destroyed"


# --- offers -----------------------------------------------------------------------------------

FULL = "An error occurred (InsufficientInstanceCapacity) when calling the RunInstances operation"
FORBIDDEN = "(UnauthorizedOperation) when calling the RunInstances operation: You are not"
FAILED_STATE = State("failed", {})
UP = State("configured", dict.fromkeys("012", "configured"))


def with_offers(stage, monkeypatch, *prices: float | None) -> None:
    """A job on aws with one offer for each price of an hour, region r-1 and on."""
    regions = [f"eu-west-{n}" for n in range(1, len(prices) + 1)]
    given = {"cloud": "aws", "bucket": "my-models"}
    jobs = []
    for region, price in zip(regions, prices, strict=True):
        spec, profile = load_job(None, {**given, "region": region}, {})
        basis = replace(BASIS, per_hour=price, budget=None, train_s=None, end_s=None)
        place = Place({"region": region})
        jobs.append(Job(spec, profile, place=place, basis=basis if price else None))
    stage.ready = replace(stage.ready, job=replace(jobs[0], others=tuple(jobs[1:])))
    monkeypatch.setattr(attempts, "image_of", lambda job, *_: f"aws://{job.place.region}/ami-1")


def causes(outcome) -> list[str | None]:
    return [attempt["cause"] for attempt in outcome.document["attempts"]]


def test_an_offer_without_room_is_gone_before_the_next_is_tried(stage, monkeypatch):
    with_offers(stage, monkeypatch, 1.0, 2.0)
    stage.im.states = {"infra-0": [FAILED_STATE], "infra-1": [UP]}
    stage.im.text = f"All VMs failed. No contextualize.\n{FULL}: no g5.xlarge"
    created: list[str] = []
    create = stage.im.create

    def watched(radl):
        created.append(radl)
        assert stage.im.infrastructures() == [], "what another offer made has to be gone"
        identity = create(radl)
        return identity if identity == "infra-0" and len(created) == 1 else rename(identity)

    def rename(identity):
        stage.im.radls["infra-1"] = stage.im.radls.pop(identity)
        stage.im.text = ""
        return "infra-1"

    stage.im.create = watched
    outcome = run(stage)
    assert outcome.error is None
    assert causes(outcome) == ["capacity", None]
    first, second = outcome.document["attempts"]
    assert FULL in first["message"] and (first["price_per_hour"], first["ok"]) == (1.0, False)
    assert second["ok"] and second["offer"].startswith("eu-west-2")
    assert "aws://eu-west-2/ami-1" in created[1] and f"mayfly-run={RUN}" in created[1]
    assert any("eu-west-1" in line and "capacity" in line for line in stage.display.lines)
    journal = [(e.action, e.outcome) for e in stage.tools.ledger.journal(RUN)]
    assert journal[:6] == [
        ("offer", "failed"),
        ("create", "done"),
        ("destroy", "done"),
        ("offer", "done"),
        ("create", "done"),
        ("destroy", "done"),
    ]
    assert stage.tools.ledger.get(RUN).cost["per_hour"] == 2.0


def test_no_permission_stops_and_names_it(stage, monkeypatch):
    with_offers(stage, monkeypatch, 1.0, 2.0)
    stage.im.states = {"infra-0": [FAILED_STATE]}
    stage.im.text = FORBIDDEN
    outcome = run(stage)
    assert causes(outcome) == ["permission"]
    assert "the keys need RunInstances" in outcome.document["error"]["message"]
    assert stage.im.radls == {}


def test_words_that_are_not_known_stop_and_are_told_as_they_are(stage, monkeypatch):
    with_offers(stage, monkeypatch, 1.0, 2.0)
    stage.im.states = {"infra-0": [FAILED_STATE]}
    stage.im.text = "ERROR: the image ami-1 is of another architecture"
    outcome = run(stage)
    assert causes(outcome) == ["other"]
    assert outcome.document["error"]["kind"] == "RunFailed"
    assert "another architecture" in outcome.document["error"]["log_tail"][0]


def test_a_node_that_failed_alone_tells_why(stage, monkeypatch):
    with_offers(stage, monkeypatch, 1.0)
    stage.im.states = {"infra-0": [State("failed", {"0": "running", "1": "failed"})]}
    stage.im.node_texts = {"1": "(VcpuLimitExceeded) You have requested more vCPU capacity"}
    outcome = run(stage)
    assert causes(outcome) == ["quota"]
    assert "VcpuLimitExceeded" in str(outcome.error) and "higher quota" in str(outcome.error)


@pytest.mark.parametrize(
    ("answer", "made"), [(None, 1), (False, 1), (True, 2)], ids=["nobody", "no", "yes"]
)
def test_an_offer_that_became_dearer_needs_an_answer(stage, monkeypatch, answer, made):
    with_offers(stage, monkeypatch, 1.0, 2.0)
    stage.im.states = {"infra-0": [FAILED_STATE]}
    stage.im.text = FULL
    asked: list[str] = []

    def ask(question):
        asked.append(question)
        return answer

    stage.tools = replace(
        stage.tools,
        price_now=lambda job: replace(job.basis, per_hour=2.5),
        ask=None if answer is None else ask,
    )
    outcome = run(stage)
    tried = outcome.document["attempts"]
    assert len([a for a in tried if a["cause"] == "capacity"]) == made
    assert any("dearer than the plan said" in str(a["message"]) for a in tried) == (made == 1)
    assert stage.im.radls == {}
    assert all("costs 2.500 USD an hour, not 2.000" in question for question in asked)


def test_an_offer_that_the_budget_no_longer_allows_is_passed_over(stage, monkeypatch):
    with_offers(stage, monkeypatch, 1.0, 2.0)
    stage.im.states = {"infra-0": [FAILED_STATE]}
    stage.im.text = FULL

    def too_dear(job):
        raise OverBudget("limits.budget is 1 USD, and the run costs 2.00 USD at least")

    stage.tools = replace(stage.tools, price_now=too_dear)
    outcome = run(stage)
    assert causes(outcome) == ["capacity", "price"]
    assert "limits.budget is 1 USD" in outcome.document["attempts"][1]["message"]


def test_an_offer_whose_image_does_not_exist_is_passed_over_with_its_reason(stage, monkeypatch):
    with_offers(stage, monkeypatch, 1.0, 2.0, 3.0)
    stage.im.states = {"infra-0": [FAILED_STATE]}
    stage.im.text = FULL

    def image_of(job, *_):
        stage.im.states, stage.im.text = {"infra-0": [UP]}, ""
        if job.place.region == "eu-west-2":
            raise NoImage("image 'ami-1' does not exist in region eu-west-2", "choose another")
        return f"aws://{job.place.region}/ami-1"

    monkeypatch.setattr(attempts, "image_of", image_of)
    outcome = run(stage)
    assert outcome.error is None
    assert causes(outcome) == ["capacity", "image", None]
    reason = ": image: image 'ami-1' does not exist in region eu-west-2 — choose another"
    said = [line for line in stage.display.lines if line.endswith(reason)]
    assert len(said) == 1 and said[0].startswith("eu-west-2, ")
    assert outcome.document["attempts"][2]["offer"].startswith("eu-west-3")


def test_the_last_offer_s_missing_image_is_the_reason_that_is_told(stage, monkeypatch):
    with_offers(stage, monkeypatch, 1.0, 2.0)
    stage.im.states, stage.im.text = {"infra-0": [FAILED_STATE]}, FULL

    def image_of(job, *_):
        raise NoImage("image 'ami-1' does not exist in region eu-west-2")

    monkeypatch.setattr(attempts, "image_of", image_of)
    outcome = run(stage)
    assert causes(outcome) == ["capacity", "image"]
    assert "the nodes were not made: image: image 'ami-1' does not exist" in str(outcome.error)
    assert "--image" in str(outcome.error)


def test_an_image_that_the_provider_does_not_find_is_one_more_reason_to_go_on(stage, monkeypatch):
    with_offers(stage, monkeypatch, 1.0, 2.0)
    stage.im.states = {"infra-0": [FAILED_STATE]}
    stage.im.text = "(InvalidAMIID.NotFound) when calling the RunInstances operation: The image id"
    outcome = run(stage)
    assert causes(outcome) == ["image", "image"]


def test_offers_that_were_passed_over_before_anything_was_made_are_told(stage, monkeypatch):
    """Who looks for the image is boto3's stand-in: only eu-west-2 has it."""
    with_offers(stage, monkeypatch, 1.0, 2.0, 3.0)
    wanted = stage.ready.job
    amis = {"eu-west-1": [], "eu-west-2": [{"ImageId": "ami-2", "CreationDate": "2026"}]}
    jobs = [
        replace(job, finder=Aws(lambda *_, r=job.place.region: FakeEC2(amis[r]), job.place.region))
        for job in (wanted, *wanted.others[:1])
    ]
    first = replace(jobs[0], others=(jobs[1], wanted.others[1]), keep=True)
    job, image, passed = preparing._first_with_image(first, stage.ready.services, stage.tools)
    assert (job.place.region, image) == ("eu-west-2", "aws://eu-west-2/ami-2")
    assert (job.keep, [each.place.region for each in job.others]) == (True, ["eu-west-3"])
    assert [(each.offer[:9], each.cause) for each in passed] == [("eu-west-1", "image")]
    assert "no image 'debian-12-amd64-*' of owner" in passed[0].message
    assert passed[0].line() in stage.display.lines
    with pytest.raises(NoImage, match="no image 'debian-12"):
        preparing._first_with_image(replace(jobs[0], others=()), stage.ready.services, stage.tools)
    stage.ready = replace(stage.ready, job=replace(job, keep=False), passed=passed)
    assert causes(run(stage)) == ["image", None]
