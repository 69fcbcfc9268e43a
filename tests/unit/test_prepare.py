"""What is done before a node exists: roles and data in the user's bucket, which is moto here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto import mock_aws
from tests.unit.deploy_fakes import FakeDisplay

from mayfly import prepare
from mayfly.clouds import load_job
from mayfly.credentials import S3Settings
from mayfly.job import Job, Tools
from mayfly.ledger import Ledger
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
