"""Horovod's launcher: who gets which rank, the store, the meeting, and whole runs of fake ranks.

Horovod itself is not among the tools for tests: here a rank is a small script.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from mayfly_train import horovod_launch
from mayfly_train.horovod_launch import (
    FAILED,
    FINISHED,
    GO_ON,
    LEAVE,
    READY,
    RUNNING,
    START,
    STOP,
    WAIT,
    Limits,
    Meeting,
    Memory,
    Party,
    Place,
    Store,
    places,
    rank_environment,
    told,
)


def test_each_slot_has_a_place_node_by_node():
    assert places({"a": 2, "b": 1}) == [
        Place("a", 0, 3, 0, 2, 0, 2),
        Place("a", 1, 3, 1, 2, 0, 1),
        Place("b", 2, 3, 0, 1, 1, 2),
    ]


@pytest.mark.parametrize("slots", [{"a": 1}, {"a": 1, "b": 3, "c": 2}, dict.fromkeys("abcdef", 4)])
def test_ranks_are_dense_and_each_way_to_count_them_is_consistent(slots):
    made = places(slots)
    assert [place.rank for place in made] == list(range(sum(slots.values())))
    for node, own in slots.items():
        assert [p.local_rank for p in made if p.node == node] == list(range(own))
    for local in range(max(slots.values())):
        across = [p for p in made if p.local_rank == local]
        assert [p.cross_rank for p in across] == list(range(len(across)))
        assert {p.cross_size for p in across} == {len(across)}


def test_a_rank_finds_its_place_and_the_store_and_keeps_settings_that_are_there():
    own = {"HOROVOD_GLOO_IFACE": "eth1", "HOROVOD_GLOO_TIMEOUT_SECONDS": "7", "HOROVOD_RANK": "9"}
    made = rank_environment(own, Place("n3", 1, 2, 0, 1, 1, 2), "10.0.0.2", 40001)
    assert made == {
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_IFACE": "eth1",
        "HOROVOD_GLOO_TIMEOUT_SECONDS": "7",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.2",
        "HOROVOD_GLOO_RENDEZVOUS_PORT": "40001",
        "HOROVOD_HOSTNAME": "n3",
        "HOROVOD_RANK": "1",
        "HOROVOD_SIZE": "2",
        "HOROVOD_LOCAL_RANK": "0",
        "HOROVOD_LOCAL_SIZE": "1",
        "HOROVOD_CROSS_RANK": "1",
        "HOROVOD_CROSS_SIZE": "2",
    }


def test_exit_codes_in_words():
    assert told(3) == "ended with exit code 3"
    assert told(-9) == "was killed by SIGKILL"
    assert told(-99) == "was killed by signal 99"


@pytest.mark.parametrize(
    ("address", "hint"),
    [
        ("127.0.1.1", " — n2 is 127.0.1.1, which others cannot reach: correct /etc/hosts"),
        ("10.0.0.2", ""),
        (None, " — n2 has no address: write the node's into /etc/hosts"),
    ],
)
def test_a_name_that_means_loopback_is_told(monkeypatch, address, hint):
    def lookup(_name: str) -> str:
        if address is None:
            raise OSError
        return address

    monkeypatch.setattr(horovod_launch.socket, "gethostname", lambda: "n2")
    monkeypatch.setattr(horovod_launch.socket, "gethostbyname", lookup)
    assert horovod_launch.loopback_hint() == hint


# --- the store ---------------------------------------------------------------------------------


@pytest.fixture
def store() -> Any:
    made = Store("127.0.0.1")
    yield made
    made.close()


def request(store: Store, verb: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", store.port, timeout=5)
    connection.request(verb, path, body)
    response = connection.getresponse()
    return response.status, response.read()


def test_the_store_keeps_bytes_by_scope_and_key(store):
    assert request(store, "GET", "/global/0") == (404, b"")
    assert request(store, "PUT", "/global/0", b"\x00\xff") == (200, b"")
    assert request(store, "GET", "/global/0") == (200, b"\x00\xff")
    assert request(store, "GET", "/local_n2/0") == (404, b"")


def test_the_store_knows_which_ranks_have_arrived(store):
    for path in ("/global/0", "/global/rank_1", "/global/3", "/local_n2/2"):
        request(store, "PUT", path, b"x")
    assert store.arrived() == {0, 3}


def test_a_scope_is_emptied_when_all_have_left_it_so_that_it_serves_again(store):
    for path in ("/global/rank_0", "/global/0", "/global/rank_1", "/global/1"):
        request(store, "PUT", path, b"x")
    request(store, "DELETE", "/global/0")
    assert request(store, "GET", "/global/0")[0] == 200
    request(store, "DELETE", "/global/1")
    assert request(store, "GET", "/global/0")[0] == 404
    assert store.arrived() == {0, 1}


# --- the meeting -------------------------------------------------------------------------------


class FakeStore:
    """A generation's store that counts and listens nowhere."""

    def __init__(self) -> None:
        self.port, self.ranks, self.closed = 5, {0, 1, 2, 3, 4, 5}, False

    def arrived(self) -> set[int]:
        return self.ranks

    def close(self) -> None:
        self.closed = True


