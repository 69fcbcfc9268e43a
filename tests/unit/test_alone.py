"""Which commands are refused while another process works on a run, and which are not."""

from __future__ import annotations

import json
import signal
import sys

import pytest
from tests.unit.deploy_fakes import FakeClock, FakeIM, FakeTraces
from tests.unit.lock_fakes import working

from mayfly import cli, sweep_commands
from mayfly.credentials import S3Settings
from mayfly.destroy import Destroyer
from mayfly.ledger import Ledger
from mayfly.redact import Secret
from mayfly.run_store import RunStore
from mayfly.services import Services
from mayfly.watch import Pace, Status

RUN = "faces-261128-100000-abcd"
KEYS = S3Settings(Secret("id"), Secret("secret"), None, "http://s3", "r", "test")


@pytest.fixture(autouse=True)
def path(tmp_path, monkeypatch):
    monkeypatch.setenv("MAYFLY_STATE_DIR", str(tmp_path))
    monkeypatch.delenv("MAYFLY_CLOUD", raising=False)
    clock = FakeClock()
    quick = Pace(1.0, 60.0, clock=clock, sleep=clock.sleep)
    monkeypatch.setattr(Destroyer.__init__, "__defaults__", (None, None, quick))
    monkeypatch.setattr(RunStore, "status", lambda self: Status())
    monkeypatch.setattr(RunStore, "write_proof", lambda *_: None)
    return tmp_path / "ledger.sqlite"


@pytest.fixture
def ledger(path):
    opened = Ledger(path)
    opened.add(RUN, "local", f"s3://mayfly/{RUN}/", {"store": "hdfs", "limits": {"idle": 60}})
    opened.set_infrastructure(RUN, "infra-7")
    opened.set_state(RUN, "training")
    yield opened
    opened.close()


@pytest.fixture
def im(monkeypatch):
    """The IM that has the run's nodes."""
    fake = FakeIM(radls={"infra-7": RUN})
    services = Services(fake, KEYS, None, FakeTraces())
    for module in (cli, sweep_commands):
        monkeypatch.setattr(module, "reopen_services", lambda *_, **__: services)
    monkeypatch.setattr(cli.logs, "read", lambda *_: {"lines": ["a line"]})
    monkeypatch.setattr(cli, "make_report", lambda *_: {"run": RUN})
    monkeypatch.setattr(cli, "render_terminal", lambda *_: "a report")
    return fake


@pytest.fixture
def mayfly(monkeypatch, capsys):
    """Run the command as its executable does; returns exit code, standard output and error."""

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["mayfly", *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return run


@pytest.mark.parametrize(
    "words", [["destroy"], ["destroy", RUN], ["export", RUN], ["local", "down"]], ids=" ".join
)
def test_what_changes_a_run_is_refused_in_one_line(mayfly, ledger, path, im, words):
    with working(path, RUN) as other:
        code, out, err = mayfly(*words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"mayfly: run {RUN} is at work: mayfly deploy, process {other.pid} since 20" in err
    assert f"wait, `mayfly status {RUN}` shows how far it is; or end it first: kill " in err
    assert list(im.radls) == ["infra-7"]
    assert ledger.get(RUN).state == "training"


@pytest.mark.parametrize("words", [["ls"], ["status", RUN], ["report", RUN], ["logs", RUN]])
def test_what_only_reads_is_answered(mayfly, ledger, path, im, words):
    with working(path, RUN):
        code, out, _ = mayfly(*words, "--json")
    assert code == 0
    assert json.loads(out)


def test_destroy_takes_over_from_the_dead(mayfly, ledger, path, im):
    with working(path, RUN) as other:
        other.send_signal(signal.SIGKILL)
        other.wait()
        code, _, _ = mayfly("destroy", RUN)
    assert (code, im.radls, ledger.get(RUN).state) == (0, {}, "destroyed")


def test_a_destroy_that_another_has_done_meanwhile_is_not_done_again(
    mayfly, ledger, path, im, monkeypatch
):
    """The record was read, and then another process had its turn."""
    alone = Ledger.alone

    def later(self, run, command):
        ledger.set_state(RUN, "destroyed")
        return alone(self, run, command)

    monkeypatch.setattr(Ledger, "alone", later)
    code, out, _ = mayfly("destroy", RUN)
    assert (code, out, im.asked) == (0, f"run {RUN}: already destroyed\n", [])


def test_a_full_disk_does_not_keep_nodes_alive(mayfly, ledger, path, im):
    (path.parent / "locks").write_text("in the way: no file can be made there")
    code, _, err = mayfly("destroy", RUN)
    assert (code, im.radls) == (0, {})
    assert f"others are not kept off run {RUN} meanwhile: the ledger cannot be written" in err
