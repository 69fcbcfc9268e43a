"""The one harmless call with a cloud's keys: clouds are fakes here, but for moto's STS."""

from __future__ import annotations

import base64
import json
import re
import time
from email.utils import formatdate

import botocore.exceptions
import pytest
import requests
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from moto import mock_aws

from mayfly.auth import google, web
from mayfly.auth.aws import Aws, _refusal
from mayfly.auth.azure import Azure
from mayfly.auth.credential import Untried
from mayfly.auth.egi import Egi
from mayfly.auth.google import Google
from mayfly.auth.opennebula import OpenNebula
from mayfly.auth.openstack import OpenStack
from mayfly.errors import RemoteError, UserError
from mayfly.redact import Secret

CANARY = "canary-of-the-tests"
KEYSTONE = OpenStack(
    "https://ks:5000", "ada", Secret(CANARY), "lab", "people", "d1", None, True, "OS_*"
)
APPLICATION = OpenStack(
    "https://ks:5000", "app-id", Secret(CANARY), None, "Default", "default", None, True, "OS_*"
)
AZURE = Azure("sub", "tenant", "client", Secret(CANARY))
ONE = OpenNebula("http://one:2633/RPC2", "ada", Secret(CANARY), "one_auth")


@pytest.fixture
def cloud(monkeypatch):
    """A fake of everything that is reached over HTTP: url's end → status and body."""
    answers: dict[str, tuple[int, object]] = {}
    sent: list[tuple[str, dict]] = []

    def request(method, url, **options):
        sent.append((url, options))
        status, body = next(answer for end, answer in answers.items() if url.endswith(end))
        response = requests.Response()
        response.status_code = status
        response._content = (body if isinstance(body, str) else json.dumps(body)).encode()
        response.headers["Date"] = formatdate(time.time() - 300, usegmt=True)
        return response

    monkeypatch.setattr(web.requests, "request", request)
    return answers, sent


def test_keystone_says_project_and_user(cloud):
    answers, sent = cloud
    token = {"user": {"name": "ada"}, "project": {"name": "lab"}}
    answers["/v3/auth/tokens"] = (201, {"token": token})
    found = KEYSTONE.identify()
    assert found.who == "project lab, user ada at https://ks:5000"
    assert found.clock_skew_s == pytest.approx(300, abs=3)
    scope = sent[0][1]["json"]["auth"]["scope"]
    assert scope == {"project": {"name": "lab", "domain": {"id": "d1"}}}
    assert sent[0][1]["allow_redirects"] is False


def test_an_application_credential_has_its_scope_in_itself(cloud):
    answers, sent = cloud
    answers["/v3/auth/tokens"] = (201, {"token": {"project": {"name": "lab"}}})
    APPLICATION.identify()
    assert "scope" not in sent[0][1]["json"]["auth"]


@pytest.mark.parametrize(
    ("status", "kind", "says"),
    [(401, UserError, "refuses ada"), (404, RemoteError, "no Keystone"), (200, RemoteError, "no")],
)
def test_keystone_refuses(cloud, status, kind, says):
    cloud[0]["/v3/auth/tokens"] = (status, {"error": {"message": CANARY}})
    with pytest.raises(kind, match=says) as error:
        KEYSTONE.identify()
    assert "canary" not in str(error.value)


def test_azure_gives_a_token_or_says_why_not(cloud):
    answers, sent = cloud
    answers["/tenant/oauth2/v2.0/token"] = (200, {"access_token": "canary-token"})
    assert AZURE.identify().who.startswith("service principal client of tenant tenant")
    assert sent[0][1]["data"]["client_secret"] == CANARY
    refusal = {"error": "invalid_client", "error_codes": [7000215], "error_description": CANARY}
    answers["/tenant/oauth2/v2.0/token"] = (401, refusal)
    with pytest.raises(UserError, match="invalid_client AADSTS7000215") as error:
        AZURE.identify()
    assert "canary" not in str(error.value)


def test_google_gets_a_claim_that_is_signed_with_the_key(cloud):
    answers, sent = cloud
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    pem = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    ).decode()
    answers["/token"] = (200, {"access_token": "canary-token"})
    robot = Google("robot@p", Secret(pem), "p", "key.json")
    assert robot.identify().who == "robot@p; project p not tried"
    head, claims, signature = sent[0][1]["data"]["assertion"].split(".")
    raw = base64.urlsafe_b64decode(signature + "==")
    signed = f"{head}.{claims}".encode()
    key.public_key().verify(raw, signed, padding.PKCS1v15(), hashes.SHA256())
    assert json.loads(base64.urlsafe_b64decode(claims + "=="))["iss"] == "robot@p"
    answers["/token"] = (400, {"error": "invalid_grant", "error_description": CANARY})
    with pytest.raises(UserError, match="invalid_grant"):
        robot.identify()


def test_a_damaged_google_key_and_a_missing_library(monkeypatch):
    robot = Google("robot@p", Secret(f"-----BEGIN {CANARY}"), "p", "key.json")
    with pytest.raises(UserError, match=r"in key\.json is damaged") as error:
        robot.identify()
    assert "canary" not in str(error.value)
    monkeypatch.setattr(google, "serialization", None)
    with pytest.raises(Untried, match="cryptography is not installed"):
        robot.identify()