class Room:
    """A meeting of nodes a, b, c with a clock of its own; `says` is one launcher's message."""

    def __init__(self, path: Path | None = None, nodes: str = "abc", min_nodes: int = 1) -> None:
        self.now, self.stores = 1000.0, []
        addresses = {name: f"10.0.0.{place}" for place, name in enumerate(nodes)}
        self.party = Party("run", addresses, min_nodes)
        self.meeting = Meeting(self.party, Limits(), self.open, Memory(path), lambda: self.now)

    def open(self) -> FakeStore:
        self.stores.append(FakeStore())
        return self.stores[-1]

    def says(self, node: str, state: str = READY, generation: str = "", **more: Any) -> dict:
        message = {"run": "run", "node": node, "slots": 1, "launcher": f"L{node}", "state": state}
        return self.meeting.hear({**message, "generation": generation, **more})

    def all_say(self, state: str = READY, generation: str = "", nodes: str = "abc") -> list[dict]:
        return [self.says(node, state, generation) for node in nodes]

    def starts(self, nodes: str = "abc") -> dict:
        """All meet; the answer that the first one gets."""
        self.all_say(nodes=nodes)
        answers = self.all_say(nodes=nodes)
        assert [answer["do"] for answer in answers] == [START] * len(nodes)
        return answers[0]

    def proves(self, nodes: str = "abc") -> dict:
        """All meet and have made the all-reduce; the answer that starts the program."""
        key = self.starts(nodes)["generation"]
        self.all_say(RUNNING, key, nodes)
        self.all_say(FINISHED, key, nodes)
        return self.starts(nodes)


def test_the_first_generation_makes_an_all_reduce_and_the_second_trains():
    room = Room()
    assert [answer["do"] for answer in room.all_say(nodes="ab")] == [WAIT, WAIT]
    first = room.starts()
    assert first["probe"] and first["store"] == 5
    assert [place["rank"] for place in first["places"]] == [0]
    key = first["generation"]
    assert [answer["do"] for answer in room.all_say(RUNNING, key)] == [GO_ON] * 3
    assert [answer["do"] for answer in room.all_say(FINISHED, key)] == [GO_ON, GO_ON, STOP]
    second = room.starts()
    assert not second["probe"] and second["generation"] != key
    assert [store.closed for store in room.stores] == [True, False]


def test_one_rank_alone_needs_no_all_reduce():
    room = Room(nodes="a")
    assert not room.starts("a")["probe"]


def test_the_end_is_told_to_all(capsys):
    room = Room()
    key = room.proves()["generation"]
    room.all_say(FINISHED, key, "ab")
    assert room.says("c", RUNNING, key)["do"] == GO_ON
    answers = room.all_say(FINISHED, key, "cab")
    assert [answer["do"] for answer in answers] == [LEAVE] * 3
    assert answers[0]["code"] == 0 and room.meeting.all_told()


def test_who_does_not_end_in_time_is_named_and_spoils_nothing():
    room = Room()
    key = room.proves()["generation"]
    room.all_say(FINISHED, key, "ab")
    assert room.says("c", FAILED, key, code=1, cause="rank 2 ended")["do"] == LEAVE
    room = Room()
    key = room.proves()["generation"]
    room.all_say(FINISHED, key, "ab")
    room.now += 21
    answer = room.says("a", FINISHED, key)
    assert (answer["do"], answer["code"]) == (LEAVE, 0)
    assert "c did not end in time" in answer["text"]


def test_a_killed_rank_makes_a_new_generation_and_is_the_cause_whoever_tells_first(capsys):
    room = Room()
    key = room.proves()["generation"]
    room.all_say(RUNNING, key)
    answer = room.says("a", FAILED, key, code=1, cause="rank 0 on node a ended with exit code 1")
    assert answer["do"] == STOP
    assert room.says("b", FAILED, key, code=-9, cause="rank 1 on node b was killed by SIGKILL")
    assert room.says("c", RUNNING, key)["do"] == STOP
    assert not room.starts()["probe"]
    told_ = capsys.readouterr().out
    assert "all ranks start again (1/3): rank 1 on node b was killed by SIGKILL\n" in told_


