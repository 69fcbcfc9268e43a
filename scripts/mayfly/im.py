"""The Infrastructure Manager's REST interface, through its own client library.

IM-client (GPL-3.0) answers every call with (success, value); here a failure is a RemoteError that
carries IM's message on one line.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import requests
from imclient import IMClient, imclient
from radl.radl_parse import parse_radl

from mayfly.auth.web import cause
from mayfly.errors import MayflyError, RemoteError
from mayfly.redact import Secret

MESSAGE_LENGTH = 400
# To connect, and to answer. No call waits for nodes: IM makes and destroys them in the background.
TIMEOUTS_S = (10.0, 60.0)
RESTART_S = 90.0
RENEW_S = 300.0  # keys of STS and tokens of OpenID Connect live an hour; a run may live longer
# What IM says of an infrastructure; those not named here mean "wait" (pending, running, unknown).
READY = "configured"
BROKEN = ("failed", "unconfigured", "stopped", "off", "deleting")


class _InTime:
    """The part of `requests` that IM-client uses, with a limit to the time that a call may take.

    IM-client passes none, so that a server that never answers would be waited for without end.
    """

    @staticmethod
    def request(method: str, url: str, **options: Any) -> requests.Response:
        return requests.request(method, url, timeout=TIMEOUTS_S, **options)


imclient.requests = _InTime()


@dataclass(frozen=True)
class State:
    """State of an infrastructure and of its nodes (node number → state)."""

    infrastructure: str
    nodes: dict[str, str]


@dataclass(frozen=True)
class Node:
    """One node as IM knows it, with what is needed to log in."""

    number: str
    group: str  # RADL system: ps or worker
    state: str
    name: str
    public_ip: str | None
    private_ip: str | None
    user: str
    password: Secret | None
    private_key: Secret | None
    own: tuple[str, ...] | None = None
    """Of a machine of the user's own: the options with which the user's ssh reaches it."""


class Manager(Protocol):
    """What deploy and destroy need of IM."""

    restarts: int
    """How often the service was lost and came back since the last `create`: what it was doing
    then, it does no more."""

    def create(self, radl: str) -> str: ...
    def state(self, infrastructure: str) -> State: ...
    def messages(self, infrastructure: str) -> str: ...
    def node_messages(self, infrastructure: str, number: str) -> str: ...
    def nodes(self, infrastructure: str) -> list[Node]: ...
    def infrastructures(self) -> list[str]: ...
    def find(self, text: str) -> list[str]: ...
    def add(self, infrastructure: str, radl: str) -> list[str]: ...
    def remove(self, infrastructure: str, numbers: Sequence[str]) -> None: ...
    def destroy(self, infrastructure: str) -> None: ...
    def forget(self, infrastructure: str) -> None: ...
    def reconfigure(self, infrastructure: str) -> None: ...
    def wipe(self, infrastructures: Collection[str]) -> None: ...


class NoAnswer(RemoteError):
    """IM was asked for some time, and nobody answered."""


class SilentManager:
    """A Manager that is not there: whatever is asked of it fails with the same words."""

    def __init__(self, why: RemoteError) -> None:
        self._why = why
        self.restarts = 0

    def __getattr__(self, name: str) -> Any:
        def fail(*_: object) -> Any:
            raise self._why

        return fail


Auth = Callable[[], Sequence[Mapping[str, str]]]
"""Finds the keys that go with each call, in the form of IM-client: IM itself keeps none."""


def auth_of(file: Path) -> Auth:
    """The keys in an auth file; they raise RemoteError when it cannot be read."""

    def read() -> Sequence[Mapping[str, str]]:
        try:
            entries: Sequence[Mapping[str, str]] = IMClient.read_auth_data(str(file))
        except OSError as error:
            raise RemoteError(f"IM's auth file cannot be read: {error}") from error
        return entries

    return read


class IM:
    """A Manager over IM's REST interface."""

    def __init__(
        self,
        url: str,
        auth: Auth,
        *,
        revive: Callable[[], object] | None = None,
        wipe: Callable[[Collection[str]], object] | None = None,
    ) -> None:
        """Find the keys, and again from time to time; raises what finding them raises.

        `revive` starts the service again; it is called when the service does not answer. `wipe`
        wipes what the service remembers of destroyed infrastructures.
        """
        self._url = url
        self._auth = auth
        self._revive = revive
        self._wipe = wipe
        self.restarts = 0
        self._client = self._new_client()

    def create(self, radl: str) -> str:
        """Ask for an infrastructure and return its id at once; IM goes on creating it."""
        made = self._call("create", lambda: self._client.create(radl, asyncr=True), again=False)
        self.restarts = 0  # the service that makes it is the one that came back
        return str(made)

    def state(self, infrastructure: str) -> State:
        """Return the state; raises RemoteError when IM does not know the infrastructure."""
        answer = self._property(infrastructure, "state")
        return State(str(answer["state"]), {str(k): v for k, v in answer["vm_states"].items()})

    def messages(self, infrastructure: str) -> str:
        """Return what contextualization has printed so far."""
        return str(self._property(infrastructure, "contmsg") or "")

    def nodes(self, infrastructure: str) -> list[Node]:
        """Return the nodes in order of their numbers."""
        pairs = self._call("list the nodes", lambda: self._client.getinfo(infrastructure))
        return [
            _node(number, self._checked("describe a node", success, text))
            for number, success, text in sorted(pairs, key=lambda pair: int(pair[0]))
        ]

    def node_messages(self, infrastructure: str, number: str) -> str:
        """Return what contextualization has printed on one node."""
        return str(
            self._call(
                "read messages", lambda: self._client.getvminfo(infrastructure, number, "contmsg")
            )
        )

    def infrastructures(self) -> list[str]:
        """Return the ids of all infrastructures of this IM user."""
        return [str(i) for i in self._call("list", lambda: self._client.list_infras())]

    def find(self, text: str) -> list[str]:
        """Return the infrastructures whose RADL contains `text`.

        Raises RemoteError when one is listed and cannot be read, as nothing is known of it then.
        IM 2.0 takes a `filter` in its list's address and ignores it: it answers with all.
        """
        return [i for i in self.infrastructures() if text in self._radl(i)]

    def _radl(self, infrastructure: str) -> str:
        try:
            return str(self._property(infrastructure, "radl"))
        except RemoteError:
            if infrastructure in self.infrastructures():
                raise  # it may be the one that is looked for
            return ""  # it went away since it was listed

    def add(self, infrastructure: str, radl: str) -> list[str]:
        """Have nodes added and return their numbers; IM then configures all nodes once more.

        The text may name systems that the infrastructure has. Raises RemoteError when none could
        be made; it waits for the provider.
        """
        added = self._call(
            "add nodes", lambda: self._client.addresource(infrastructure, radl), again=False
        )
        return [str(number) for number in added]

    def remove(self, infrastructure: str, numbers: Sequence[str]) -> None:
        """Have nodes removed; the others are not configured again."""
        wanted = ",".join(numbers)

        def call() -> tuple[bool, Any]:
            # IM-client calls every answer a success, but passes on what IM has said.
            _, said = self._client.removeresource(infrastructure, list(numbers), context=False)
            return said == wanted, said

        self._call("remove nodes", call)

    def destroy(self, infrastructure: str) -> None:
        """Ask IM to destroy an infrastructure; it does so in the background."""
        self._call("destroy", lambda: self._client.destroy(infrastructure, asyncr=True))

    def forget(self, infrastructure: str) -> None:
        """Make IM forget an infrastructure that it cannot destroy, whatever is left of it."""

        def forced() -> tuple[bool, Any]:
            # Synchronously: IM-client writes the two words of an address wrongly together.
            self._client.options.force = True
            try:
                answer: tuple[bool, Any] = self._client.destroy(infrastructure)
            finally:
                self._client.options.force = False
            return answer

        self._call("forget", forced)

    def reconfigure(self, infrastructure: str) -> None:
        """Start contextualization anew; a restarted IM does not go on with it by itself."""
        self._call("reconfigure", lambda: self._client.reconfigure(infrastructure, ""))

    def wipe(self, infrastructures: Collection[str]) -> None:
        """Have a service of ours wipe what it remembers of what is destroyed, secrets among it."""
        if self._wipe:
            self._wipe(infrastructures)

    def _property(self, infrastructure: str, name: str) -> Any:
        return self._call(
            f"read {name}", lambda: self._client.get_infra_property(infrastructure, name)
        )

    def _call(self, what: str, call: Callable[[], tuple[bool, Any]], again: bool = True) -> Any:
        """Call IM; one that is being restarted gets some time, where asking twice does no harm."""
        self._renew_keys()
        deadline, lost = time.monotonic() + RESTART_S, False
        while True:
            try:
                success, value = call()
            except requests.RequestException as error:
                if time.monotonic() > deadline or not (again or _never_sent(error)):
                    raise NoAnswer(
                        f"IM does not answer at {self._url}: {_why(error)}",
                        "is the service running, or overloaded?",
                    ) from error
                if not _is_slow(error):  # else it is there, and goes on with what it does
                    lost = True
                    self._try_to_revive()
                time.sleep(1)
            else:
                self.restarts += lost
                return self._checked(what, success, value)

    def _new_client(self) -> Any:
        self._renewed = time.monotonic()
        return IMClient.init_client(self._url, self._auth(), ssl_verify=True)

    def _renew_keys(self) -> None:
        """Find the keys again, some time after the last; those of before stay if it fails."""
        if time.monotonic() - self._renewed > RENEW_S:
            with suppress(MayflyError):  # IM says when the old ones are no longer good
                self._client = self._new_client()

    def _try_to_revive(self) -> None:
        if self._revive:
            with suppress(MayflyError):  # whoever asks IM tells that it does not answer
                self._revive()

    @staticmethod
    def _checked(what: str, success: bool, value: Any) -> Any:
        if not success:
            raise RemoteError(f"IM could not {what}: {one_line(str(value))}")
        return value


