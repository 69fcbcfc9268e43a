"""Start this node's ranks of a Horovod run, in step with the launchers on the other nodes.

    horovod_launch.py --run R --node N=ADDRESS … --me N --port P [--slots 1] -- python train.py …

Every node's own supervisor runs this, in the Python of the runtime: nothing of mayfly_train is
imported. No node can run a command on another, as `horovodrun` does through SSH: launchers tell
numbers and names to the first node's, which answers with ranks, and nothing that is sent is ever
executed or unpickled.

All ranks of one start are a *generation*. Each has a store of its own (what `horovodrun` calls the
rendezvous server), so no rank ever reads what an older one has left there. When a rank ends
badly or a node falls silent, all launchers end their ranks and meet again for the next generation,
whose programs go on from their last checkpoint. A node that was there before and does not come back
in time is left out, as long as enough nodes remain; it is not let in again.

The variables that ranks get, and the store's protocol, are Horovod 0.28.1's: runner/gloo_run.py,
common/gloo/http_store.cc and gloo_context.cc of its sources.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import importlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

READY, RUNNING, FINISHED, FAILED = "ready", "running", "finished", "failed"
WAIT, START, GO_ON, STOP, LEAVE = "wait", "start", "go on", "stop", "leave"
OK, ERROR, BAD_COMMAND = 0, 1, 2

MAX_MESSAGE_BYTES = 8 << 20
LOOK_S = 0.1  # between two looks at this node's ranks
ASK_TIMEOUT_S = 5.0
# gloo's default of 30 s is for all ranks to come to `hvd.init`, too, and a node may start slowly.
GLOO_TIMEOUT_S = 120
PROBE_FLOATS, PROBE_ROUNDS = 1 << 20, 5


@dataclass(frozen=True)
class Limits:
    """How long things may take, in seconds, and how often all may start again.

    A node that has said nothing for `silent` ends the generation; one that has said nothing for
    `drop` is left out of the next. `assemble` is for all nodes to come, at first and later. From
    SIGTERM on ranks have `kill_after` before a restart, and `save` when the launcher is to end.
    """

    ask: float = 0.5
    silent: float = 15.0
    drop: float = 30.0
    assemble: float = 600.0
    kill_after: float = 5.0
    save: float = 50.0
    follow: float = 20.0
    restarts: int = 3


@dataclass(frozen=True)
class Party:
    """Who takes part: the nodes' addresses by name, in rank order, and how few are enough.

    The first node keeps the meeting, and must always be there.
    """

    run: str
    nodes: Mapping[str, str]
    min_nodes: int

    @property
    def first(self) -> str:
        return next(iter(self.nodes))

    @property
    def address(self) -> str:
        """The first node's."""
        return self.nodes[self.first]


@dataclass(frozen=True)
class Place:
    """What Horovod calls a slot: where one rank stands among all, on its node, across nodes."""

    node: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int


def places(slots: Mapping[str, int]) -> list[Place]:
    """A place for each slot of each node, node by node.

    `cross` counts the nodes that have a rank with the same local rank, as Horovod's
    get_host_assignments does.
    """
    size, made = sum(slots.values()), []
    for position, (node, own) in enumerate(slots.items()):
        before = list(slots.values())[:position]
        for local in range(own):
            made.append(
                Place(
                    node=node,
                    rank=sum(before) + local,
                    size=size,
                    local_rank=local,
                    local_size=own,
                    cross_rank=sum(count > local for count in before),
                    cross_size=sum(count > local for count in slots.values()),
                )
            )
    return made


# --- the store, where ranks leave the addresses that they listen on ------------------------------