def test_a_rank_that_never_came_is_named():
    room = Room()
    first = room.starts()
    room.stores[-1].ranks = {0, 2}
    for _ in range(4):
        room.says("a", FAILED, first["generation"], code=1, cause="rank 0 ended with exit code 1")
        answers = room.all_say() + room.all_say()
        first = answers[-1]
        if room.stores:
            room.stores[-1].ranks = {0, 2}
    assert first["do"] == LEAVE and first["code"] == 1
    assert first["text"] == (
        "given up after 3 restarts, the last because rank 0 ended with exit code 1; "
        "not arrived: rank 1 on node b"
    )


def test_wrong_arguments_are_not_tried_again():
    room = Room()
    key = room.proves()["generation"]
    room.says("b", FAILED, key, code=2, cause="rank 1 on node b ended with exit code 2")
    answer = (room.all_say() + room.all_say())[-1]
    assert (answer["do"], answer["code"]) == (LEAVE, 2)


def test_a_launcher_that_was_started_again_ends_the_generation(capsys):
    room = Room()
    key = room.proves()["generation"]
    assert room.says("b", READY, launcher="L2")["do"] == WAIT
    assert room.says("a", RUNNING, key)["do"] == STOP
    room.says("b", READY, launcher="L2")
    room.all_say(nodes="ac")
    assert room.says("b", READY, launcher="L2")["do"] == START
    assert "the launcher on node b was started again" in capsys.readouterr().out


def test_it_is_the_cause_even_when_its_end_was_told_by_others_first(capsys):
    room = Room()
    key = room.proves()["generation"]
    room.says("a", FAILED, key, code=1, cause="rank 0 on node a ended with exit code 1")
    room.all_say(nodes="ac")
    room.says("b", READY, launcher="L2")
    assert "(1/3): the launcher on node b was started again" in capsys.readouterr().out


def test_a_node_that_is_lost_is_left_out_and_not_let_in_again(tmp_path, capsys):
    room = Room(tmp_path / "m.json")
    key = room.proves()["generation"]
    room.now += 14
    assert [answer["do"] for answer in room.all_say(RUNNING, key, "ab")] == [GO_ON, GO_ON]
    room.now += 2
    assert [answer["do"] for answer in room.all_say(RUNNING, key, "ab")] == [STOP, STOP]
    assert [answer["do"] for answer in room.all_say(nodes="ab")] == [WAIT, WAIT]
    room.now += 15
    answers = room.all_say(nodes="ab") + room.all_say(nodes="ab")
    assert [place["size"] for place in answers[-1]["places"]] == [2]
    refused = room.says("c")
    assert (refused["do"], refused["code"]) == (LEAVE, 0)
    assert "re-joining is refused" in refused["text"]
    told_ = capsys.readouterr().out
    assert "all ranks start again (1/3): node c is gone" in told_
    assert "training goes on without node c, silent for 30 s" in told_
    again = Room(tmp_path / "m.json")  # the first node's launcher was started again
    assert [answer["do"] for answer in again.all_say(nodes="ab")] == [WAIT, START]


def test_fewer_nodes_than_said_are_waited_for_and_then_named(tmp_path):
    room = Room(min_nodes=3)
    room.proves()
    answers = []
    for _ in range(65):
        room.now += 10
        answers += room.all_say(nodes="ab")
    assert {answer["do"] for answer in answers[10:120]} == {WAIT}
    answer = answers[-1]
    assert (answer["do"], answer["code"]) == (LEAVE, 1)
    assert answer["text"] == "node c did not come within 600 s"


def test_no_node_is_left_out_before_all_have_met():
    room = Room()
    room.all_say(nodes="ab")
    room.now += 100
    assert [answer["do"] for answer in room.all_say(nodes="ab")] == [WAIT, WAIT]


@pytest.mark.parametrize(
    ("message", "code", "text"),
    [
        ({"run": "other"}, 1, "run run meets here, and not other"),
        ({"node": "x"}, 2, "no node 'x' in this run — it has a, b, c"),
    ],
)
def test_strangers_are_sent_away(message, code, text):
    said = {"run": "run", "node": "a", **message}
    assert Room().meeting.hear(said) == {"do": LEAVE, "code": code, "text": text}