def _never_sent(error: requests.RequestException) -> bool:
    """Whether nothing has reached the service, so that asking again cannot do a thing twice."""
    if isinstance(error, requests.ConnectTimeout):
        return True
    return isinstance(error, requests.ConnectionError) and "refused" in str(error)


def _is_slow(error: requests.RequestException) -> bool:
    """Whether the service has taken a call and not answered in time; in the middle of an answer
    that is a ConnectionError with these words."""
    return isinstance(error, requests.ReadTimeout) or "Read timed out" in str(error)


def _why(error: requests.RequestException) -> str:
    """Why there is no answer, in few words, with the seconds that were waited."""
    connect, answer = TIMEOUTS_S
    if isinstance(error, requests.ConnectTimeout):
        return f"no connection in {connect:g} s"
    return f"no answer in {answer:g} s" if _is_slow(error) else cause(error)


def one_line(answer: str) -> str:
    """Return an answer of IM (plain text or its JSON error document) as one short line."""
    try:
        document = json.loads(answer)
    except ValueError:
        document = None
    if isinstance(document, dict) and "message" in document:
        answer = str(document["message"])
    line = " ".join(answer.split())
    return line if len(line) <= MESSAGE_LENGTH else line[: MESSAGE_LENGTH - 1] + "…"


def _node(number: str, text: str) -> Node:
    radl = parse_radl(text)
    system = radl.systems[0]
    password = system.getValue("disk.0.os.credentials.password")
    key = system.getValue("disk.0.os.credentials.private_key")
    return Node(
        number=str(number),
        group=system.name,
        state=str(system.getValue("state") or "unknown"),
        name=str(system.getValue("net_interface.0.dns_name") or number).replace("#N#", str(number)),
        public_ip=radl.getPublicIP(),
        private_ip=radl.getPrivateIP(),
        user=str(system.getValue("disk.0.os.credentials.username") or "root"),
        password=Secret(password) if password else None,
        private_key=Secret(key) if key else None,
    )
