"""`store: juicefs`: what roles and tasks are told, and that nothing stays in the bucket."""

from __future__ import annotations

import sqlite3
from dataclasses import replace

import pytest
from tests.unit.data_fakes import make_bucket
from tests.unit.deploy_fakes import FakeClock, FakeIM, FakeTraces

from mayfly import inputs, juicefs, preflight
from mayfly.clouds import load_job
from mayfly.destroy import Destroyer
from mayfly.errors import RemoteError, UserError
from mayfly.explain import explain_job
from mayfly.heat.job import job_file_values
from mayfly.ledger import Ledger
from mayfly.role_vars import role_vars
from mayfly.run import Run
from mayfly.spec import load_spec
from mayfly.watch import Pace
from mayfly_train import s3

ID = "faces-261128-100000-abcd"
PREFIX = f"{ID}-store/"
RUN = Run(ID, "docker://i", "c", "http://172.30.0.1:8333", "us-east-1")


def variables(**settings: object) -> dict[str, object]:
    overrides = {"cloud": "local", "engine": "keras-ps", **settings}
    spec, _ = load_job(None, overrides, {})
    return role_vars(spec, RUN)


# --- what a job may say, and what becomes of it --------------------------------------------------


def test_hdfs_is_the_default_and_another_store_is_refused():
    assert load_spec(None, {"cloud": "local"}, {}).store == "hdfs"
    with pytest.raises(UserError, match=r"store is 'nfs'.*must be 'hdfs' or 'juicefs'"):
        load_spec(None, {"cloud": "local", "store": "nfs"}, {})


@pytest.mark.parametrize("engine", ["estimator", "torch", "horovod", "keras-ps", "mwms"])
def test_programs_are_given_a_path_and_their_data_from_hdfs(engine):
    spec = load_spec(None, {"cloud": "local", "engine": engine, "store": "juicefs"}, {})
    for task in explain_job(spec, None)["tasks"]:
        words = task["command"]
        assert words[words.index("--job-dir") + 1] == "/mnt/mayfly/model"
        assert words[words.index("--data-dir") + 1].startswith("hdfs://")


def test_a_command_finds_the_path_in_its_environment():
    overrides = {"cloud": "local", "engine": "command", "trainer.command": "./x"}
    spec = load_spec(None, {**overrides, "store": "juicefs"}, {})
    (chief, *_) = explain_job(spec, None)["tasks"]
    assert chief["environment"]["MAYFLY_JOB_DIR"] == "/mnt/mayfly/model"


def test_the_roles_are_told_only_when_it_is_wanted():
    told = variables(store="juicefs", bucket="s3://models/team/")
    assert told["juicefs_name"] == f"{ID}-store"
    assert told["juicefs_bucket"] == "models"
    assert told["juicefs_redis_password"] == inputs.placeholder(inputs.STORE_PASSWORD)
    assert told["juicefs_s3_secret_access_key"] == inputs.placeholder(inputs.S3_SECRET_ACCESS_KEY)
    assert told["trainer_model_dir"] == "/mnt/mayfly/model"
    assert str(told["trainer_model_dir"]).startswith(f"{told['juicefs_mount_point']}/")
    plain = variables()
    assert [name for name in plain if name.startswith("juicefs_")] == []
    assert "trainer_model_dir" not in plain


def test_the_longest_name_is_one_that_juicefs_takes():
    assert len(juicefs.store_name("x" * 48)) <= 63


def test_the_node_image_gets_its_part_only_when_it_is_wanted():
    assert juicefs.image_extras("juicefs") == ("juicefs",)
    assert juicefs.image_extras("hdfs") == ()


# --- before anything is made ----------------------------------------------------------------------


def test_a_machine_without_the_device_is_refused_where_nodes_are_its_containers(tmp_path):
    absent = tmp_path / "fuse"
    with pytest.raises(UserError, match=r"store is 'juicefs'.*no .*/fuse.*modprobe fuse"):
        preflight.check_store("juicefs", None, local=True, device=absent)
    preflight.check_store("juicefs", None, local=False, device=absent)
    preflight.check_store("hdfs", None, local=True, device=absent)
    absent.touch()
    preflight.check_store("juicefs", "http://host:8333/", local=True, device=absent)


