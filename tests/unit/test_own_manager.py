"""ansible-playbook in IM's part: what it gets, what it tells, how it is ended, and logins."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import yaml
from tests.unit import own_fakes

from mayfly import remote
from mayfly.errors import RemoteError
from mayfly.own import manager, on_machine
from mayfly.own.manager import Machinist
from mayfly.own.playbook import environment
from mayfly.redact import Secret

CANARY = "canary-of-the-tests"
RUN = "faces-261128-100000-abcd"
VARIABLES = yaml.safe_dump({"trainer_run": RUN, "dataset_source": "s3://data/"})
SECRETS = {"AWS_SECRET_ACCESS_KEY": Secret(CANARY)}
INVENTORY = """
all:
  children:
    ps: {hosts: {p: }}
    worker: {hosts: {a: , b: }}
  vars: {ansible_connection: local, ansible_become: false}
"""
# Waits, so that there is time to look at its command line; its end has to be asked for.
PLAY = """
- name: Arm nothing
  hosts: worker
  gather_facts: false
  tasks:
    - name: Show what came by the environment
      ansible.builtin.assert:
        that: lookup('ansible.builtin.env', 'AWS_SECRET_ACCESS_KEY') | length == 19
        success_msg: "{{ trainer_run }} reads {{ dataset_source }}"
    - name: Sleep
      ansible.builtin.pause: {seconds: 3600}
