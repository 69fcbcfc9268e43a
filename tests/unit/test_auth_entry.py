"""The form in which keys reach IM, read back by the parser that IM-client shares with IM."""

from __future__ import annotations

import pytest
from imclient import IMClient

from mayfly.auth.entry import Entry, client_item
from mayfly.errors import UserError
from mayfly.redact import Secret

PEM = "-----BEGIN PRIVATE KEY-----\nMIIEcanary+/=\nabc==\n-----END PRIVATE KEY-----\n"


def as_im_reads(*entries: Entry) -> list[dict[str, str]]:
    """What the server makes of the header that the client sends (IM's get_auth_header)."""
    client = IMClient.init_client("http://im", [client_item(entry) for entry in entries])
    text = client.rest_auth_data.replace("\\\\n", "\n")
    return IMClient.read_auth_data(text.split("\\n"))


@pytest.mark.parametrize(
    "value",
    [
        "plain",
        "session/token+ends==",
        "semi;colon = and 'single quotes'",
        'double "quotes"; and = more',
        "# no comment",
        PEM,
    ],
)
def test_a_value_arrives_as_it_was(value):
    entries = (
        Entry("InfrastructureManager", "im", {"username": "u", "password": Secret(value)}),
        Entry("EC2", "ec2", {"username": "id", "password": Secret("x=;y"), "token": "t=="}),
    )
    first, second = as_im_reads(*entries)
    assert first == {
        "id": "im",
        "type": "InfrastructureManager",
        "username": "u",
        "password": value.strip(),
    }
    assert (second["password"], second["token"]) == ("x=;y", "t==")


@pytest.mark.parametrize(
    "value", ["canary'\"", "canary\\n", "canary\r\nX: y", "canary\0", "canary€", " canary"]
)
def test_what_the_form_cannot_carry_is_refused_without_showing_it(value):
    with pytest.raises(UserError, match="password of the EC2 credentials") as error:
        client_item(Entry("EC2", "ec2", {"password": Secret(value)}))
    assert "canary" not in str(error.value)


def test_an_entry_shows_no_secret():
    entry = Entry("EC2", "ec2", {"username": Secret("canary-id"), "password": Secret("canary")})
    assert "canary" not in f"{entry!r} {entry} {entry.fields}"
    assert [secret.reveal() for secret in entry.secrets] == ["canary-id", "canary"]
