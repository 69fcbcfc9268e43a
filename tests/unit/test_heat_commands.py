from __future__ import annotations

import io
import json
import stat
import sys

import pytest
import yaml

from mayfly import cli
from mayfly.errors import UserError
from mayfly.heat import commands, output

GOOD = ["--repo", "https://example.org/team/repo.git", "--entrypoint", "train.py", "--no-check"]


@pytest.fixture
def mayfly(monkeypatch, capsys, tmp_path):
    """Run the command as its executable does, in an empty directory."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str, stdin: str | None = None) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["mayfly", "heat", *words])
        if stdin is not None:
            terminal = io.StringIO(stdin)
            terminal.isatty = lambda: True  # type: ignore[method-assign]
            monkeypatch.setattr(sys, "stdin", terminal)
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return run


def test_flags_write_a_template_and_say_what_comes_next(mayfly, tmp_path):
    code, out, err = mayfly(*GOOD, "--workers", "1")
    assert (code, err) == (0, "")
    assert "openstack stack create -t template.yml" in out
    assert "mayfly heat delete STACK" in out
    template = yaml.safe_load((tmp_path / "template.yml").read_text())
    assert {"main", "worker_1"} <= set(template["resources"])
    assert [path.name for path in tmp_path.iterdir()] == ["template.yml"]


def test_what_is_not_given_has_its_default(mayfly):
    document = json.loads(mayfly(*GOOD, "--json")[1])
    made = commands.make_job({"repository": GOOD[1], "entrypoint": GOOD[3]})
    assert document["job"] == made.model_dump(mode="json")
    assert made.dns


def test_no_worker_is_a_number_of_workers(mayfly, tmp_path):
    assert mayfly(*GOOD, "--workers", "0")[0] == 0
    assert "worker_1" not in (tmp_path / "template.yml").read_text()


def test_lists_repeat_their_flag(mayfly):
    words = ["--dns", "192.0.2.1", "--dns", "192.0.2.2", "--security-group", "nfs"]
    document = json.loads(mayfly(*GOOD, *words, "--json")[1])
    assert document["job"]["dns"] == ["192.0.2.1", "192.0.2.2"]
    assert document["job"]["security_groups"] == ["nfs"]


def test_flags_win_over_a_job_file(mayfly, tmp_path):
    (tmp_path / "job.yml").write_text(
        "nodes: {worker: {count: 3}}\n"
        "trainer:\n"
        "  engine: torch\n"
        "  program: git+https://example.org/team/repo.git@v1\n"
        "  entrypoint: train.py\n"
    )
    code, out, err = mayfly("job.yml", "--ref", "v2", "--no-check", "--json")
    document = json.loads(out)
    assert code == 0, err
    assert (document["nodes"], document["job"]["ref"]) == (3, "v2")


def test_four_answers_write_the_same_template(mayfly, tmp_path):
    wrong = "git@example.org:x.git\n"
    answers = "https://example.org/team/repo.git\n1\n.\ntrain.py\n"
    code, out, err = mayfly("--no-check", "-o", "asked.yml", stdin=wrong + answers)
    assert code == 0, err
    assert "ssh needs a key" in err
    assert "max 250" in err
    assert mayfly(*GOOD, "--workers", "1")[0] == 0
    assert (tmp_path / "asked.yml").read_text() == (tmp_path / "template.yml").read_text()


def test_without_a_terminal_nothing_is_asked(mayfly):
    code, _, err = mayfly()
    assert code == 2
    assert "--repo" in err


def test_a_dash_prints(mayfly, tmp_path):
    code, out, _ = mayfly(*GOOD, "-o", "-")
    assert code == 0
    assert yaml.safe_load(out)["heat_template_version"] == "2018-08-31"
    assert list(tmp_path.iterdir()) == []


def test_json_is_one_document(mayfly):
    code, out, _ = mayfly(*GOOD, "--json", "--max-duration", "2h")
    document = json.loads(out)
    assert (code, document["template"], document["nodes"]) == (0, "template.yml", 3)
    assert document["create_complete_means"] == "started"


def test_an_existing_file_is_kept_unless_forced(mayfly, tmp_path):
    (tmp_path / "template.yml").write_text("precious")
    code, _, err = mayfly(*GOOD)
    assert code == 2
    assert "--force" in err
    assert (tmp_path / "template.yml").read_text() == "precious"
    assert mayfly(*GOOD, "--force")[0] == 0
    assert "heat_template_version" in (tmp_path / "template.yml").read_text()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--repo", "https://example.org/x.git"], "--entrypoint"),
        (["--entrypoint", "train.py"], "--repo"),
        ([*GOOD, "--workers", "251"], "250"),
        ([*GOOD, "--workers", "two"], "two"),
        ([*GOOD, "--accelerator", "gpus"], "gpu"),
        ([*GOOD, "--main-address", "192.168.100.1"], "gateway"),
        ([*GOOD, "--results", "ftp://x"], "results"),
        ([*GOOD, "--max-duration", "soon"], "max duration"),
        ([*GOOD, "-o", "nowhere/template.yml"], "nowhere"),
        ([*GOOD, "-o", "."], "directory"),
        (["absent.yml"], "absent.yml"),
        (["delete", "stack", "--timeout", "soon"], "timeout"),
        (["--repositori", "x"], "--repo"),
    ],
)
def test_bad_input_is_one_line_exit_code_2_and_no_file(mayfly, tmp_path, words, says):
    code, out, err = mayfly(*words)
    assert (code, out) == (2, "")
    assert says in err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_file_has_the_usual_mode(tmp_path):
    path = tmp_path / "template.yml"
    output.write_template("text", path, force=False)
    other = tmp_path / "other"
    other.touch()
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(other.stat().st_mode)


def test_a_file_that_appears_meanwhile_is_not_overwritten(tmp_path, monkeypatch):
    path = tmp_path / "template.yml"
    monkeypatch.setattr(output, "check_free", lambda *_, **__: path.write_text("precious"))
    with pytest.raises(UserError, match="exists"):
        output.write_template("text", path, force=False)
    assert path.read_text() == "precious"
    assert list(tmp_path.iterdir()) == [path]


def test_delete_says_what_it_did(mayfly, monkeypatch):
    done = commands.stack.Deleted(True, 7)
    monkeypatch.setattr(commands.stack, "connect", lambda: None)
    monkeypatch.setattr(commands.stack, "delete", lambda *_: done)
    assert mayfly("delete", "mine")[1] == "stack mine: deleted; 7 resources are gone\n"
