from __future__ import annotations

import stat
from pathlib import Path

import pytest

from mayfly import access, remote
from mayfly.errors import UserError
from mayfly.im import Node
from mayfly.redact import Secret


def node(number: str, group: str, private: str, public: str | None = None, key: bool = False):
    secret = Secret(f"canary-{number}")
    return Node(
        number, group, "configured", f"{group}-{number}", public, private, "root",
        None if key else secret, secret if key else None,
    )  # fmt: skip


NODES = [
    node("2", "worker", "10.1.0.4"),
    node("1", "worker", "10.1.0.3"),
    node("0", "ps", "10.1.0.2", "192.0.2.7"),
]


@pytest.fixture(autouse=True)
def programs(monkeypatch):
    monkeypatch.setattr(remote.shutil, "which", lambda name: f"/usr/bin/{name}")


def test_nodes_are_named_by_their_place_in_the_group():
    named = remote.names(NODES)
    assert {name: n.private_ip for name, n in named.items()} == {
        "ps-0": "10.1.0.2",
        "worker-0": "10.1.0.3",
        "worker-1": "10.1.0.4",
    }


def test_an_unknown_node_names_the_nearest():
    with pytest.raises(UserError, match="worker-1"):
        remote.choose(NODES, "worker-7")
    assert remote.choose(NODES, None).private_ip == "10.1.0.3"


def test_a_password_is_in_a_closed_file_and_in_no_command_line():
    with remote.login(NODES, NODES[2]) as line:
        assert "canary" not in " ".join(line)
        secret = Path(line[line.index("-f") + 1])
        assert secret.read_text() == "canary-0\n"
        assert stat.S_IMODE(secret.stat().st_mode) == 0o600
        assert line[-1] == "root@192.0.2.7"
    assert not secret.exists()


def test_a_private_node_is_reached_through_the_public_one():
    with remote.login(NODES, NODES[0], command=["ls", "a b"]) as line:
        proxy = next(word for word in line if word.startswith("ProxyCommand="))
        assert "canary" not in " ".join(line)
        assert proxy.endswith("-W %h:%p root@192.0.2.7")
        assert line[-2:] == ["root@10.1.0.4", "ls 'a b'"]


def test_a_key_is_used_when_there_is_one():
    keyed = node("0", "ps", "10.1.0.2", "192.0.2.7", key=True)
    with remote.login([keyed], keyed) as line:
        key = Path(line[line.index("-i") + 1])
        assert key.read_text() == "canary-0\n"
        assert stat.S_IMODE(key.stat().st_mode) == 0o600


def test_a_missing_program_says_what_to_install(monkeypatch):
    monkeypatch.setattr(remote.shutil, "which", lambda name: None)
    with (
        pytest.raises(UserError, match="apt install openssh-client"),
        remote.login(NODES, NODES[0]),
    ):
        pass


@pytest.mark.parametrize(
    ("task", "where"),
    [
        ("chief-0", "worker-0"),
        ("evaluator-0", "worker-0"),
        ("worker-0", "worker-1"),
        ("ps-1", "ps-1"),
    ],
)
def test_each_task_has_its_node(task, where):
    assert access.node_of_task(task) == where