def test_ranks_of_a_meeting_that_is_no_more_are_ended():
    room = Room()
    assert room.says("b", RUNNING, "older.3")["do"] == STOP
    assert room.says("b", FAILED, "older.3", code=1, cause="x")["do"] == STOP
    assert room.starts()["do"] == START  # and are no reason to count a restart


# --- whole runs of fake ranks --------------------------------------------------------------------

RANK = """
import os, pathlib, sys, time
rank, size = os.environ["HOROVOD_RANK"], os.environ["HOROVOD_SIZE"]
start = pathlib.Path(sys.argv[1], f"{rank}-{os.environ['HOROVOD_GLOO_RENDEZVOUS_PORT']}")
start.write_text(f"{os.getpid()} {size}")
time.sleep(float(sys.argv[2]))
"""
QUICK = {"ask": 0.1, "silent": 2, "drop": 4, "assemble": 20, "kill_after": 1, "follow": 2}
# The all-reduce needs Horovod: here it is the end of a rank that has nothing to do.
WITHOUT_PROBE = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("launcher", sys.argv.pop(1))
launcher = importlib.util.module_from_spec(spec)
sys.modules["launcher"] = launcher
spec.loader.exec_module(launcher)
launcher.__file__ = sys.argv.pop(1)
sys.exit(launcher.main(sys.argv[1:]))
"""


class Nodes:
    """Launchers on addresses of loopback, one process each."""

    def __init__(self, directory: Path, seconds: float, restarts: int = 3) -> None:
        self.directory, self.port = directory, free_port()
        (directory / "rank.py").write_text(RANK)
        (directory / "nothing.py").write_text("")
        (directory / "main.py").write_text(WITHOUT_PROBE)
        self.words = [sys.executable, "rank.py", ".", str(seconds)]
        self.limits = {**QUICK, "restarts": restarts}
        self.launchers: dict[str, subprocess.Popen[str]] = {}

    def start(self, *names: str, nodes: str = "ab", min_nodes: int = 1) -> None:
        words = [sys.executable, "main.py", horovod_launch.__file__, "nothing.py", "--run", "r"]
        for place, name in enumerate(nodes):
            words += ["--node", f"{name}=127.0.0.{place + 1}"]
        words += ["--port", str(self.port), "--min-nodes", str(min_nodes), "--memory", "m.json"]
        words += [
            word for k, v in self.limits.items() for word in (f"--{k.replace('_', '-')}", str(v))
        ]
        for name in names:
            self.launchers[name] = subprocess.Popen(
                [*words, "--me", name, "--", *self.words],
                cwd=self.directory,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )

    def ranks(self, count: int, but: set[str] = frozenset()) -> dict[str, int]:
        """Process ids by the name that a rank has left, once there are so many new ones."""
        end = time.monotonic() + 20
        while time.monotonic() < end:
            files = {path.name: path for path in self.directory.glob("[0-9]*-*")}
            new = {
                name: path.read_text().split() for name, path in files.items() if name not in but
            }
            if len(new) == count and all(len(words) == 2 for words in new.values()):
                return {name: int(words[0]) for name, words in sorted(new.items())}
            time.sleep(0.05)
        raise AssertionError(f"no {count} ranks but {sorted(but)}: {files}")

    def ends(self, name: str) -> tuple[int, str]:
        output, _ = self.launchers[name].communicate(timeout=30)
        return self.launchers[name].returncode, output


@pytest.fixture
def nodes(tmp_path: Path) -> Any:
    made: list[Nodes] = []

    def make(*args: Any, **options: Any) -> Nodes:
        made.append(Nodes(tmp_path, *args, **options))
        return made[-1]

    yield make
    for process in (p for nodes in made for p in nodes.launchers.values()):
        process.kill()
        process.wait()


def free_port() -> int:
    with http.client.socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_two_nodes_train_to_the_end(nodes):
    run = nodes(0.3)
    run.start("a", "b")
    assert run.ends("a")[0] == run.ends("b")[0] == 0
    assert sorted(path.read_text().split()[1] for path in run.directory.glob("[01]-*")) == [
        "2",
        "2",
    ]


def test_a_killed_rank_is_told_and_all_start_again(nodes):
    run = nodes(2.5)
    run.start("a", "b")
    first = run.ranks(2)
    os.kill(list(first.values())[1], signal.SIGKILL)
    second = run.ranks(2, set(first))
    assert len({name.partition("-")[2] for name in second}) == 1  # a store of their own
    code, output = run.ends("a")
    assert code == 0 and run.ends("b")[0] == 0
    assert "all ranks start again (1/3): rank 1 on node b was killed by SIGKILL" in output


def test_a_node_that_is_lost_is_left_out_and_refused_when_it_comes_back(nodes):
    run = nodes(4)
    run.start("a", "b")
    first = run.ranks(2)
    run.launchers["b"].kill()
    run.launchers["b"].wait()
    (alone,) = run.ranks(1, set(first)).values()
    with pytest.raises(ProcessLookupError):  # a rank dies with its launcher
        os.kill(list(first.values())[1], 0)
    run.start("b")
    code, output = run.ends("b")
    assert code == 0 and "re-joining is refused" in output
    code, output = run.ends("a")
    assert code == 0 and "training goes on without node b" in output
    assert alone


def test_a_first_node_that_is_started_again_gathers_the_others(nodes):
    run = nodes(2.5)
    run.start("a", "b")
    first = run.ranks(2)
    run.launchers["a"].kill()
    run.launchers["a"].wait()
    run.start("a")
    run.ranks(2, set(first))
    assert run.ends("a")[0] == run.ends("b")[0] == 0


def test_a_first_node_that_does_not_come_is_told(nodes):
    run = nodes(1)
    run.limits["assemble"] = 1
    run.start("b")
    code, output = run.ends("b")
    assert code == 1 and "the first node at 127.0.0.1 has not answered for 1 s" in output


def test_a_port_in_use_is_told(nodes):
    run = nodes(1)
    with http.client.socket.socket() as other:
        other.bind(("127.0.0.1", run.port))
        other.listen()
        run.start("a")
        code, output = run.ends("a")
    assert code == 1 and f"cannot listen on 127.0.0.1:{run.port}: Address already in use" in output


def ends_with_its_rank(run):
    """The launcher of node a, and its only rank, when it is asked to."""
    (rank,) = run.ranks(1).values()
    run.launchers["a"].terminate()
    assert run.ends("a")[0] == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(rank, 0)


def test_the_launcher_ends_its_ranks_when_it_is_asked_to(nodes):
    run = nodes(30)
    run.start("a", nodes="a")
    ends_with_its_rank(run)


# Rank 0 saves once rank 1 has seen that it was asked to, as an all-reduce would have it.
SAVES = """
import os, pathlib, signal, sys, time
rank, here = os.environ["HOROVOD_RANK"], pathlib.Path(sys.argv[1])
signal.signal(signal.SIGTERM, lambda *_: (here / f"asked-{rank}").touch())
start = here / f"{rank}-{os.environ['HOROVOD_GLOO_RENDEZVOUS_PORT']}"
start.write_text(f"{os.getpid()} {os.environ['HOROVOD_SIZE']}")
while not (here / "asked-0").exists():
    time.sleep(0.02)
