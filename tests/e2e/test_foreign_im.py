"""A foreign IM: the real service in a process of its own, with IM's Dummy cloud; no node is made.

It needs IM's environment, which `mayfly local up` installs, and neither Docker nor the platform.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator

import pytest

from foreign_im import Foreign, keys, serving
from mayfly.auth.entry import Entry, client_item
from mayfly.errors import UserError
from mayfly.im import IM
from mayfly.im_server import find_server, greet
from mayfly.redact import Secret

CANARY = "canary-of=the;'tests'"
PEM = "-----BEGIN PRIVATE KEY-----\nMIIEcanary+/=\nabc==\n-----END PRIVATE KEY-----"
CLOUD = Entry("GCE", "gce", {"username": "robot@p", "password": Secret(PEM), "project": "p"})
RADL = """
description faces-261128-100000-abcd ()
network net ()
system worker (
cpu.count >= 1 and memory.size >= 512m and net_interface.0.connection = 'net' and
disk.0.os.name = 'linux' and disk.0.image.url = 'dummy://x/y' and
disk.0.os.credentials.username = 'user' and disk.0.os.credentials.password = 'pass'
)
deploy worker 1
"""


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Foreign]:
    with serving(tmp_path_factory.mktemp("im"), CANARY) as service:
        yield service


def environ(foreign: Foreign, **more: str) -> dict[str, str]:
    return {**keys(foreign, CANARY), **more}


def test_it_takes_the_keys_and_refuses_others(foreign: Foreign):
    assert greet(find_server(environ(foreign))) == "2.0.0"
    with pytest.raises(UserError, match="refuses the keys") as error:
        greet(find_server(environ(foreign, IM_PASSWORD="canary-wrong")))
    assert "canary" not in str(error.value)


def test_an_infrastructure_from_create_to_destroy(foreign: Foreign):
    server = find_server(environ(foreign))
    entries = [server.entry, Entry("Dummy", "dummy", {}), CLOUD]
    im = IM(server.url, lambda: [client_item(entry) for entry in entries])
    identity = im.create(RADL)
    assert im.find("faces-261128-100000-abcd") == [identity]
    await_(lambda: im.state(identity).nodes != {})
    assert b"MIIEcanary" not in (foreign.directory / "im.sqlite").read_bytes()
    im.destroy(identity)
    await_(lambda: im.infrastructures() == [])
    log = (foreign.directory / "im.log").read_text()
    assert "canary" not in log


def test_im_itself_reads_each_key_as_it_was(foreign: Foreign):
    """Its own parser, over the header that the client sends."""
    server = find_server(environ(foreign))
    token = Entry("EC2", "ec2", {"password": Secret("a=;b"), "token": Secret("canary==")})
    items = [client_item(entry) for entry in (server.entry, CLOUD, token)]
    script = (
        "import json, sys; from IM.auth import Authentication;"
        # The separators are those of IM/rest/routers/__init__.py, which needs a running service.
        r"lines = sys.stdin.read().replace('\\\\n', '\n').split('\\n');"
        "print(json.dumps(Authentication.read_auth_data(lines)))"
    )
    header = IM(server.url, lambda: items)._client.rest_auth_data
    done = subprocess.run(
        [str(foreign.python), "-c", script],
        input=header,
        capture_output=True,
        text=True,
        check=True,
        cwd=foreign.directory,
    )
    im, google, ec2 = json.loads(done.stdout.splitlines()[-1])
    assert im["password"] == CANARY
    assert google["password"] == PEM
    assert (ec2["password"], ec2["token"]) == ("a=;b", "canary==")


def await_(what: Callable[[], bool], patience_s: float = 60.0) -> None:
    deadline = time.monotonic() + patience_s
    while not what():
        assert time.monotonic() < deadline, "it does not come"
        time.sleep(0.5)
