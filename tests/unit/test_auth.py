"""Credentials from where users have them, and the fields that IM's connectors read."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import boto3
import pytest

from mayfly.auth.credential import Missing
from mayfly.auth.find import CLOUDS, FINDERS, find_credential
from mayfly.errors import UserError
from mayfly.redact import Secret

CANARY = "canary-of-the-tests"
AWS = {"AWS_ACCESS_KEY_ID": "canary-key-id", "AWS_SECRET_ACCESS_KEY": CANARY}
AZURE = {
    "AZURE_SUBSCRIPTION_ID": "sub",
    "AZURE_TENANT_ID": "tenant",
    "AZURE_CLIENT_ID": "client",
    "AZURE_CLIENT_SECRET": CANARY,
}
OPENRC = {
    "OS_AUTH_URL": "https://keystone:5000/v3",
    "OS_USERNAME": "ada",
    "OS_PASSWORD": CANARY,
    "OS_PROJECT_NAME": "lab",
    "OS_USER_DOMAIN_NAME": "people",
    "OS_PROJECT_DOMAIN_ID": "d1",
    "OS_REGION_NAME": "CHI@UC",
}
KEY = {
    "type": "service_account",
    "project_id": "the-project",
    "client_email": "robot@the-project.iam.gserviceaccount.com",
    "private_key": f"-----BEGIN PRIVATE KEY-----\n{CANARY}==\n-----END PRIVATE KEY-----\n",
}
CLOUDS_YAML = """
clouds:
  lab:
    auth_type: v3applicationcredential
    auth:
      auth_url: https://keystone:5000/v3/
      application_credential_id: app-id
    region_name: one
    verify: false
"""
SECURE_YAML = f"clouds: {{lab: {{auth: {{application_credential_secret: {CANARY}}}}}}}"


@pytest.fixture(autouse=True)
def bare(monkeypatch, tmp_path):
    """No credentials to find, however this machine is set up."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    return monkeypatch


def written(path: Path, text: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return str(path)


def shown(cloud: str, environ: dict[str, str]) -> dict[str, str]:
    """The fields of the entry with the secrets in plain; nothing else of it shows one."""
    credential = find_credential(cloud, environ)
    entry = credential.entry()
    assert "canary" not in f"{credential!r} {credential} {entry!r} {entry}"
    return {
        "type": entry.type,
        **{k: v.reveal() if isinstance(v, Secret) else v for k, v in entry.fields.items()},
    }


def test_aws_keys_come_by_botos_own_chain(bare):
    for name, value in {**AWS, "AWS_SESSION_TOKEN": "token=="}.items():
        bare.setenv(name, value)
    assert shown("aws", {}) == {
        "type": "EC2",
        "username": "canary-key-id",
        "password": CANARY,
        "token": "token==",
    }


def test_an_aws_profile_is_found(bare, tmp_path):
    text = f"[work]\naws_access_key_id = canary-key-id\naws_secret_access_key = {CANARY}\n"
    bare.setenv("AWS_SHARED_CREDENTIALS_FILE", written(tmp_path / "credentials", text))
    bare.setenv("AWS_PROFILE", "work")
    assert shown("aws", {})["password"] == CANARY


def test_an_aws_profile_that_is_not_there_is_named(bare):
    bare.setenv("AWS_PROFILE", "absent")
    boto3.DEFAULT_SESSION = None
    with pytest.raises(UserError, match="absent"):
        find_credential("aws", {})


def test_half_a_pair_of_aws_keys_is_named(bare):
    bare.setenv("AWS_ACCESS_KEY_ID", "canary-key-id")
    with pytest.raises(Missing) as error:
        find_credential("aws", {})
    assert error.value.names == ("AWS_SECRET_ACCESS_KEY",)
    assert "canary" not in str(error.value)


def test_azure():
    assert shown("azure", AZURE) == {
        "type": "Azure",
        "subscription_id": "sub",
        "tenant": "tenant",
        "client_id": "client",
        "secret": CANARY,
    }


def test_google(tmp_path):
    path = written(tmp_path / "key.json", json.dumps(KEY))
    assert shown("gcp", {"GOOGLE_APPLICATION_CREDENTIALS": path}) == {
        "type": "GCE",
        "username": KEY["client_email"],
        "password": KEY["private_key"],
        "project": "the-project",
    }
    other = {"GOOGLE_APPLICATION_CREDENTIALS": path, "GOOGLE_CLOUD_PROJECT": "other"}
    assert shown("gcp", other)["project"] == "other"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({**KEY, "type": "authorized_user"}, "authorized_user"),
        ({**KEY, "client_email": ""}, "no client_email"),
        ({**KEY, "project_id": None}, "missing GOOGLE_CLOUD_PROJECT"),
        (f"{{{CANARY}", "is not JSON"),
    ],
)
def test_a_google_file_of_another_kind(tmp_path, content, says):
    text = content if isinstance(content, str) else json.dumps(content)
    path = written(tmp_path / "key.json", text)
    with pytest.raises(UserError, match=says) as error:
        find_credential("gcp", {"GOOGLE_APPLICATION_CREDENTIALS": path})
    assert "canary" not in str(error.value)


def test_openstack_by_an_openrc_file():
    assert shown("openstack", OPENRC) == {
        "type": "OpenStack",
        "host": "https://keystone:5000",
        "username": "ada",
        "password": CANARY,
        "tenant": "lab",
        "auth_version": "3.x_password",
        "domain": "people",
        "tenant_domain_id": "d1",
        "service_region": "CHI@UC",
    }