class Store:
    """One generation's key-value store, as Horovod's ranks use it over HTTP."""

    def __init__(self, address: str) -> None:
        self._lock = threading.Lock()
        self._scopes: dict[str, dict[str, bytes]] = {}
        self._left: dict[str, set[str]] = {}
        self._arrived: set[int] = set()
        self._server = serve(address, 0, StoreHandler, self)
        self.port: int = self._server.server_address[1]

    def arrived(self) -> set[int]:
        """The ranks that have come to `hvd.init`."""
        with self._lock:
            return set(self._arrived)

    def put(self, scope: str, key: str, value: bytes) -> None:
        with self._lock:
            self._scopes.setdefault(scope, {})[key] = value
            if scope == "global" and key.isdecimal():
                self._arrived.add(int(key))

    def get(self, scope: str, key: str) -> bytes | None:
        with self._lock:
            return self._scopes.get(scope, {}).get(key)

    def leave(self, scope: str, key: str) -> None:
        """A rank has all that it needs of a scope, which is emptied after the last one.

        So the program may shut Horovod down and initialise it again.
        """
        with self._lock:
            left = self._left.setdefault(scope, set())
            left.add(key)
            if left >= {name for name in self._scopes.get(scope, {}) if name.isdecimal()}:
                self._scopes.pop(scope, None)
                self._left.pop(scope, None)

    def close(self) -> None:
        """Answer no more."""
        self._server.shutdown()
        self._server.server_close()


class QuietHandler(BaseHTTPRequestHandler):
    """Answers without a word in the log, and does not wait for ever for a request."""

    timeout = 10

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def reply(self, status: int, body: bytes = b"") -> None:
        """Send an answer of bytes."""
        with contextlib.suppress(OSError):
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def body(self) -> bytes:
        """What was sent; nothing when it is too much."""
        length = int(self.headers.get("Content-Length") or 0)
        return self.rfile.read(length) if 0 <= length <= MAX_MESSAGE_BYTES else b""


class StoreHandler(QuietHandler):
    """The store's three verbs, on /scope/key."""

    def do_GET(self) -> None:
        value = self._store.get(*self._place())
        self.reply(404 if value is None else 200, value or b"")

    def do_PUT(self) -> None:
        self._store.put(*self._place(), self.body())
        self.reply(200)

    def do_DELETE(self) -> None:
        self._store.leave(*self._place())
        self.reply(200)

    @property
    def _store(self) -> Store:
        return self.server.owner  # type: ignore[attr-defined, no-any-return]

    def _place(self) -> tuple[str, str]:
        scope, _, key = self.path.strip("/").partition("/")
        return scope, key


class Server(ThreadingHTTPServer):
    """A server in threads that end with the process."""

    daemon_threads = True
    request_queue_size = 128  # all ranks come at once
    owner: Any = None

    def handle_error(self, *_: Any) -> None:
        """A client that goes away is not worth a traceback."""


def serve(address: str, port: int, handler: type[QuietHandler], owner: Any) -> Server:
    """A server that answers for its owner. Raises OSError when it cannot listen there."""
    server = Server((address, port), handler)
    server.owner = owner
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    return server


# --- the meeting, which the first node's launcher keeps -------------------------------------------


@dataclass
class Seen:
    """What a node's launcher has last said, and when."""

    heard: float
    slots: int = 1
    launcher: str = ""
    state: str = ""
    generation: str = ""


@dataclass
class Generation:
    """All ranks of one start. `done` is when the first node's have all ended well."""

    key: str
    places: list[Place]
    store: Any
    probe: bool
    launchers: Mapping[str, str]
    finished: set[str] = field(default_factory=set)
    done: float | None = None


@dataclass
class Cause:
    """Why a generation ended; what a rank says after another's death explains nothing."""

    text: str
    explains: bool
    code: int = ERROR


