"""What is done on a machine of the user's own: whose it is, what is a run's, and what stays."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from mayfly.own import on_machine
from mayfly.own.on_machine import Machine

RUN, OTHER = "faces-261128-100000-abcd", "cats-261128-090000-0123"
TASK = "mayfly-task@chief-0.service"


@pytest.fixture
def called(monkeypatch) -> list[tuple[str, ...]]:
    """A fake systemctl: what was asked of it; `mayfly-run.service` runs until it is stopped."""
    calls: list[tuple[str, ...]] = []

    def fake_systemctl(*words: str) -> str:
        calls.append(words)
        stopped = any(each[0] == "stop" for each in calls)
        state = "inactive dead" if stopped else "active running"
        return f"mayfly-run.service loaded {state} Mayfly\nmayfly-x loaded failed failed x\n"

    monkeypatch.setattr(on_machine, "_systemctl", fake_systemctl)
    return calls


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine's files: a run's, another run's, and what is nobody's."""
    for name in ("etc/systemd/system/multi-user.target.wants", f"var/lib/mayfly/tasks/{RUN}"):
        (tmp_path / name).mkdir(parents=True)
    for name in (f"var/lib/mayfly/tasks/{OTHER}", "var/lib/mayfly/hdfs", "run/systemd/system"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "etc/mayfly").mkdir()
    (tmp_path / "etc/mayfly/s3.env").write_text("AWS_SECRET_ACCESS_KEY=x\n")
    wants = tmp_path / "etc/systemd/system/multi-user.target.wants"
    for unit in (TASK, "hdfs-datanode.service", "mayfly-store.service"):
        (wants / unit).touch()
    return tmp_path


def topology(root: Path, run: str, http: str = "") -> None:
    document = {"run": run, "namenode": {"http": http}}
    (root / "etc/mayfly/cluster.json").write_text(json.dumps(document))


def test_what_is_a_runs(root, called):
    topology(root, RUN)
    found = Machine(root, namenode=False).look(RUN)
    assert found["systemd"] and found["used_by"] == RUN
    assert found["things"] == [
        ["unit", "mayfly-run.service", "active"],
        ["unit", TASK, "enabled"],
        ["S3 keys", "/etc/mayfly/s3.env", ""],
        ["state", f"/var/lib/mayfly/tasks/{RUN}", ""],
    ]


def test_a_claim_excludes_others_and_is_stronger_than_what_was_left(root, called):
    topology(root, OTHER)
    machine = Machine(root, namenode=False)
    assert machine.claim(RUN) == {"used_by": RUN}
    assert machine.claim(OTHER) == {"used_by": RUN}
    assert machine.claim(RUN) == {"used_by": RUN}, "to ask again does no harm"
    assert machine.look(OTHER)["used_by"] == RUN
    assert ["claim", "/run/mayfly-run", ""] in machine.look(RUN)["things"]


def test_a_machine_whose_run_has_ended_is_free(root, called):
    topology(root, RUN)
    on_machine._systemctl("stop")
    assert Machine(root, namenode=False).look(OTHER)["used_by"] is None


def test_freeing_takes_the_runs_own_and_nothing_else(root, called):
    topology(root, RUN)
    machine = Machine(root, namenode=False)
    machine.claim(RUN)
    assert machine.free(RUN) == {"refusal": None}
    verbs = [words[0] for words in called if words[0] in ("stop", "disable")]
    assert verbs == ["stop", "disable"]
    assert ("disable", TASK) in called
    assert not (root / "etc/mayfly/s3.env").exists()
    assert not (root / "run/mayfly-run").exists()
    assert [path.name for path in (root / "var/lib/mayfly/tasks").iterdir()] == [OTHER]
    assert (root / "var/lib/mayfly/hdfs").is_dir()
    assert (root / "etc/mayfly/cluster.json").exists()


def test_what_another_run_has_is_not_touched(root, called):
    topology(root, RUN)
    machine = Machine(root, namenode=False)
    machine.claim(OTHER)
    assert machine.free(RUN) == {"refusal": None}
    assert called == []
    assert (root / "etc/mayfly/s3.env").exists()
    assert (root / "run/mayfly-run").read_text() == OTHER
    assert [path.name for path in (root / "var/lib/mayfly/tasks").iterdir()] == [OTHER]


class FakeNameNode(BaseHTTPRequestHandler):
    """WebHDFS with one directory."""

    def do_GET(self) -> None:
        self.answer()

    def do_DELETE(self) -> None:
        self.answer()
        self.server.there = False

    def answer(self) -> None:
        self.server.asked.append((self.command, self.path))
        self.send_response(200 if self.server.there else 404)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        return None


@pytest.fixture
def namenode():
    server = HTTPServer(("127.0.0.1", 0), FakeNameNode)
    server.there, server.asked = True, []
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def test_the_runs_directory_in_hdfs_goes_with_it(root, called, namenode):
    topology(root, RUN, f"http://127.0.0.1:{namenode.server_port}")
    assert not [t for t in Machine(root, namenode=False).look(RUN)["things"] if "HDFS" in t[0]]
    machine = Machine(root, namenode=True)
    assert ["HDFS directory", f"/mayfly/{RUN}", ""] in machine.look(RUN)["things"]
    assert machine.free(RUN) == {"refusal": None}
    path = f"/webhdfs/v1/mayfly/{RUN}?op=DELETE&recursive=true&user.name=hdfs"
    assert namenode.asked[-1] == ("DELETE", path)
    assert machine.look(RUN)["things"] == [
        ["unit", TASK, "enabled"],  # the fake disables nothing
    ]


def test_hdfs_that_does_not_answer_is_told_and_keeps_the_claim(root, called, namenode):
    topology(root, RUN, f"http://127.0.0.1:{namenode.server_port}")
    namenode.shutdown()
    namenode.server_close()
    machine = Machine(root, namenode=True)
    machine.claim(RUN)
    assert machine.look(RUN)["hdfs"].startswith("HDFS does not answer: ")
    assert machine.free(RUN)["refusal"].startswith("HDFS refuses: ")
    assert (root / "run/mayfly-run").exists()


@pytest.mark.parametrize("name", ["", "..", "a/../b", "A"])
def test_a_name_that_would_lead_elsewhere_is_refused(name, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["on_machine.py", "free", name])
    with pytest.raises(SystemExit):
        on_machine.main()
    assert "no run has the name" in capsys.readouterr().err
