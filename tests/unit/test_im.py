from __future__ import annotations

import pytest
import requests

from mayfly.errors import RemoteError
from mayfly.im import IM, RENEW_S, auth_of, one_line

NODE = """
network private ()
network public (outbound = 'yes')
system worker (
state = 'configured' and
net_interface.0.connection = 'private' and
net_interface.0.ip = '10.1.0.7' and
net_interface.0.dns_name = 'worker-#N#' and
net_interface.1.connection = 'public' and
net_interface.1.ip = '8.8.1.2' and
disk.0.os.credentials.username = 'root' and
disk.0.os.credentials.password = 'canary-password'
)
"""


class FakeClient:
    """The upstream client: answers (success, value)."""

    def __init__(self, **answers) -> None:
        self.answers = answers

    def _answer(self, name):
        answer = self.answers[name]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def create(self, radl, asyncr=False):
        assert asyncr, "the id has to be known at once"
        return self._answer("create")

    def getinfo(self, infrastructure):
        return self._answer("getinfo")

    def get_infra_property(self, infrastructure, name):
        answer = self._answer(name)
        return answer[infrastructure] if isinstance(answer, dict) else answer

    def list_infras(self, flt=None):
        return self._answer("infrastructures")


@pytest.fixture
def im(tmp_path):
    auth = tmp_path / "auth.dat"
    auth.write_text("id = im; type = InfrastructureManager; username = u; password = p\n")
    made = IM("http://127.0.0.1:8800", auth_of(auth))

    def answering(**answers) -> IM:
        made._client = FakeClient(**answers)
        return made

    return answering


def test_a_refusal_is_one_line(im):
    answer = '{"message": "Error parsing\\n  the RADL", "code": 400}'
    with pytest.raises(RemoteError, match="IM could not create: Error parsing the RADL$"):
        im(create=(False, answer)).create("…")


def test_a_dead_service_is_named(im):
    with pytest.raises(RemoteError, match=r"does not answer at http://127\.0\.0\.1:8800"):
        im(create=requests.ConnectionError("…")).create("…")


def test_a_service_that_is_restarted_is_waited_for(im, monkeypatch):
    client = im(state=requests.ConnectionError("…"))._client
    restarted = (True, {"state": "running", "vm_states": {}})
    monkeypatch.setattr("mayfly.im.time.sleep", lambda _: client.answers.update(state=restarted))
    restarting = im()
    restarting._client = client
    assert restarting.state("i").infrastructure == "running"


def test_a_missing_auth_file_is_an_error_of_ours(tmp_path):
    with pytest.raises(RemoteError, match="auth file"):
        IM("http://127.0.0.1:8800", auth_of(tmp_path / "absent"))


def test_the_state_has_the_nodes(im):
    answer = {"state": "running", "vm_states": {"0": "configured", "1": "running"}}
    state = im(state=(True, answer)).state("i")
    assert state.infrastructure == "running"
    assert state.nodes == {"0": "configured", "1": "running"}


def test_a_node_is_read_from_its_radl(im):
    node = im(getinfo=(True, [("3", True, NODE)])).nodes("i")[0]
    assert (node.group, node.name, node.state) == ("worker", "worker-3", "configured")
    assert (node.public_ip, node.private_ip, node.user) == ("8.8.1.2", "10.1.0.7", "root")
    assert node.password.reveal() == "canary-password"
    assert "canary" not in repr(node)


def test_long_answers_are_cut():
    assert len(one_line("word " * 1000)) == 400


def test_a_service_that_is_gone_is_started_again(im, monkeypatch):
    monkeypatch.setattr("mayfly.im.time.sleep", lambda seconds: None)
    lost = requests.ConnectionError("Connection refused")
    service = im(state=lost, create=lost)

    def revive():
        service._client.answers = {"state": (True, {"state": "running", "vm_states": {}})}
        service._client.answers["create"] = (True, "infra-1")

    service._revive = revive
    assert service.state("i").infrastructure == "running"
    assert service.restarts == 1
    assert service.state("i").infrastructure == "running"
    assert service.restarts == 1
    service._client.answers["create"] = lost
    assert service.create("radl") == "infra-1"
    assert service.restarts == 0, "what is made by the new one goes on"


def test_a_create_that_may_have_been_heard_is_not_repeated(im):
    service = im(create=requests.ConnectionError("Connection reset by peer"))
    service._revive = lambda: pytest.fail("asked again")
    with pytest.raises(RemoteError, match="does not answer"):
        service.create("radl")


def test_only_infrastructures_of_the_run_are_found(im):
    """IM 2.0 ignores the list's filter; whoever trusts it destroys the nodes of other runs."""
    radls = {
        "mine": (True, "instance_tags = 'mayfly-run=faces-261128-100000-abcd'"),
        "other": (True, "instance_tags = 'mayfly-run=faces-261128-100000-beef'"),
    }
    found = im(infrastructures=(True, list(radls)), radl=radls).find("faces-261128-100000-abcd")
    assert found == ["mine"]


def test_one_that_cannot_be_read_counts_as_gone_only_when_it_is(im):
    unreadable = {"strange": (False, "Invalid infrastructure ID or access not granted.")}
    service = im(infrastructures=(True, ["strange"]), radl=unreadable)
    with pytest.raises(RemoteError, match="read radl"):
        service.find("faces-261128-100000-abcd")
    listings = iter([["strange"], []])
    service.infrastructures = lambda: next(listings)
    assert service.find("faces-261128-100000-abcd") == []


def test_keys_are_found_again_in_time_and_kept_when_that_fails(monkeypatch):
    """A token lives an hour, a run may live longer: destroying it must not need the first one."""
    answers = iter(["first", "second", None])

    def keys():
        token = next(answers)
        if token is None:
            raise RemoteError("the token's command failed")
        return [{"type": "InfrastructureManager", "token": token}]

    now = [0.0]
    monkeypatch.setattr("mayfly.im.time.monotonic", lambda: now[0])
    service = IM("http://127.0.0.1:8800", keys)
    seen = []
    ask = lambda: (seen.append(service._client.rest_auth_data), (True, ""))[1]  # noqa: E731
    for moment in (1.0, RENEW_S + 2, 2 * RENEW_S + 4):
        now[0] = moment
        service._call("ask", ask)
    assert [text.split("token = ")[1].split(";")[0] for text in seen] == [
        "first",
        "second",
        "second",
    ]


def test_forgetting_is_forced_and_only_once(monkeypatch):
    """IM-client writes `?force=yes?async=yes`, which IM does not understand: so not both."""
    sent = []

    class Answer:
        status_code, text = 200, ""

    def request(method, url, **_):
        sent.append((method, url))
        return Answer()

    service = IM("http://127.0.0.1:8800", lambda: [{"type": "InfrastructureManager"}])
    monkeypatch.setattr("imclient.imclient.requests.request", request)
    service.forget("infra-1")
    service.destroy("infra-1")
    where = "http://127.0.0.1:8800/infrastructures/infra-1"
    assert sent == [("DELETE", f"{where}?force=yes"), ("DELETE", f"{where}?async=yes")]