class Meeting:
    """Decides who trains in which generation, from what the launchers say; knows no network."""

    def __init__(
        self,
        party: Party,
        limits: Limits,
        open_store: Callable[[], Any],
        memory: Memory,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._party, self._limits = party, limits
        self._open_store, self._clock = open_store, clock
        self._memory = memory
        self._id, self._number, self._failures = secrets.token_hex(4), 0, 0
        self._seen: dict[str, Seen] = {}
        dropped = memory.read()
        self._dropped, self._begun = set(dropped or ()), dropped is not None
        self._causes: list[Cause] = []
        self._generation: Generation | None = None
        self._proven = False
        self._since = clock()
        self._lock = threading.Lock()
        self._told: set[str] = set()
        self.ended: tuple[int, str] | None = None

    def hear(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to what a launcher says: what it has to do now."""
        with self._lock:
            name, run = str(message.get("node")), message.get("run")
            if run != self._party.run:
                return _leave(ERROR, f"run {self._party.run} meets here, and not {run}")
            if name not in self._party.nodes:
                known = ", ".join(self._party.nodes)
                return _leave(BAD_COMMAND, f"no node {name!r} in this run — it has {known}")
            if name in self._dropped:
                return _leave(OK, _refusal(name))
            if self.ended is None:
                self._take(name, message)
                self._advance()
            answer = self._answer(name)
            if answer["do"] == LEAVE:
                self._told.add(name)
            return answer

    def all_told(self) -> bool:
        """Whether every node that is still there has been told of the end."""
        with self._lock:
            now = self._clock()
            there = {n for n, s in self._seen.items() if now - s.heard < self._limits.silent}
            return self._told >= there - self._dropped

    def _take(self, name: str, message: Mapping[str, Any]) -> None:
        """Note what a node says, and what it means for the generation that runs."""
        said = Seen(
            self._clock(),
            int(message["slots"]),
            str(message["launcher"]),
            str(message["state"]),
            str(message["generation"]),
        )
        before, self._seen[name] = self._seen.get(name), said
        generation = self._generation
        if generation is None:
            if before is not None and before.launcher != said.launcher:
                self._causes.append(_restarted(name))
            if said.state == FAILED and said.generation == self._key():
                self._causes.append(_cause(message))  # of the last one's: it comes a little later
            return
        if said.launcher != generation.launchers[name]:
            self._stop(_restarted(name))
        elif said.generation == generation.key and said.state == FINISHED:
            generation.finished.add(name)
        elif said.generation == generation.key and said.state == FAILED:
            if generation.done is None:
                self._stop(_cause(message))
            elif name not in generation.finished:
                generation.finished.add(name)
                say(f"{message['cause']}, after the first node's ranks had ended well")

    def _advance(self) -> None:
        generation, now = self._generation, self._clock()
        if generation is None:
            self._gather(now)
            return
        members = {place.node for place in generation.places}
        silent = [n for n in members if now - self._seen[n].heard > self._limits.silent]
        if generation.probe:
            if generation.finished == members:
                self._proven = True
                self._close()
                return
        elif generation.done is None and self._party.first in generation.finished:
            generation.done = now
        if generation.done is not None:
            late = sorted(members - generation.finished)
            if not late or now - generation.done > self._limits.follow:
                rest = f"; {', '.join(late)} did not end in time" if late else ""
                self._end(OK, f"all ranks have ended well{rest}")
        elif silent:
            self._stop(
                Cause(
                    f"node {', '.join(sorted(silent))} has not answered for "
                    f"{self._limits.silent:.0f} s",
                    explains=True,
                )
            )

    def _gather(self, now: float) -> None:
        """Start the next generation once all nodes are ready that can be expected."""
        expected = [name for name in self._party.nodes if name not in self._dropped]
        missing = [name for name in expected if not self._is_ready(name, now)]
        lost = [name for name in missing if self._begun and self._is_lost(name, now)]
        if missing and (
            lost != missing
            or self._party.first in missing
            or len(expected) - len(missing) < self._party.min_nodes
        ):
            if now - self._since > self._limits.assemble:
                self._end(ERROR, self._nobody(missing))
            return
        if missing:
            gone = f"node {', '.join(missing)} is gone"
            self._causes.insert(0, Cause(gone, explains=True))
        if self._causes:
            self._failures += 1
            cause = next((cause for cause in self._causes if cause.explains), self._causes[0])
            if cause.code == BAD_COMMAND:
                self._end(BAD_COMMAND, f"{cause.text} — wrong arguments are not tried again")
                return
            if self._failures > self._limits.restarts:
                tries = f"given up after {self._limits.restarts} restarts"
                self._end(ERROR, f"{tries}, the last because {cause.text}")
                return
            say(f"all ranks start again ({self._failures}/{self._limits.restarts}): {cause.text}")
        if missing:
            self._drop(missing)
        self._start([name for name in expected if name not in missing])

    def _is_ready(self, name: str, now: float) -> bool:
        seen = self._seen.get(name)
        ready = seen is not None and seen.state == READY
        return ready and now - self._seen[name].heard <= self._limits.silent

    def _is_lost(self, name: str, now: float) -> bool:
        """Whether a node has been silent for so long that it is left out."""
        seen = self._seen.get(name)
        return now - (seen.heard if seen else self._since) > self._limits.drop

    def _nobody(self, missing: list[str]) -> str:
        names, few = ", ".join(missing), ""
        if self._begun and self._party.min_nodes < len(self._party.nodes):
            few = f", and at least {self._party.min_nodes} nodes are needed"
        return f"node {names} did not come within {self._limits.assemble:.0f} s{few}"

    def _drop(self, names: list[str]) -> None:
        self._dropped.update(names)
        silence = f"silent for {self._limits.drop:.0f} s"
        say(f"training goes on without node {', '.join(names)}, {silence}")

    def _start(self, names: list[str]) -> None:
        slots = {name: self._seen[name].slots for name in names}
        made = places(slots)
        self._number += 1
        self._begun, self._causes = True, []
        self._memory.write(sorted(self._dropped))
        self._generation = Generation(
            key=self._key(),
            places=made,
            store=self._open_store(),
            probe=not self._proven and len(made) > 1,
            launchers={name: self._seen[name].launcher for name in names},
        )
        what = "all-reduce" if self._generation.probe else "program"
        say(f"generation {self._number}: {what}, {len(made)} ranks on {', '.join(names)}")

    def _key(self) -> str:
        """What the newest generation is called; no two meetings have one in common."""
        return f"{self._id}.{self._number}"

    def _stop(self, cause: Cause) -> None:
        """End the generation that runs, because of something."""
        assert self._generation is not None
        generation = self._generation
        away = [p for p in generation.places if p.rank not in generation.store.arrived()]
        if away:
            ranks = ", ".join(f"rank {place.rank} on node {place.node}" for place in away)
            cause.text = f"{cause.text}; not arrived: {ranks}"
        self._causes.append(cause)
        self._close()

    def _close(self) -> None:
        assert self._generation is not None
        self._generation.store.close()
        self._generation, self._since = None, self._clock()

    def _end(self, code: int, text: str) -> None:
        self.ended = (code, text)

    def _answer(self, name: str) -> dict[str, Any]:
        if self.ended is not None:
            return _leave(*self.ended)
        generation, seen = self._generation, self._seen[name]
        if generation is None:
            return {"do": WAIT if seen.state == READY else STOP}
        if seen.state != READY:
            return {"do": GO_ON if seen.generation == generation.key else STOP}
        seen.state = RUNNING  # as it will say; what it has said does not count for the next one
        own = [vars(place) for place in generation.places if place.node == name]
        return {
            "do": START,
            "generation": generation.key,
            "store": generation.store.port,
            "probe": generation.probe,
            "places": own,
        }


def _leave(code: int, text: str) -> dict[str, Any]:
    return {"do": LEAVE, "code": code, "text": text}


def _refusal(name: str) -> str:
    return (
        f"node {name} was left out of this run when it was silent for too long, and re-joining is "
        "refused: Horovod hung when a lost node came back — training goes on without it"
    )


def _cause(message: Mapping[str, Any]) -> Cause:
    code = int(message.get("code") or ERROR)
    return Cause(str(message.get("cause")), explains=code < 0 or code == BAD_COMMAND, code=code)


def _restarted(name: str) -> Cause:
    return Cause(f"the launcher on node {name} was started again", explains=True)


class Memory:
    """Which nodes were left out, in a file: the first node's launcher may be started again.

    The file is there once all nodes have met.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def read(self) -> list[str] | None:
        """The names, None before the first generation, or without a file."""
        if self._path is None:
            return None
        try:
            return [str(name) for name in json.loads(self._path.read_text(encoding="utf-8"))]
        except (OSError, ValueError, TypeError):
            return None

    def write(self, names: list[str]) -> None:
        """Keep the names; without a place for them training goes on all the same."""
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(json.dumps(names), encoding="utf-8")
        except OSError as error:
            say(f"{self._path} not written: {error.strerror}")


class MeetingHandler(QuietHandler):
    """The meeting's one verb."""

    def do_POST(self) -> None:
        try:
            answer = self.server.owner.hear(json.loads(self.body()))  # type: ignore[attr-defined]
        except (ValueError, KeyError, TypeError, AttributeError):
            self.reply(400)
            return
        self.reply(200, json.dumps(answer).encode())


# --- each node's own part ------------------------------------------------------------------------


Ask = Callable[[Mapping[str, Any]], "dict[str, Any] | None"]


def ask_over_http(address: str, port: int) -> Ask:
    """A function that asks the meeting elsewhere; None is that it does not answer."""

    def ask(message: Mapping[str, Any]) -> dict[str, Any] | None:
        connection = http.client.HTTPConnection(address, port, timeout=ASK_TIMEOUT_S)
        try:
            connection.request("POST", "/", json.dumps(message))
            response = connection.getresponse()
            body = response.read()
            return json.loads(body) if response.status == http.client.OK else None
        except (OSError, ValueError, http.client.HTTPException):
            return None
        finally:
            connection.close()

    return ask


class Ranks:
    """This node's ranks of one generation, each in a process group of its own."""

    def __init__(self, words: list[str], address: str, answer: Mapping[str, Any]) -> None:
        self.key = str(answer["generation"])
        self.probe = bool(answer["probe"])
        words = [sys.executable, "-u", __file__, "--probe"] if self.probe else words
        self._places = [Place(**place) for place in answer["places"]]
        self._processes = [
            subprocess.Popen(
                # A rank must not outlive a launcher that was killed.
                ["setpriv", "--pdeathsig", "KILL", *words],
                env=rank_environment(os.environ, place, address, int(answer["store"])),
                start_new_session=True,
            )
            for place in self._places
        ]

    def state(self) -> tuple[str, int, str]:
        """RUNNING, FINISHED or FAILED; the exit code (-9: killed by signal 9), and the cause."""
        codes = [process.poll() for process in self._processes]
        for place, code in zip(self._places, codes):
            if code:
                hint = loopback_hint() if code == -signal.SIGABRT and place.cross_size > 1 else ""
                return FAILED, code, f"rank {place.rank} on node {place.node} {told(code)}{hint}"
        return (FINISHED if None not in codes else RUNNING), OK, ""

    def ask_to_end(self) -> None:
        """Send SIGTERM, at which a program may save."""
        self._signal(signal.SIGTERM)

    def stop(self, kill_after: float) -> None:
        """End them: ask first, then kill."""
        end = time.monotonic() + kill_after
        self.ask_to_end()
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=max(0.0, end - time.monotonic()))
        self._signal(signal.SIGKILL)  # what they have started, too
        for process in self._processes:
            process.wait()

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)