if rank == "0":
    time.sleep(float(sys.argv[2]))
    (here / "saved").touch()
while not (here / "saved").exists():
    time.sleep(0.02)
sys.exit(143)
"""


def test_the_launcher_waits_while_its_rank_saves_with_the_others(nodes):
    run = nodes(5)  # longer than a node may be silent, and than ranks have before a restart
    (run.directory / "rank.py").write_text(SAVES)
    run.limits["save"] = 60
    run.start("a", "b")
    run.ranks(2)
    run.launchers["a"].terminate()
    code, output = run.ends("a")
    assert code == 128 + signal.SIGTERM
    assert (run.directory / "saved").exists()
    assert not (run.directory / "asked-1").exists()  # nobody took the first node for lost
    assert "start again" not in output
    run.launchers["b"].terminate()
    assert run.ends("b")[0] == 128 + signal.SIGTERM


def test_a_rank_that_does_not_save_in_time_is_killed(nodes):
    run = nodes(600)
    (run.directory / "rank.py").write_text(SAVES)
    run.limits["save"] = 1
    run.start("a", nodes="a")
    ends_with_its_rank(run)


def test_the_meeting_answers_bad_messages_with_an_error():
    server = horovod_launch.serve("127.0.0.1", 0, horovod_launch.MeetingHandler, Room().meeting)
    port = server.server_address[1]
    for body in (b"", b"[]", b"{", json.dumps({"run": "run", "node": "a"}).encode()):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        connection.request("POST", "/", body)
        assert connection.getresponse().status == 400
    ask = horovod_launch.ask_over_http("127.0.0.1", port)
    assert ask({"run": "x"})["do"] == LEAVE
    server.shutdown()
    server.server_close()
    assert ask({"run": "x"}) is None