def test_openstack_by_an_application_credential_in_the_environment():
    environ = {
        "OS_AUTH_URL": "https://keystone/identity/v3",
        "OS_AUTH_TYPE": "v3applicationcredential",
        "OS_APPLICATION_CREDENTIAL_ID": "app-id",
        "OS_APPLICATION_CREDENTIAL_SECRET": CANARY,
    }
    found = shown("openstack", environ)
    assert (found["host"], found["auth_version"]) == ("https://keystone/identity", "3.x_appcred")
    assert (found["username"], found["password"]) == ("app-id", CANARY)


def test_openstack_by_clouds_yaml_with_its_secrets_apart(tmp_path):
    written(tmp_path / ".config/openstack/clouds.yaml", CLOUDS_YAML)
    written(tmp_path / ".config/openstack/secure.yaml", SECURE_YAML)
    environ = {"OS_CLOUD": "lab", "HOME": str(tmp_path)}
    found = shown("openstack", environ)
    assert (found["username"], found["password"]) == ("app-id", CANARY)
    assert (found["service_region"], find_credential("openstack", environ).verify) == ("one", False)


def test_a_cloud_that_clouds_yaml_does_not_have_names_the_nearest(tmp_path):
    path = written(tmp_path / "c.yaml", CLOUDS_YAML)
    with pytest.raises(UserError, match="did you mean 'lab'"):
        find_credential("openstack", {"OS_CLOUD": "labb", "OS_CLIENT_CONFIG_FILE": path})


def test_a_broken_clouds_yaml_shows_nothing_of_itself(tmp_path):
    path = written(tmp_path / "c.yaml", f"clouds: [{CANARY}: {{")
    with pytest.raises(UserError, match="is not YAML") as error:
        find_credential("openstack", {"OS_CLOUD": "lab", "OS_CLIENT_CONFIG_FILE": path})
    assert "canary" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"OS_PASSWORD": ""}, "missing OS_PASSWORD"),
        ({"OS_AUTH_TYPE": "v3oidcaccesstoken"}, "application credential"),
        ({"OS_USER_DOMAIN_NAME": "", "OS_USER_DOMAIN_ID": "d7"}, "OS_USER_DOMAIN_NAME"),
        ({"OS_PROJECT_DOMAIN_ID": "", "OS_PROJECT_DOMAIN_NAME": "x"}, "OS_PROJECT_DOMAIN_ID"),
    ],
)
def test_what_im_cannot_use_of_openstack_is_named(change, says):
    with pytest.raises(UserError, match=says) as error:
        find_credential("openstack", {**OPENRC, **change})
    assert "canary" not in str(error.value)


def test_egi_by_a_command_of_ones_own(tmp_path):
    command = f"{sys.executable} -c 'print(\"{CANARY}\")'"
    environ = {"EGI_SITE": "IISAS", "EGI_VO": "vo.x", "EGI_TOKEN_COMMAND": command}
    assert shown("egi", environ) == {
        "type": "EGI",
        "host": "IISAS",
        "vo": "vo.x",
        "token": CANARY,
    }


def test_egi_by_oidc_agent(bare, tmp_path):
    program = Path(written(tmp_path / "bin/oidc-token", f'#!/bin/sh\necho "{CANARY}-$3"\n'))
    program.chmod(0o755)
    bare.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    environ = {"EGI_SITE": "IISAS", "EGI_VO": "vo.x", "OIDC_AGENT_ACCOUNT": "egi"}
    assert shown("egi", environ)["token"] == f"{CANARY}-egi"


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("no-such-program x", "not installed: no-such-program"),
        (f"sh -c 'echo {CANARY} >&2; exit 3'", "ended with exit code 3"),
        (f"echo {CANARY} and more", "printed no token"),
        ("true", "printed no token"),
        ("'", "cannot be read"),
    ],
)
def test_a_token_command_that_fails_shows_nothing_of_what_it_printed(command, says):
    environ = {"EGI_SITE": "IISAS", "EGI_VO": "vo.x", "EGI_TOKEN_COMMAND": command}
    with pytest.raises(UserError, match=says) as error:
        find_credential("egi", environ)
    assert "canary" not in str(error.value)


def test_opennebula(tmp_path):
    path = written(tmp_path / ".one/one_auth", f"ada:{CANARY}:with:colons\n")
    environ = {"ONE_XMLRPC": "https://one.example/RPC2", "HOME": str(tmp_path)}
    expected = {
        "type": "OpenNebula",
        "host": "https://one.example:443/RPC2",
        "username": "ada",
        "password": f"{CANARY}:with:colons",
    }
    assert shown("opennebula", environ) == expected
    assert shown("opennebula", {**environ, "ONE_AUTH": path, "HOME": "/none"}) == expected


@pytest.mark.parametrize(
    ("cloud", "names"),
    [
        ("aws", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"]),
        ("gcp", ["GOOGLE_APPLICATION_CREDENTIALS"]),
        ("azure", list(AZURE)),
        ("openstack", ["OS_CLOUD", "OS_AUTH_URL"]),
        ("egi", ["EGI_SITE", "EGI_VO", "EGI_TOKEN_COMMAND", "OIDC_AGENT_ACCOUNT"]),
        ("opennebula", ["ONE_XMLRPC", "ONE_AUTH"]),
    ],
)
def test_what_is_missing_is_named(cloud, names, tmp_path):
    with pytest.raises(Missing) as error:
        find_credential(cloud, {"HOME": str(tmp_path)})
    assert [name for name in names if name not in str(error.value)] == []
    assert error.value.exit_code == 2


def test_every_cloud_has_a_rule():
    assert sorted(CLOUDS) == sorted((*FINDERS, "local", "static"))
    assert find_credential("static", {}) is None
    with pytest.raises(UserError, match="did you mean 'aws'"):
        find_credential("awz", {})