def jwt(claims: dict) -> Secret:
    body = base64.urlsafe_b64encode(json.dumps(claims).encode()).rstrip(b"=").decode()
    return Secret(f"head.{body}.signature")


def test_egi_tells_whose_token_it_is(cloud):
    answers, sent = cloud
    issuer = "https://aai.example"
    answers["/openid-configuration"] = (200, {"userinfo_endpoint": f"{issuer}/userinfo"})
    answers["/userinfo"] = (200, {"preferred_username": "ada"})
    token = jwt({"iss": issuer, "exp": time.time() + 60})
    found = Egi("IISAS", "vo.x", token, "OIDC_ACCESS_TOKEN").identify()
    assert found.who.startswith("ada of https://aai.example")
    assert "headers" not in sent[0][1]
    assert sent[1][1]["headers"] == {"Authorization": f"Bearer {token.reveal()}"}
    answers["/userinfo"] = (401, {})
    with pytest.raises(UserError, match="refuses the token"):
        Egi("IISAS", "vo.x", token, "OIDC_ACCESS_TOKEN").identify()


@pytest.mark.parametrize(
    ("token", "kind", "says"),
    [
        (Secret(CANARY), Untried, "not one that can be read"),
        (Secret(f"{CANARY}.{CANARY}.x"), Untried, "not one that can be read"),
        (jwt({"iss": "http://plain"}), Untried, "who issued it"),
        (jwt({"iss": "https://aai", "exp": 5}), UserError, "expired"),
    ],
)
def test_an_egi_token_that_nobody_is_asked_about(cloud, token, kind, says):
    with pytest.raises(kind, match=says) as error:
        Egi("IISAS", "vo.x", token, "OIDC_ACCESS_TOKEN").identify()
    assert "canary" not in str(error.value)
    assert cloud[1] == []


def test_opennebula_says_the_user(cloud):
    answers, sent = cloud
    text = "&lt;USER&gt;&lt;NAME&gt;ada&lt;/NAME&gt;&lt;/USER&gt;"
    answer = (
        "<?xml version='1.0'?><methodResponse><params><param><value><array><data>"
        "<value><boolean>{}</boolean></value><value><string>{}</string></value>"
        "<value><i4>0</i4></value></data></array></value></param></params></methodResponse>"
    )
    answers["/RPC2"] = (200, answer.format(1, text))
    assert ONE.identify().who == "user ada at http://one:2633/RPC2"
    assert f"ada:{CANARY}".encode() in sent[0][1]["data"]
    answers["/RPC2"] = (200, answer.format(0, CANARY))
    with pytest.raises(UserError, match="refuses user ada") as error:
        ONE.identify()
    assert "canary" not in str(error.value)
    answers["/RPC2"] = (200, "<html>hello")
    with pytest.raises(RemoteError, match="no OpenNebula"):
        ONE.identify()


def test_aws_says_account_and_arn():
    with mock_aws():
        found = Aws(Secret("key-id"), Secret(CANARY), None, "eu-west-1", "test").identify()
    assert found.who.startswith("account 123456789012, arn:aws:sts::")


def test_aws_refuses_and_the_clock_may_be_why():
    def refused(seconds: float) -> str:
        date = formatdate(time.time() - seconds, usegmt=True)
        answer = {
            "Error": {"Code": "SignatureDoesNotMatch", "Message": f"expired {CANARY}"},
            "ResponseMetadata": {"HTTPHeaders": {"date": date}},
        }
        error = botocore.exceptions.ClientError(answer, "GetCallerIdentity")
        return str(_refusal(error))

    assert "refuses the credentials: SignatureDoesNotMatch — renew them" in refused(0)
    assert re.search(r"set this machine's clock: it is \+90\d s from AWS's", refused(900))
    assert "canary" not in refused(900)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (
            requests.exceptions.SSLError(
                "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: self-signed"
                " certificate (_ssl.c:992)"
            ),
            r"of it at https://x is not accepted: self-signed certificate — .*CA_BUNDLE",
        ),
        (requests.exceptions.SSLError("[SSL: WRONG_VERSION_NUMBER]"), "does not speak TLS"),
        (requests.exceptions.ConnectTimeout(), "no answer in time"),
        (requests.ConnectionError("[Errno 111] Connection refused"), "connection refused"),
        (requests.ConnectionError("Failed to resolve 'x'"), "the name is not known"),
    ],
)
def test_nobody_answers(monkeypatch, error, says):
    def request(*_, **__):
        raise error

    monkeypatch.setattr(web.requests, "request", request)
    with pytest.raises(RemoteError, match=says):
        web.call("it", "GET", "https://x")


def test_the_clocks_difference_is_ours_minus_theirs():
    assert web.clock_skew_s("Thu, 01 Jan 1970 00:01:40 GMT", 130.0) == 30.0
    assert web.clock_skew_s("no date", 130.0) is None
    assert web.clock_skew_s(None, 130.0) is None