def told(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def loopback_hint() -> str:
    """What to do where this node's name means loopback; nothing elsewhere.

    Horovod 0.28.1 opens its second set of connections at the address of the host's name, whatever
    HOROVOD_GLOO_IFACE says (`gloo_iface_` in gloo_context.cc, InitializeForProcessSet), and aborts
    when the others cannot reach it.
    """
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        return f" — {name} has no address: write the node's into /etc/hosts"
    if not address.startswith("127."):
        return ""
    return f" — {name} is {address}, which others cannot reach: correct /etc/hosts"


def rank_environment(
    own: Mapping[str, str], place: Place, address: str, store: int
) -> dict[str, str]:
    """What a rank finds in its environment; settings that are there already stay."""
    return {
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_TIMEOUT_SECONDS": str(GLOO_TIMEOUT_S),
        **own,
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": address,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(store),
        "HOROVOD_HOSTNAME": place.node,
        "HOROVOD_RANK": str(place.rank),
        "HOROVOD_SIZE": str(place.size),
        "HOROVOD_LOCAL_RANK": str(place.local_rank),
        "HOROVOD_LOCAL_SIZE": str(place.local_size),
        "HOROVOD_CROSS_RANK": str(place.cross_rank),
        "HOROVOD_CROSS_SIZE": str(place.cross_size),
    }


class Launcher:
    """One node's part in the run: `follow` returns the exit code."""

    def __init__(
        self, party: Party, node: str, slots: int, words: list[str], limits: Limits
    ) -> None:
        self._party, self._node, self._slots = party, node, slots
        self._words, self._limits = words, limits
        self._id = secrets.token_hex(4)
        self._ranks: Ranks | None = None
        self._stopped = threading.Event()

    def stop(self) -> None:
        """Make `follow` end the ranks and return soon."""
        self._stopped.set()

    def follow(self, ask: Ask) -> int:
        """Do what the meeting says until it says to leave."""
        told, asked, answered, began = "", 0.0, time.monotonic(), time.monotonic()
        try:
            while not self._stopped.is_set():
                message = self._message()
                now = time.monotonic()
                if message["state"] == told and now - asked < self._limits.ask:
                    self._stopped.wait(LOOK_S)
                    continue
                told, asked = message["state"], now
                answer = ask(message)
                if answer is not None:
                    answered = began = time.monotonic()
                    if answer["do"] == LEAVE:
                        say(answer["text"])
                        return int(answer["code"])
                    self._obey(answer)
                elif message["state"] == FINISHED and now - answered > self._limits.silent / 3:
                    return OK  # the first node has ended, as it does when all is done
                elif self._ranks and now - answered > self._limits.silent:
                    say(f"the first node at {self._party.address} does not answer: ranks are ended")
                    self._end_ranks()
                    began = time.monotonic()
                elif now - began > self._limits.assemble:
                    say(
                        f"the first node at {self._party.address} has not answered for "
                        f"{self._limits.assemble:.0f} s — look at its task's log"
                    )
                    return ERROR
            self._let_ranks_save(ask)
            return 128 + signal.SIGTERM
        finally:
            self._end_ranks()

    def _let_ranks_save(self, ask: Ask) -> None:
        """Pass SIGTERM on, and wait while this node's ranks save.

        They need all others for it. So the meeting is told on that they run, else it would take
        this node for lost and end those; what it answers changes nothing any more.
        """
        if self._ranks is None:
            return
        self._ranks.ask_to_end()
        end, told = time.monotonic() + self._limits.save, 0.0
        while (message := self._message())["state"] == RUNNING and time.monotonic() < end:
            if time.monotonic() - told >= self._limits.ask:
                ask(message)
                told = time.monotonic()
            time.sleep(LOOK_S)

    def _message(self) -> dict[str, Any]:
        state, code, cause = self._ranks.state() if self._ranks else (READY, OK, "")
        return {
            "run": self._party.run,
            "node": self._node,
            "slots": self._slots,
            "launcher": self._id,
            "generation": self._ranks.key if self._ranks else "",
            "state": state,
            "code": code,
            "cause": cause,
        }

    def _obey(self, answer: Mapping[str, Any]) -> None:
        if answer["do"] == STOP:
            self._end_ranks()
        elif answer["do"] == START and self._ranks is None:
            self._ranks = Ranks(self._words, self._party.address, answer)

    def _end_ranks(self) -> None:
        if self._ranks is not None:
            self._ranks.stop(self._limits.kill_after)
            self._ranks = None


# --- the proof before training -------------------------------------------------------------------


def probe() -> None:
    """Sum numbers over all ranks, check the sums, and tell the bandwidth of it."""
    hvd, tensor, check = _framework()
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    took = []
    for round_ in range(1 + PROBE_ROUNDS):  # the first one sets buffers up
        began = time.monotonic()
        total = hvd.allreduce(tensor(float(rank + round_)), op=hvd.Sum, name="mayfly.probe")
        took.append(time.monotonic() - began)
        expected = sum(range(size)) + size * round_
        if not check(total, float(expected)):
            raise SystemExit(f"all-reduce on rank {rank} is wrong: expected {expected} — a bug?")
    if rank == 0:
        seconds, mb = sorted(took[1:])[PROBE_ROUNDS // 2], PROBE_FLOATS * 4 / 1e6
        # Each rank sends and receives this much in a ring: NCCL's "bus bandwidth".
        moved = 2 * (size - 1) / size * mb
        say(
            f"all-reduce of {mb:.1f} MB over {size} ranks: {seconds * 1e3:.1f} ms, "
            f"{moved / seconds:.0f} MB/s through each rank"
        )
    hvd.shutdown()
    sys.stdout.flush()
    os._exit(OK)  # nothing of the framework's is worth the wait


def _framework() -> tuple[Any, Callable[[float], Any], Callable[[Any, float], bool]]:
    """Horovod for what it was built for: the module, how tensors are made, how they are checked."""
    package = Path(importlib.import_module("horovod").__path__[0])
    if list(package.glob("torch/mpi_lib*.so")):
        torch = importlib.import_module("torch")
        return (
            importlib.import_module("horovod.torch"),
            lambda value: torch.full((PROBE_FLOATS,), value),
            lambda tensor, value: bool((tensor == value).all()),
        )
    if list(package.glob("tensorflow/mpi_lib*.so")):
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
        tensorflow = importlib.import_module("tensorflow")
        return (
            importlib.import_module("horovod.tensorflow"),
            lambda value: tensorflow.fill((PROBE_FLOATS,), value),
            lambda tensor, value: bool((tensor.numpy() == value).all()),
        )
    raise SystemExit(f"{package} was built for no framework — build it for PyTorch or TensorFlow")


# --- the command ---------------------------------------------------------------------------------


def say(text: str) -> None:
    """One line in the task's log."""
    with contextlib.suppress(OSError):
        print(f"horovod: {text}", flush=True)


def parse_args(argv: list[str]) -> argparse.Namespace:
    """The command line; what follows `--` is the program."""
    words: list[str] = []
    if "--" in argv:
        place = argv.index("--")
        argv, words = argv[:place], argv[place + 1 :]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--run", required=True, help="its name: launchers of others are sent away")
    parser.add_argument(
        "--node", required=True, action="append", help="NAME=ADDRESS, once for each, in rank order"
    )
    parser.add_argument("--me", required=True, help="this node's name")
    parser.add_argument("--port", type=int, required=True, help="the first node listens on it")
    parser.add_argument("--slots", type=int, default=1, help="ranks on this node")
    parser.add_argument(
        "--min-nodes", type=int, help="go on with so few when others are lost (all)"
    )
    parser.add_argument("--memory", type=Path, help="file of the nodes that were left out")
    for name, value in vars(Limits()).items():
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=type(value), default=value, help=f"({value})")
    args = parser.parse_args(argv)
    args.nodes = dict(node.partition("=")[::2] for node in args.node)
    args.words = words
    if args.me not in args.nodes:
        parser.error(f"no --node {args.me}=ADDRESS: this node is not in the run")
    if not words:
        parser.error("no program: write it after --")
    return args


def main(argv: list[str]) -> int:
    """Take part in a run, and keep its meeting on the first node; returns the exit code."""
    args = parse_args(argv)
    limits = Limits(**{name: getattr(args, name) for name in vars(Limits())})
    few = len(args.nodes) if args.min_nodes is None else args.min_nodes
    party = Party(args.run, args.nodes, few)
    launcher = Launcher(party, args.me, args.slots, args.words, limits)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: launcher.stop())
    if args.me != party.first:
        return launcher.follow(ask_over_http(party.address, args.port))
    meeting = Meeting(party, limits, lambda: Store(party.address), Memory(args.memory))
    try:
        server = serve(party.address, args.port, MeetingHandler, meeting)
    except OSError as error:
        where = f"{party.address}:{args.port}"
        say(f"cannot listen on {where}: {error.strerror} — free the port, or give our own address")
        return ERROR
    code = launcher.follow(meeting.hear)
    end = time.monotonic() + limits.silent / 3
    while meeting.ended and not meeting.all_told() and time.monotonic() < end:
        time.sleep(LOOK_S)
    server.shutdown()
    return code


if __name__ == "__main__":
    # The modules beside this one must not hide others of their names.
    sys.path[:] = [path for path in sys.path if Path(path) != Path(__file__).parent]
    if sys.argv[1:] == ["--probe"]:
        probe()
    sys.exit(main(sys.argv[1:]))