"""


class FakePlaybook:
    """An ansible-playbook that remembers how it was started."""

    def __init__(self, words, environ):
        self.words, self.environ, self.ended = words, environ, None
        self.variables = Path(words[words.index("-e") + 1].removeprefix("@"))

    def code(self):
        return self.ended

    def output(self):
        return "TASK [mayfly.training.hadoop : Install Hadoop] ***\n"

    def stop(self):
        self.ended = -2


@pytest.fixture
def machinist(tmp_path, monkeypatch) -> Machinist:
    path, fake = own_fakes.make(tmp_path, monkeypatch)
    monkeypatch.setattr(manager.collection, "build", lambda *_: tmp_path / "x.tar.gz")
    monkeypatch.setattr(manager.collection, "install", lambda _: tmp_path / "installed")
    monkeypatch.setattr(manager, "Playbook", FakePlaybook)
    made = Machinist(path, {"PATH": "/bin"}, SECRETS, tmp_path)
    made.fake = fake
    return made


def test_keys_go_by_the_environment_and_nowhere_else(machinist, tmp_path):
    infrastructure = machinist.create(VARIABLES)
    book = machinist._book
    assert infrastructure == str(tmp_path / "hosts.ini")
    assert book.environ["AWS_SECRET_ACCESS_KEY"] == CANARY
    assert book.environ["ANSIBLE_COLLECTIONS_PATH"] == str(tmp_path / "installed")
    assert CANARY not in " ".join(book.words) + book.variables.read_text()
    assert book.words[-1] == "mayfly.training.site"
    assert book.variables.parent.stat().st_mode & 0o077 == 0
    claims = {(root / on_machine.CLAIM).read_text() for root in machinist.fake.roots.values()}
    assert claims == {RUN}


def test_nothing_is_started_where_another_run_is(machinist):
    (machinist.fake.roots["a"] / on_machine.CLAIM).write_text("another-run")
    with pytest.raises(Exception, match="in use by run another-run"):
        machinist.create(VARIABLES)
    assert machinist._book is None


def test_its_states_are_those_of_an_infrastructure(machinist):
    assert machinist.state("").infrastructure == "own"
    infrastructure = machinist.create(VARIABLES)
    assert machinist.state(infrastructure).nodes == dict.fromkeys("012", "running")
    assert "Install Hadoop" in machinist.messages(infrastructure)
    assert machinist.infrastructures() == [infrastructure]
    machinist._book.ended = 0
    assert machinist.state(infrastructure).infrastructure == "configured"
    assert machinist.infrastructures() == []
    machinist._book.ended = 2
    assert machinist.state(infrastructure).infrastructure == "unconfigured"


def test_to_destroy_it_is_to_end_the_playbooks(machinist):
    infrastructure = machinist.create(VARIABLES)
    machinist.destroy(infrastructure)
    assert machinist.infrastructures() == []


def test_logins_are_those_of_the_inventory(machinist, monkeypatch):
    hostvars = {
        "p": {"ansible_host": "192.0.2.9", "ansible_user": "me", "ansible_port": 2200},
        "a": {"ansible_host": "192.0.2.3", "ansible_ssh_private_key_file": "/keys/a"},
        "b": {"ansible_ssh_common_args": "-o ProxyJump=gate", "ansible_password": CANARY},
    }
    content = {
        "ps": {"hosts": ["p"]},
        "worker": {"hosts": ["a", "b"]},
        "_meta": {"hostvars": hostvars},
    }
    monkeypatch.setattr("mayfly.inventory.listed", lambda path: content)
    monkeypatch.setattr("mayfly.remote.shutil.which", lambda program: f"/usr/bin/{program}")
    nodes = machinist.nodes("")
    named = remote.names(nodes)
    assert {name: node.name for name, node in named.items()} == {
        "ps-0": "p",
        "worker-0": "a",
        "worker-1": "b",
    }
    with remote.login(nodes, named["ps-0"]) as line:
        assert line[:3] == ["ssh", "-p", "2200"] and line[-1] == "me@192.0.2.9"
        assert "StrictHostKeyChecking=no" not in line, "the user's own ssh decides"
    with remote.login(nodes, named["worker-0"]) as line:
        assert line[:3] == ["ssh", "-i", "/keys/a"] and line[-1] == "192.0.2.3"
    with remote.login(nodes, named["worker-1"]) as line:
        assert line[0] == "sshpass" and "ProxyJump=gate" in line
        assert CANARY not in " ".join(line)


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"ansible_connection": "local"}, "connection 'local', not ssh"),
        ({"ansible_host": "{{ groups.all[0] }}"}, "ansible_host is computed by Ansible"),
    ],
)
def test_a_login_that_only_ansible_can_make_is_told(machinist, monkeypatch, variables, says):
    content = {"worker": {"hosts": ["a"]}, "_meta": {"hostvars": {"a": variables}}}
    monkeypatch.setattr("mayfly.inventory.listed", lambda path: content)
    with pytest.raises(RemoteError, match=says):
        machinist.nodes("")


def test_hosts_are_checked_unless_the_user_says_otherwise():
    assert environment({})["ANSIBLE_HOST_KEY_CHECKING"] == "True"
    given = {"ANSIBLE_HOST_KEY_CHECKING": "False", "ANSIBLE_FORCE_COLOR": "1"}
    made = environment(given)
    assert made["ANSIBLE_HOST_KEY_CHECKING"] == "False"
    assert "ANSIBLE_FORCE_COLOR" not in made


def test_the_real_ansible_playbook_claims_plays_and_ends(tmp_path, monkeypatch):
    """On this machine, by connection local; its files are below tmp_path."""
    hosts, play, root = tmp_path / "hosts.yml", tmp_path / "site.yml", tmp_path / "root"
    hosts.write_text(INVENTORY)
    play.write_text(PLAY)
    (root / "run").mkdir(parents=True)
    script = Path(on_machine.__file__)
    (tmp_path / "on_machine.py").write_text(
        f"import runpy, sys\nsys.argv += ['--root', {str(root)!r}]\n"
        f"runpy.run_path({str(script)!r}, run_name='__main__')\n"
    )
    (tmp_path / "ask.yml").write_text((script.parent / "ask.yml").read_text())
    monkeypatch.setattr("mayfly.own.machines.HERE", tmp_path)
    monkeypatch.setattr(manager, "SITE", str(play))
    monkeypatch.setattr(manager.collection, "build", lambda *_: tmp_path / "x.tar.gz")
    monkeypatch.setattr(manager.collection, "install", lambda _: tmp_path / "installed")
    machinist = Machinist(hosts, os.environ, SECRETS, tmp_path)
    infrastructure = machinist.create(VARIABLES)
    try:
        assert (root / on_machine.CLAIM).read_text() == RUN
        while "[Sleep]" not in machinist.messages(infrastructure):
            assert machinist.state(infrastructure).infrastructure == "running", machinist.messages(
                infrastructure
            )
            time.sleep(0.1)
        process = machinist._book._process
        assert CANARY not in Path(f"/proc/{process.pid}/cmdline").read_text()
        assert f"{RUN} reads s3://data/" in machinist.messages(infrastructure)
        assert CANARY not in machinist.messages(infrastructure)
    finally:
        machinist.destroy(infrastructure)
    assert process.poll() is not None
    assert machinist.infrastructures() == []
