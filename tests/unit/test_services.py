"""Which IM a run is made and found by; the servers are fakes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from imclient import IMClient

from mayfly import services
from mayfly.errors import RemoteError, UserError
from mayfly.ledger import Ledger
from mayfly.local import cloudim
from mayfly.local.imservice import ImService
from mayfly.redact import Secret
from mayfly.sweep.aws import AwsAccount
from mayfly.sweep.find import find_account

CANARY = "canary-of-the-tests"
IM = {"IM_URL": "https://im.example", "IM_USER": "ada", "IM_PASSWORD": CANARY}
S3 = {"MAYFLY_S3_ACCESS_KEY_ID": "id", "MAYFLY_S3_SECRET_ACCESS_KEY": "canary-s3"}
AZURE = {
    "AZURE_SUBSCRIPTION_ID": "sub",
    "AZURE_TENANT_ID": "tenant",
    "AZURE_CLIENT_ID": "client",
    "AZURE_CLIENT_SECRET": "canary-azure",
}


@pytest.fixture
def ledger(tmp_path):
    opened = Ledger(tmp_path / "ledger.sqlite")
    yield opened
    opened.close()


@pytest.fixture
def greeted(monkeypatch):
    """IM servers that are content with everybody."""
    seen = []
    monkeypatch.setattr(services, "greet", lambda server: seen.append(server.url) or "2.0.0")
    return seen


def test_a_foreign_im_gets_its_own_keys_and_the_clouds(greeted):
    opened = services.open_services("azure", {**IM, **S3, **AZURE}, print)
    assert greeted == [opened.im_url] == ["https://im.example"]
    text = opened.im._client.rest_auth_data
    lines = IMClient.read_auth_data(text.split("\\n"))
    assert [line["type"] for line in lines] == ["InfrastructureManager", "Azure"]
    assert (lines[0]["password"], lines[1]["secret"]) == (CANARY, "canary-azure")
    known = {secret.reveal() for secret in opened.secrets}
    assert known >= {CANARY, "canary-azure", "canary-s3"}
    assert "canary" not in repr(opened.s3) + repr(opened.keys)


def test_nothing_of_the_keys_is_written(greeted, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MAYFLY_STATE_DIR", str(tmp_path / "state"))
    services.open_services("azure", {**IM, **S3, **AZURE}, print)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [path for path in files if b"canary" in path.read_bytes()] == []


@pytest.fixture
def own_im(monkeypatch):
    """Our own IM for clouds, as if it were running; what it was asked for."""
    seen = []
    service = ImService("http://127.0.0.1:8801", Secret(CANARY), Path("/none"), reused=True)
    monkeypatch.setattr(cloudim, "up", lambda report, environ: seen.append("up") or service)
    monkeypatch.setattr(
        cloudim, "wipe", lambda infrastructures, environ: seen.extend(infrastructures)
    )
    return seen


def test_without_an_im_of_the_users_our_own_gets_the_keys(own_im):
    opened = services.open_services("azure", {**S3, **AZURE}, print)
    assert (opened.im_url, own_im) == (None, ["up"])
    lines = IMClient.read_auth_data(opened.im._client.rest_auth_data.split("\\n"))
    assert [line["type"] for line in lines] == ["InfrastructureManager", "Azure"]
    assert (lines[0]["password"], lines[1]["secret"]) == (CANARY, "canary-azure")
    opened.im.wipe(["one"])
    assert own_im == ["up", "one"]


@pytest.mark.parametrize(("foreign", "wanted"), [(True, "EC2"), (False, "MayflyEC2")])
def test_only_our_own_im_has_our_connector(monkeypatch, foreign, wanted):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", CANARY)
    (entry,) = services.cloud_entries("aws", {}, foreign=foreign)
    assert (entry.type, entry.fields["password"].reveal()) == (wanted, CANARY)


@pytest.mark.parametrize(("foreign", "wanted"), [(True, "OpenStack"), (False, "MayflyOpenStack")])
def test_openstack_has_a_connector_of_ours_too(foreign, wanted):
    named = {"AUTH_URL": "https://ks", "USERNAME": "u", "PASSWORD": CANARY, "PROJECT_NAME": "p"}
    environ = {f"OS_{name}": value for name, value in named.items()}
    (entry,) = services.cloud_entries("openstack", environ, foreign=foreign)
    assert (entry.type, entry.fields["password"].reveal()) == (wanted, CANARY)


def test_without_keys_no_im_is_started(own_im):
    with pytest.raises(UserError, match="AZURE_SUBSCRIPTION_ID"):
        services.open_services("azure", dict(S3), print)
    assert own_im == []


def test_a_run_of_our_own_im_is_found_there_again(ledger, own_im):
    ledger.add("one", "azure", "s3://b/one/", {})
    assert services.reopen_services(ledger.get("one"), {**S3, **AZURE}, print).im_url is None


def test_containers_here_need_our_own_im():
    with pytest.raises(UserError, match="does not go with IM_URL: https://im.example — only our"):
        services.open_services("local", dict(IM), print)


@pytest.mark.parametrize(
    ("made_by", "now", "says"),
    [
        ("https://im.example", {}, "made by the IM at https://im.example, and IM_URL is not set"),
        ("https://im.example", {**IM, "IM_URL": "https://b"}, "set IM_URL=https://im.example"),
        (None, IM, "made by our own IM, .* unset IM_URL"),
    ],
)
def test_a_run_is_looked_for_only_where_it_was_made(ledger, made_by, now, says):
    """Another IM knows nothing of it, and that would count as destroyed."""
    ledger.add("one", "azure", "s3://b/one/", {}, made_by)
    with pytest.raises(UserError, match=says):
        services.reopen_services(ledger.get("one"), dict(now), print)


def test_a_run_is_found_where_it_was_made(ledger, greeted):
    ledger.add("one", "azure", "s3://b/one/", {}, "https://im.example")
    environ = {**IM, **S3, **AZURE, "IM_URL": "https://im.example/"}
    assert services.reopen_services(ledger.get("one"), environ, print).im_url == IM["IM_URL"]


def test_only_a_server_on_this_machine_is_kept_off_the_proxy(greeted, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "")
    monkeypatch.setenv("no_proxy", "")
    services.open_services("azure", {**IM, **S3, **AZURE}, print)
    assert os.environ["NO_PROXY"] == ""
    here = {**IM, **S3, **AZURE, "IM_URL": "http://127.0.0.1:8800"}
    services.open_services("azure", here, print)
    assert "127.0.0.1" in os.environ["NO_PROXY"]


def test_what_is_destroyed_needs_no_im_that_starts(monkeypatch):
    """The account is swept without it; what is asked of IM says why it is not there."""

    def fails(report, environ):
        raise UserError("port 8801 on 127.0.0.1 is taken", "stop it")

    monkeypatch.setattr(cloudim, "up", fails)
    environ = {**S3, **AZURE}
    with pytest.raises(UserError, match="port 8801"):
        services.open_services("azure", environ, print)
    opened = services.open_services("azure", environ, print, need_im=False)
    with pytest.raises(RemoteError, match="port 8801 on 127.0.0.1 is taken"):
        opened.im.infrastructures()


def test_a_run_whose_im_is_gone_can_be_opened_to_be_destroyed(ledger, monkeypatch):
    def silent(server):
        raise RemoteError("IM does not answer at https://im.example: connection refused")

    monkeypatch.setattr(services, "greet", silent)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, CANARY)
    ledger.add("one", "aws", "s3://b/one/", {}, "https://im.example")
    record = ledger.get("one")
    with pytest.raises(RemoteError, match="does not answer"):
        services.reopen_services(record, {**IM, **S3}, print)
    opened = services.reopen_services(record, {**IM, **S3}, print, need_im=False)
    assert isinstance(opened.account, AwsAccount)
    for ask in (opened.im.infrastructures, lambda: opened.im.find("one")):
        with pytest.raises(RemoteError, match="does not answer"):
            ask()


@pytest.mark.parametrize(("cloud", "swept"), [("aws", True), ("openstack", True), ("gcp", False)])
def test_which_accounts_can_be_swept(cloud, swept):
    account = find_account(cloud, {"AWS_DEFAULT_REGION": "eu-west-1"})
    assert (account is not None) is swept
    if cloud == "aws":
        assert account.region == "eu-west-1"