def test_an_endpoint_with_a_path_is_refused():
    with pytest.raises(UserError, match=r"endpoint https://h/s3 has a path.*store: hdfs"):
        preflight.check_store("juicefs", "https://h/s3", local=False)


def test_heat_has_no_such_store(tmp_path):
    job = tmp_path / "job.yml"
    job.write_text(
        "trainer:\n  engine: torch\n  program: git+https://example.org/r.git\n  entrypoint: t.py\n"
        "store: juicefs\n"
    )
    with pytest.raises(UserError, match="store is 'juicefs', which Heat's nodes do not have"):
        job_file_values(job, {})


# --- nothing stays --------------------------------------------------------------------------------


@pytest.fixture
def ledger(tmp_path):
    opened = Ledger(tmp_path / "ledger.sqlite")
    opened.add(ID, "local", f"s3://bucket/team/{ID}/", {"store": "juicefs"})
    opened.set_infrastructure(ID, "infra-7")
    yield opened
    opened.close()


def destroy(ledger, client, im=None, traces=None):
    clock = FakeClock()
    pace = Pace(1.0, 60.0, clock=clock, sleep=clock.sleep)
    im = im or FakeIM(radls={"infra-7": ID})
    Destroyer(im, ledger, client, traces, pace=pace).destroy(ledger.get(ID), lambda text: None)


def keys(client) -> list[str]:
    """What is in the bucket, but for the proof that each destroy writes."""
    there = sorted(s3.list_sizes(client, s3.S3Uri("bucket", "")))
    return [key for key in there if key != f"team/{ID}/clean.json"]


def test_destroy_leaves_no_object_of_the_store_and_all_others(ledger, client):
    others = [f"team/{ID}/model/saved_model.pb", f"{ID}-storefront/x", "other-store/chunks/0"]
    own = [f"{PREFIX}juicefs_uuid", *(f"{PREFIX}chunks/0/0/{n}_0_4" for n in range(1005))]
    make_bucket(client, "bucket", dict.fromkeys([*others, *own], b"data"))
    assert juicefs.is_left(client, ledger.get(ID))
    destroy(ledger, client)
    assert keys(client) == sorted(others)
    assert not juicefs.is_left(client, ledger.get(ID))
    last = ledger.journal(ID)[-1]
    assert (last.action, last.target) == ("delete", f"s3://bucket/{PREFIX}")
    assert (last.outcome, last.detail) == ("done", "1006 objects")
    assert ledger.get(ID).destroyed


def test_a_ledger_that_cannot_be_written_keeps_no_object_alive(ledger, client, monkeypatch):
    def full(statement, values):
        raise ledger._unwritable(sqlite3.OperationalError("database or disk is full"))

    make_bucket(client, "bucket", {f"{PREFIX}chunks/0": b"data"})
    monkeypatch.setattr(ledger, "_write", full)
    destroy(ledger, client)
    assert keys(client) == []


def test_objects_go_after_the_nodes_that_could_write_them(ledger, client):
    make_bucket(client, "bucket", {f"{PREFIX}chunks/0": b"data"})
    with pytest.raises(RemoteError, match="node-1"):
        destroy(ledger, client, traces=FakeTraces(left=["node-1"], stuck=True))
    assert keys(client) == [f"{PREFIX}chunks/0"]
    assert not ledger.get(ID).destroyed


def test_a_bucket_that_does_not_answer_keeps_the_run_from_counting_as_destroyed(ledger, client):
    with pytest.raises(RemoteError, match=rf"no such bucket.*delete s3://bucket/{PREFIX} by hand"):
        destroy(ledger, client)
    assert ledger.get(ID).state == "destroying"
    assert ledger.journal(ID)[-1].outcome == "failed"
    assert juicefs.is_left(client, ledger.get(ID)), "nobody knows that it is empty"
    make_bucket(client, "bucket", {f"{PREFIX}chunks/0": b"data"})
    destroy(ledger, client, im=FakeIM())
    assert keys(client) == []


def test_a_run_without_such_a_store_asks_no_bucket(ledger):
    record = replace(ledger.get(ID), spec={"store": "hdfs"})
    assert juicefs.uri_of(record) is None
    assert not juicefs.is_left(None, record)
    assert juicefs.uri_of(replace(record, spec={})) is None
