"""An IM that takes calls and never answers: a real socket, and the real client."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import requests
from imclient import imclient

from mayfly import im as module
from mayfly.im import IM, NoAnswer

PART = b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf of it"
QUICK_S = (0.5, 0.25)


@dataclass
class SilentServer:
    """Accepts, remembers the first line of each call, and says `says`, which is not enough."""

    says: bytes = b""
    calls: list[str] = field(default_factory=list)
    connections: list[socket.socket] = field(default_factory=list)

    def serve(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            self.connections.append(connection)
            self.calls.append(connection.recv(4096).split(b" HTTP/")[0].decode())
            connection.sendall(self.says)


@pytest.fixture
def silent(monkeypatch) -> Iterator[tuple[SilentServer, IM, str]]:
    monkeypatch.setattr(module, "TIMEOUTS_S", QUICK_S)
    monkeypatch.setattr(module, "RESTART_S", 1.0)
    fake = SilentServer()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=fake.serve, args=[listener], daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        revived: list[int] = []
        service = IM(
            url,
            lambda: [{"type": "InfrastructureManager", "username": "u", "password": "canary"}],
            revive=lambda: revived.append(1),
        )
        yield fake, service, url
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(timeout=30)
    for connection in fake.connections:
        connection.close()
    assert revived == [], "a service that is there is not started again"


def test_creating_is_given_up_and_not_asked_twice(silent):
    fake, service, url = silent
    with pytest.raises(NoAnswer) as given_up:
        service.create("system node ()")  # without a limit this never ends
    assert fake.calls == ["POST /infrastructures?async=yes"], "it may have begun to make nodes"
    line = str(given_up.value)
    assert line.startswith(f"IM does not answer at {url}: no answer in 0.25 s — ")
    assert "\n" not in line
    assert "canary" not in line
    assert given_up.value.exit_code == 1


@pytest.mark.parametrize("says", [b"", PART], ids=["nothing", "half an answer"])
def test_what_does_no_harm_is_asked_again_and_is_no_restart(silent, says):
    fake, service, url = silent
    fake.says = says
    with pytest.raises(NoAnswer, match=f"at {url}: no answer in 0.25 s"):
        service.state("infra-1")
    assert len(fake.calls) > 1
    assert {*fake.calls} == {"GET /infrastructures/infra-1/state"}
    assert service.restarts == 0, "a slow one goes on configuring: it is not to begin anew"


def test_each_call_of_the_client_has_a_limit(silent, monkeypatch):
    _, service, _ = silent
    limits = []

    class Answer:
        status_code, text = 200, ""

        def json(self):
            return {"uri-list": [], "contmsg": ""}

    def request(method, url, **options):
        limits.append(options.get("timeout"))
        return Answer()

    monkeypatch.setattr(requests, "request", request)
    service.infrastructures()
    service.destroy("i")
    service.forget("i")
    service.reconfigure("i")
    service.create("radl")
    service.messages("i")
    service.nodes("i")
    service.node_messages("i", "0")
    assert limits == [QUICK_S] * 8


def test_the_client_knows_no_other_way_out():
    """All that it takes of `requests` is what has the limit."""
    names = {
        name
        for code in imclient.IMClient.__dict__.values()
        for name in getattr(getattr(code, "__code__", None), "co_names", ())
    }
    assert "request" in names
    assert {"get", "post", "put", "delete", "Session", "session"} & names - {"get"} == set()


def test_a_server_that_cannot_be_reached_was_asked_nothing():
    error = requests.ConnectTimeout("…")
    assert module._never_sent(error)
    assert not module._is_slow(error)
    assert module._why(error) == "no connection in 10 s"
    assert module._why(requests.ConnectionError("Connection refused")) == "connection refused"
