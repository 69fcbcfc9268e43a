"""What is done before a node exists: roles and data in the user's bucket, which is moto here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import numpy as np
import pytest
from moto import mock_aws
from tests.unit.deploy_fakes import FakeDisplay

from mayfly import fashion_mnist, prepare
from mayfly.clouds import load_job
from mayfly.credentials import S3Settings
from mayfly.display import Phases
from mayfly.errors import UserError
from mayfly.job import Job, Tools
from mayfly.ledger import Ledger
from mayfly.offer import about_data
from mayfly.redact import Secret
from mayfly.services import Services

KEY = "collection/0123456789abcdef/mayfly-training-0.1.0.tar.gz"


@dataclass
class Surroundings:
    """A job on a rented cloud, and what it is prepared with."""

    job: Job
    services: Services
    tools: Tools

    @property
    def objects(self) -> list[str]:
        listed = self.services.client.list_objects_v2(Bucket="models")
        return [each["Key"] for each in listed.get("Contents", [])]


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    with mock_aws():
        made = boto3.client("s3", region_name="us-east-1")
        made.create_bucket(Bucket="models")
        yield made


@pytest.fixture
def around(client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Surroundings:
    tarball = tmp_path / "0123456789abcdef/mayfly-training-0.1.0.tar.gz"
    tarball.parent.mkdir()
    tarball.write_bytes(b"roles")
    monkeypatch.setattr(prepare.collection, "build", lambda *_: tarball)
    keys = S3Settings(Secret("the-key-id"), Secret("the-key"), None, None, "us-east-1", "test")
    tools = Tools(Ledger(tmp_path / "ledger.sqlite"), FakeDisplay(), {}, tmp_path, tmp_path)
    services = Services(None, keys, client, None)
    return Surroundings(job_of(), services, tools)


def job_of(**given: str) -> Job:
    return Job(*load_job(None, {"cloud": "aws", "bucket": "models", **given}, {}))


# --- roles ------------------------------------------------------------------------------------


def test_a_checkouts_roles_are_put_into_the_bucket(around: Surroundings):
    roles = prepare._roles(around.job, around.tools, around.services, False)
    assert around.objects == [KEY]
    assert roles.name == "@input.collection_url@"
    assert KEY in roles.secrets["collection_url"].reveal()


def test_a_plan_puts_no_roles_anywhere(around: Surroundings):
    roles = prepare._roles(around.job, around.tools, around.services, True)
    assert (around.objects, roles.name, roles.secrets) == ([], "@input.collection_url@", {})


def test_roles_that_the_job_names_are_not_built(around: Surroundings):
    roles = prepare._roles(job_of(collection="1.2.0"), around.tools, around.services, False)
    assert (around.objects, roles.name, roles.secrets) == ([], "mayfly.training,1.2.0", {})


# --- data -------------------------------------------------------------------------------------

DATA = "datasets/fashion-mnist/"
ELSEWHERE = "s3://models/team-fashion-mnist/"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A few pictures in the form of the Debian package's."""
    source = tmp_path / "package"
    source.mkdir()
    for prefix, count in (("train", 20), ("t10k", 8)):
        for part, array in (
            ("images-idx3", np.ones((count, 28, 28), np.uint8)),
            ("labels-idx1", np.zeros(count, np.uint8)),
        ):
            head = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
            (source / f"{prefix}-{part}-ubyte").write_bytes(head + array.tobytes())
    monkeypatch.setattr(fashion_mnist, "SOURCE", source)
    return source


def look_at_data(around: Surroundings, *, only_look: bool = False) -> str:
    """What was said of the data."""
    display = around.tools.display
    prepare._check_data(around.job, around.tools, around.services, Phases(display), only_look)
    return "\n".join(line for line in display.lines if line.startswith("data: "))


def test_the_default_jobs_data_is_put_into_the_users_bucket(around: Surroundings, package: Path):
    said = look_at_data(around)
    assert f"{DATA}manifest.json" in around.objects
    assert any(name.endswith(".tfrecords") for name in around.objects)
    assert "(191 MiB) is put into s3://models/datasets/fashion-mnist/: it is not there yet" in said
    assert "data: s3://models/datasets/fashion-mnist/, Fashion-MNIST padded to 32x32x3" in said


def test_an_unfinished_upload_is_finished(around: Surroundings, package: Path):
    look_at_data(around)
    around.services.client.delete_object(Bucket="models", Key=f"{DATA}manifest.json")
    look_at_data(around)
    assert f"{DATA}manifest.json" in around.objects


def test_data_that_is_there_stays(around: Surroundings, package: Path):
    look_at_data(around)
    around.tools.display.lines.clear()
    assert "is put into" not in look_at_data(around)


def test_files_as_they_were_are_put_for_the_jobs_that_read_them(
    around: Surroundings, package: Path
):
    around.job = job_of(engine="torch")
    look_at_data(around)
    assert "datasets/fashion-mnist-idx/train-images-idx3-ubyte" in around.objects


def test_a_plan_says_what_deploy_would_put_and_puts_nothing(around: Surroundings, package: Path):
    said = look_at_data(around, only_look=True)
    assert "(191 MiB) is put into s3://models/datasets/fashion-mnist/ by deploy" in said
    assert around.objects == []


def test_a_dry_run_says_it_too():
    def said(**given: str) -> list[str]:
        return about_data(*load_job(None, {"cloud": "aws", "bucket": "models", **given}, {}))

    assert "191 MiB" in said()[0] and "unless it is there" in said()[0]
    assert said(**{"data.source": ELSEWHERE}) == []
    assert about_data(*load_job(None, {"cloud": "local"}, {})) == []


def test_nothing_is_put_to_a_place_of_the_users(around: Surroundings, package: Path):
    around.job = job_of(**{"data.source": ELSEWHERE})
    with pytest.raises(UserError, match="there is no data at s3://models/team-fashion-mnist/"):
        look_at_data(around)


def test_nothing_is_put_among_files_of_the_users(around: Surroundings, package: Path):
    around.services.client.put_object(Bucket="models", Key=f"{DATA}holidays.jpg", Body=b"x")
    with pytest.raises(UserError, match=r"there is no manifest\.json"):
        look_at_data(around)
    assert around.objects == [f"{DATA}holidays.jpg"]


def test_without_the_package_the_command_that_puts_it_is_named(
    around: Surroundings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def absent(*_: object) -> None:
        raise UserError("Fashion-MNIST needs root to install packages")

    monkeypatch.setattr(fashion_mnist, "SOURCE", tmp_path / "absent")
    monkeypatch.setattr(fashion_mnist, "install_packages", absent)
    with pytest.raises(UserError) as caught:
        look_at_data(around)
    put = "mayfly data put DIRECTORY s3://models/datasets/fashion-mnist/ --format idx --pad"
    assert f"`{put} --cloud aws`" in str(caught.value.hint)
    assert "apt install dataset-fashion-mnist" in str(caught.value.hint)
