"""A whole deployment on machines of the user's own: machines, ansible-playbook and S3 are fakes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.unit import own_fakes
from tests.unit.deploy_fakes import FakeClock, FakeDisplay
from tests.unit.test_own_manager import FakePlaybook

from mayfly import attempts, configuring, prepare, services
from mayfly import deploy as module
from mayfly import destroy as destroying
from mayfly.clouds import load_job
from mayfly.credentials import S3Settings
from mayfly.deploy import deploy
from mayfly.errors import UserError
from mayfly.job import Job, Tools
from mayfly.ledger import Ledger
from mayfly.own import manager, on_machine
from mayfly.places import Place
from mayfly.redact import Secret
from mayfly.run_store import RunStore
from mayfly.services import open_machines, reopen_services
from mayfly.watch import Pace
from mayfly_train.manifest import Entry, Manifest

CANARY = "canary-of-the-tests"
OTHER = "cats-261128-090000-0123"
DONE = {"state": "succeeded", "updated": "t9", "steps": 9, "global_step": 9, "accuracy": 0.9}


class FakeKeys(S3Settings):
    """Keys whose server is moto."""

    def client(self):
        return FakeKeys.server


class Setting:
    """What is around one deployment."""

    def __init__(self, tmp_path, monkeypatch, client):
        self.path, self.machines = own_fakes.make(tmp_path, monkeypatch)
        self.display, self.tmp_path, self.client = FakeDisplay(), tmp_path, client
        self.tools = Tools(
            Ledger(tmp_path / "ledger.sqlite"), self.display, {}, tmp_path, tmp_path / "build"
        )
        given = {"cloud": "static", "bucket": "models", "workers": 2, "name": "faces"}
        given |= {"data.source": "s3://models/data/"}
        spec, profile = load_job(None, given, {})
        self.job = Job(spec, profile, place=Place(), inventory=self.path)
        self.books: list[FakePlaybook] = []
        self.code = 0

    def start(self, words, environ):
        """What ansible-playbook on site.yml does: it ends at once, and the run is there."""
        book = FakePlaybook(words, environ)
        book.ended = self.code
        (record,) = self.tools.ledger.runs()
        own_fakes.leave(self.machines, record.run)
        store = RunStore(self.client, record.uri)
        body = json.dumps(DONE).encode()
        self.client.put_object(Bucket="models", Key=store.uri.join("status.json").key, Body=body)
        self.books.append(book)
        return book

    def deploy(self):
        return deploy(self.job, self.tools)


@pytest.fixture
def setting(tmp_path, monkeypatch, client):
    made = Setting(tmp_path, monkeypatch, client)
    client.create_bucket(Bucket="models")
    client.put_object(Bucket="models", Key="data/train", Body=b"x")
    listed = {"version": 1, "kind": "dataset", "created": "now"}
    listed["files"] = [{"path": "train", "size": 1, "sha256": "0" * 64}]
    body = json.dumps(listed).encode()
    client.put_object(Bucket="models", Key="data/manifest.json", Body=body)
    FakeKeys.server = client
    keys = FakeKeys(Secret("the-key-id"), Secret(CANARY), None, None, "us-east-1", "test")
    monkeypatch.setattr(services, "find_s3_settings", lambda *_: keys)
    for where in (prepare.collection, manager.collection):
        monkeypatch.setattr(where, "build", lambda *_: tmp_path / "x.tar.gz")
        monkeypatch.setattr(where, "install", lambda _: tmp_path / "installed")
    monkeypatch.setattr(manager, "Playbook", made.start)
    clock = FakeClock()
    quick = lambda **_: Pace(1.0, 100.0, clock=clock, sleep=clock.sleep)  # noqa: E731
    for each in (module, attempts, configuring):
        monkeypatch.setattr(each, "Pace", quick)
    pace = Pace(1.0, 100.0, clock=clock, sleep=clock.sleep)
    real = destroying.Destroyer
    monkeypatch.setattr(destroying, "Destroyer", lambda *given: real(*given, pace))
    whole = Manifest("model", (Entry("model/saved_model.pb", 5, "0" * 64),), "now")
    monkeypatch.setattr(module.export, "verify_model", lambda client, uri: whole)
    return made


def test_a_run_from_the_inventory_to_the_proof(setting):
    outcome = setting.deploy()
    assert outcome.error is None, setting.display.lines
    document = outcome.document
    assert (document["ok"], document["leftovers"], document["accuracy"]) == (True, 0, 0.9)
    record = setting.tools.ledger.get(None)
    assert (record.state, record.outcome, record.cloud) == ("destroyed", "succeeded", "static")
    assert (record.im, record.infrastructure) == (str(setting.path), str(setting.path))
    verbs = [verb for verb, _ in setting.machines.asked]
    assert verbs == ["look", "claim", "look", "free", "look"]
    for root in setting.machines.roots.values():
        assert not (root / on_machine.CLAIM).exists()
        assert not (root / on_machine.KEYS).exists()
    proof = setting.tools.ledger.proof(record.run)
    assert proof["ok"] and proof["count"] == 0
    assert "contextualization done" in setting.display.lines


def test_no_secret_is_written_or_shown(setting):
    setting.deploy()
    (book,) = setting.books
    assert book.environ["AWS_SECRET_ACCESS_KEY"] == CANARY
    assert CANARY not in " ".join(book.words) + "\n".join(setting.display.lines)
    for path in setting.tmp_path.rglob("*"):
        assert not path.is_file() or CANARY.encode() not in path.read_bytes(), path


def test_playbooks_that_fail_are_told_and_their_machines_freed(setting):
    setting.code = 2
    outcome = setting.deploy()
    assert "contextualization failed" in str(outcome.error)
    assert outcome.document["leftovers"] == 0
    record = setting.tools.ledger.get(None)
    assert (record.state, record.outcome) == ("destroyed", "failed")


def test_a_machine_that_a_run_uses_is_refused_before_anything_is_changed(setting):
    (setting.machines.roots["a"] / on_machine.CLAIM).write_text(OTHER)
    outcome = setting.deploy()
    assert isinstance(outcome.error, UserError)
    assert f"in use by run {OTHER}" in str(outcome.error)
    assert setting.tools.ledger.runs() == [] and setting.books == []
    assert [verb for verb, _ in setting.machines.asked] == ["look"]


def test_a_machine_that_another_run_takes_first_keeps_it(setting, monkeypatch):
    """Between the look and the claim another run was quicker: what we took is given back."""
    b = setting.machines.roots["b"] / on_machine.CLAIM
    register = module.register
    monkeypatch.setattr(module, "register", lambda *g: (register(*g), b.write_text(OTHER)))
    outcome = setting.deploy()
    assert f"machine b is in use by run {OTHER}" in str(outcome.error)
    assert b.read_text() == OTHER
    assert not (setting.machines.roots["a"] / on_machine.CLAIM).exists()
    assert setting.tools.ledger.get(None).state == "destroyed"
    assert setting.books == []


def test_a_run_is_taken_up_again_with_its_inventory_whatever_im_is_named(setting):
    setting.deploy()
    record = setting.tools.ledger.get(None)
    found = reopen_services(record, {"IM_URL": "https://im.example.org"}, print)
    assert found.im_url == str(setting.path)
    assert found.machines is not None and found.machines.path == setting.path


def test_what_cannot_run_there_is_refused(setting):
    spec, profile = load_job(None, {"cloud": "static", "bucket": "models", "store": "juicefs"}, {})
    for job, says in (
        (Job(spec, profile, inventory=setting.path), "would stay mounted"),
        (Job(spec, profile), "needs an inventory"),
    ):
        with pytest.raises(UserError, match=says):
            prepare.require_deployable(job)


def test_an_inventory_that_is_gone_is_named():
    with pytest.raises(UserError, match="there is no inventory /nowhere/hosts.yml"):
        open_machines(Path("/nowhere/hosts.yml"), {}, Path("/nowhere"))
