from __future__ import annotations

import io
import json
import re
import sqlite3
import sys
from collections.abc import Iterator

import pytest
import requests
from typer.core import TyperGroup
from typer.main import get_command
from typer.testing import CliRunner

from mayfly import cli, report
from mayfly.auth import web
from mayfly.auth.azure import NAMES as AZURE_NAMES
from mayfly.credentials import S3Settings
from mayfly.ending import Outcome
from mayfly.errors import RemoteError, RunFailed
from mayfly.ledger import VERSION, Ledger
from mayfly.redact import Secret


@pytest.fixture(autouse=True)
def state(tmp_path, monkeypatch):
    monkeypatch.setenv("MAYFLY_STATE_DIR", str(tmp_path))
    for name in ("MAYFLY_CLOUD", "MAYFLY_BUCKET", "MAYFLY_WORKERS"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


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


CANARY = "canary-of-the-tests"


class FakeServices:
    im = None
    client = None
    s3 = S3Settings(Secret("the-key-id"), Secret(CANARY), None, "http://s3", "r", "test")


def ledger_with(state, *runs: str) -> Ledger:
    ledger = Ledger(state / "ledger.sqlite")
    for run in runs:
        ledger.add(run, "local", f"s3://mayfly/{run}/", {})
    return ledger


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["deploy", "--cloud", "awz"], "unknown cloud: 'awz'"),
        (["deploy", "--cloud", "local", "--workers", "0"], "nodes.worker.count"),
        (["deploy", "--cloud", "local", "--steps", "-5"], "trainer.steps"),
        (["deploy", "--cloud", "local", "--set", "trainer.stepz=5"], "steps"),
        (["deploy", "--cloud", "local", "--set", "nonsense"], "key=value"),
        (["deploy"], "--cloud"),
        (["deploy", "absent.yml", "--cloud", "local"], "absent.yml"),
        (["deploy", "--workers", "two"], "two"),
        (["depliy"], "deploy"),
        (["plan", "--cloud", "aws", "--bucket", "b-1", "--budget", "five"], "such as 5 USD"),
        (["plan", "--cloud", "aws", "--bucket", "b-1", "--region", "moon"], "region is 'moon'"),
        (["plan", "--cloud", "aws"], "no bucket for the model"),
        (["plan", "--cloud", "static", "--bucket", "b-1"], "--inventory FILE"),
        (["deploy", "--cloud", "aws", "--dry-run", "--budget", "5 USD"], "price is unknown"),
        (["deploy", "--cloud", "gcp", "--bucket", "b-1"], "say so with --yes"),
        (["prices", "update", "--cloud", "gcp"], "cannot be fetched"),
        (["prices", "show", "--prices", "absent.yml"], "cannot read the prices"),
        (["lint", "absent.radl"], "absent.radl"),
        (["destroy"], "mayfly deploy"),
        (["check"], "--cloud: aws, gcp"),
        (["check", "--cloud", "awz"], "did you mean 'aws'"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(mayfly, words, says):
    code, out, err = mayfly(*words)
    assert code == 2
    assert out == ""
    assert says in err
    assert err.startswith("mayfly: ")
    assert err.count("\n") == 1


def test_an_error_with_json_is_a_document_too(mayfly):
    code, out, err = mayfly("deploy", "--cloud", "awz", "--json")
    document = json.loads(out)
    assert (code, document["ok"]) == (2, False)
    assert "awz" in document["error"]["message"]
    assert err.count("\n") == 1


def test_a_bug_is_called_internal_and_traced_only_on_demand(mayfly, monkeypatch):
    def broken() -> Ledger:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(cli, "_ledger", broken)
    code, _, err = mayfly("ls")
    assert code == 1
    assert err == (
        "mayfly: internal error: ZeroDivisionError: division by zero"
        " (--debug shows the traceback)\n"
    )
    code, _, err = mayfly("ls", "--debug")
    assert code == 1
    assert "Traceback" in err


def test_a_remote_error_is_exit_code_1(mayfly, monkeypatch):
    def broken() -> Ledger:
        raise RemoteError("IM does not answer")

    monkeypatch.setattr(cli, "_ledger", broken)
    assert mayfly("ls")[0] == 1


def test_destroying_an_unknown_run_names_the_nearest(mayfly, state):
    ledger_with(state, "faces-261128-100000-abcd", "other-261128-100000-beef")
    code, _, err = mayfly("destroy", "faces-261128-100000-abc")
    assert code == 2
    assert "faces-261128-100000-abcd" in err


def test_destroying_again_is_said_and_harmless(mayfly, state):
    ledger_with(state, "one").set_state("one", "destroyed")
    code, out, _ = mayfly("destroy", "one")
    assert (code, out) == (0, "run one: already destroyed\n")
    code, out, _ = mayfly("destroy", "one", "--json")
    assert code == 0
    assert json.loads(out)["already_destroyed"] is True


@pytest.mark.parametrize("words", [["ls"], ["status"], ["destroy"], ["gc", "--cloud", "aws"]])
def test_a_ledger_of_a_newer_mayfly_is_told_in_one_line(mayfly, state, monkeypatch, words):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "unit-key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "unit-secret")
    ledger_with(state, "one").close()
    with sqlite3.connect(state / "ledger.sqlite") as db:
        db.execute(f"PRAGMA user_version = {VERSION + 1}")
    db.close()
    code, out, err = mayfly(*words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"the ledger is of a newer Mayfly: {state}/ledger.sqlite: version {VERSION + 1}" in err
    assert "update this Mayfly" in err


def test_runs_are_listed_newest_first(mayfly, state):
    ledger_with(state, "one", "two").set_outcome("one", "failed", "no space")
    runs = json.loads(mayfly("ls", "--json")[1])["runs"]
    assert [(r["run"], r["state"], r["outcome"]) for r in runs] == [
        ("two", "preparing", None),
        ("one", "preparing", "failed"),
    ]
    assert "two" in mayfly("ls")[1]


def test_the_status_of_a_destroyed_run_starts_no_service(mayfly, state, monkeypatch):
    ledger_with(state, "one").set_state("one", "destroyed")
    monkeypatch.setattr(cli, "reopen_services", None)
    code, out, _ = mayfly("status", "--json")
    assert code == 0
    assert json.loads(out)["state"] == "destroyed"


def test_the_schema_is_json(mayfly):
    code, out, _ = mayfly("schema")
    assert code == 0
    assert "trainer" in json.loads(out)["properties"]


def test_a_task_is_explained(mayfly):
    job = ["explain", "--engine", "tf-server", "--workers", "3"]
    code, out, _ = mayfly(*job, "--task", "worker-1", "--json")
    document = json.loads(out)
    (task,) = document["tasks"]
    assert (code, document["engine"], document["example"]) == (0, "tf-server", True)
    # The chief is the program's worker 0.
    assert (task["task"], task["node"]) == ("worker-1", "worker-2")
    assert " --job_name worker --task_index 2 " in " ".join(task["command"])
    assert (task["environment"]["JOB_NAME"], task["environment"]["TASK_INDEX"]) == ("worker", "2")
    code, out, _ = mayfly(*job, "--task", "worker-1")
    assert (code, "TASK_INDEX" in out, "chief-0" in out) == (0, True, False)
    code, out, err = mayfly(*job, "--task", "worker-9")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "no task worker-9" in err and "it has ps-0, chief-0, worker-0, worker-1" in err


def test_lint_tells_file_and_line(mayfly, tmp_path):
    wrong = tmp_path / "wrong.radl"
    wrong.write_text("network public (outports = '22/tcp, 80/tcp')\nsystem ps ()\ndeploy ps 1\n")
    code, out, _ = mayfly("lint", str(wrong))
    assert code == 2
    assert out.startswith(f"{wrong}:1: ")
    code, out, _ = mayfly("lint", str(wrong), "--json")
    assert json.loads(out)["findings"][0]["line"] == 1


def test_what_follows_two_dashes_is_the_nodes_command(mayfly, monkeypatch, state):
    ledger_with(state, "one").set_infrastructure("one", "infra-1")
    seen = []

    monkeypatch.setattr(cli, "reopen_services", lambda *_, **__: FakeServices())
    monkeypatch.setattr(
        cli.access, "log_in", lambda im, r, node, words: seen.append((node, words)) or 7
    )
    code, _, _ = mayfly("ssh", "worker-1", "--", "df", "-h", "--json")
    assert (code, seen) == (7, [("worker-1", ["df", "-h", "--json"])])


def test_text_is_printed_as_it_is(mayfly, monkeypatch, state):
    """Square brackets, as in Ansible's output, are no markup."""
    ledger_with(state, "one")
    monkeypatch.setattr(cli, "reopen_services", lambda *_, **__: FakeServices())
    found = {"lines": ["TASK [agent : Install]", "[bold]ok"]}
    monkeypatch.setattr(cli.logs, "read", lambda *_: found)
    assert mayfly("logs", "one", "ps-0")[1] == "TASK [agent : Install]\n[bold]ok\n"


def test_a_log_that_holds_a_secret_is_shown_without_it(mayfly, monkeypatch, state):
    ledger_with(state, "one")
    monkeypatch.setattr(cli, "reopen_services", lambda *_, **__: FakeServices())
    monkeypatch.setattr(cli.logs, "read", lambda *_: {"lines": [f"key={CANARY}"]})
    assert mayfly("logs", "one", "ps-0")[1] == "key=********\n"
    assert CANARY not in mayfly("logs", "one", "ps-0", "--json")[1]


def test_a_check_that_fails_says_so_on_standard_output(mayfly, monkeypatch):
    finding = cli.check.Finding("credentials", "missing", "no keys: missing X", ("X",), 2)
    monkeypatch.setattr(cli.check, "look", lambda cloud, environ: iter([finding]))
    code, out, err = mayfly("check", "--cloud", "aws")
    assert (code, err) == (2, "")
    assert out == "missing    credentials  no keys: missing X\n"
    code, out, _ = mayfly("check", "--cloud", "aws", "--json")
    document = json.loads(out)
    assert (code, document["ok"], document["missing"]) == (2, False, ["X"])


@pytest.mark.parametrize("cloud", ["aws", "gcp", "azure", "openstack", "egi", "opennebula"])
@pytest.mark.parametrize("flags", [[], ["--json"], ["--debug"]], ids=str)
def test_a_check_shows_no_key_even_when_nobody_answers(mayfly, monkeypatch, state, cloud, flags):
    (state / "key.json").write_text(
        json.dumps(
            {
                "type": "service_account",
                "project_id": "p",
                "client_email": "robot@p",
                "private_key": CANARY,
            }
        )
    )
    (state / "one_auth").write_text(f"ada:{CANARY}")
    keys = {
        **{
            "AWS_ACCESS_KEY_ID": CANARY,
            "AWS_SECRET_ACCESS_KEY": CANARY,
            "AWS_SESSION_TOKEN": CANARY,
        },
        **dict.fromkeys(AZURE_NAMES, "x"),
        "AZURE_CLIENT_SECRET": CANARY,
        "AWS_ENDPOINT_URL": "http://127.0.0.1:1",
        "AWS_MAX_ATTEMPTS": "1",
        "GOOGLE_APPLICATION_CREDENTIALS": str(state / "key.json"),
        "OS_AUTH_URL": "https://ks",
        "OS_USERNAME": "u",
        "OS_PASSWORD": CANARY,
        "OS_PROJECT_NAME": "p",
        "EGI_SITE": "s",
        "EGI_VO": "v",
        "OIDC_ACCESS_TOKEN": f"x.{CANARY}.y",
        "ONE_XMLRPC": "https://one",
        "ONE_AUTH": str(state / "one_auth"),
        "IM_URL": "https://im",
        "IM_USER": "u",
        "IM_PASSWORD": CANARY,
    }
    for name, value in keys.items():
        monkeypatch.setenv(name, value)

    def nobody(method, url, **options):
        raise requests.ConnectionError(f"{url} {options}")

    monkeypatch.setattr(web.requests, "request", nobody)
    code, out, err = mayfly("check", "--cloud", cloud, *flags)
    assert code in (1, 2)
    assert "IM does not answer at https://im" in out
    assert CANARY not in out + err


def commands(group: TyperGroup, *before: str) -> Iterator[list[str]]:
    """The words of every command in a group and in those below it."""
    for name, command in group.commands.items():
        if isinstance(command, TyperGroup):
            yield from commands(command, *before, name)
        else:
            yield [*before, name]


COMMANDS = list(commands(get_command(cli.app)))


def test_groups_are_looked_into():
    assert {("deploy",), ("recipe", "run"), ("heat", "delete")} <= set(map(tuple, COMMANDS))


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_each_help_has_an_example_and_the_common_flags(command):
    shown = CliRunner().invoke(cli.app, [*command, "--help"])
    assert shown.exit_code == 0
    assert f"Example: mayfly {' '.join(command)}" in shown.output
    assert "--json" in shown.output
    assert "--debug" in shown.output


def test_a_report_is_also_one_html_file(mayfly, state, monkeypatch):
    monkeypatch.setattr(report.platform, "status", lambda environ: {"s3": None})
    ledger_with(state, "one").set_outcome("one", "failed", "no quota")
    page = state / "page.html"
    code, out, _ = mayfly("report", "one", "--html", str(page))
    assert (code, out) == (0, f"wrote {page}\n")
    assert "no quota" in page.read_text()
    code, out, _ = mayfly("report", "--json")
    assert (code, json.loads(out)["error"]["message"]) == (0, "no quota")
    assert "no quota" in mayfly("report")[1]


class FakeTerminal(io.StringIO):
    """Standard input at which somebody types this."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def paid(mayfly, monkeypatch):
    """Deploy three nodes on a cloud that costs money, at a terminal; returns what `mayfly` returns,
    and which jobs were deployed."""
    from tests.unit.cloud_fakes import FakeEC2, FakePricing, size

    spot = [{"InstanceType": "c6i.xlarge", "SpotPrice": price} for price in ("0.1", "0.2")]
    ec2 = FakeEC2(types={"m6i.large": size(2, 8192), "c6i.xlarge": size(4, 8192)}, spot=spot)
    parts = {"ec2": ec2, "pricing": FakePricing({"m6i.large": [0.3], "c6i.xlarge": [0.4]})}
    monkeypatch.setattr("boto3.client", lambda service, region_name: parts[service])
    for name in ("AWS_REGION", "MAYFLY_PRICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    deployed = []
    done = Outcome({"ok": True, "run": "one", "phases": {}}, None)
    monkeypatch.setattr(cli, "deploy", lambda job, tools: deployed.append(job) or done)

    def run(typed: str, *flags: str):
        monkeypatch.setattr(sys, "stdin", FakeTerminal(typed))
        words = ["deploy", "--cloud", "aws", "--bucket", "b-1", "--budget", "9 USD", *flags]
        return *mayfly(*words), deployed

    return run


QUESTION = "Make 3 nodes on Amazon EC2? [y/N]:"


def test_whoever_says_no_has_seen_what_it_would_be_and_nothing_is_made(paid):
    code, out, err, deployed = paid("n\n")
    assert (code, out.strip(), deployed) == (130, "", [])
    assert err.count(QUESTION) == 1
    plan = err.partition(QUESTION)[0]
    for told in (
        r"aws, region us-east-1",
        r"1 ps: m6i\.large, .* 0\.3 USD an hour each",
        r"2 worker: c6i\.xlarge, .* 0\.4 USD an hour each",
        r"creates .* 3 instance, .* 3 public address, .* 1 directory in the bucket",
        r"price .* 1\.12 USD an hour",
        r"the whole run .* [\d.]+ to [\d.]+ USD for [\d.]+ to [\d.]+ hours",
        r"spot workers .* [\d.]+ to [\d.]+ USD less for the run",
        r"limits .* training 2 h .* at most, 20 min .* without progress, budget 9 USD",
    ):
        assert re.search(told, plan), told


def test_whoever_says_yes_is_asked_once(paid):
    code, _, err, deployed = paid("y\n")
    assert (code, len(deployed), err.count(QUESTION)) == (0, 1, 1)


def test_whoever_has_said_yes_before_is_not_asked(paid):
    code, _, err, deployed = paid("", "--yes")
    assert (code, len(deployed)) == (0, 1)
    assert "Make 3 nodes" not in err
    assert "is put into s3://b-1/datasets/fashion-mnist/ by deploy" in err, "what the plan says"


def test_a_failed_deploy_names_the_report(mayfly, monkeypatch):
    failed = Outcome({"ok": False, "run": "one", "phases": {}}, RunFailed("the run failed: why"))
    monkeypatch.setattr(cli, "deploy", lambda job, tools: failed)
    code, _, err = mayfly("deploy", "--cloud", "local")
    assert code == 1
    assert err.splitlines()[-1] == "what happened, on one page: mayfly report one"


# --- plans without touching anything -------------------------------------------------------------

SEVEN = ("aws", "gcp", "azure", "openstack", "egi", "opennebula", "static")
CLOUD_VARIABLES = ("AWS_REGION", "OS_AUTH_URL", "EGI_SITE", "EGI_VO", "ONE_XMLRPC", "MAYFLY_PRICES")


@pytest.fixture
def untouched(tmp_path, monkeypatch):
    """A build directory of our own, and services that must not be opened."""

    def refuse(*_, **__):
        raise AssertionError("a dry run touched something")

    for name in CLOUD_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(cli, "BUILD", tmp_path / "build")
    for name in ("reopen_services", "open_bucket", "prepare", "deploy"):
        monkeypatch.setattr(cli, name, refuse)
    monkeypatch.setattr("boto3.client", refuse)
    monkeypatch.setattr("requests.get", refuse)
    return tmp_path


@pytest.mark.parametrize("verb", ["plan", "deploy"])
@pytest.mark.parametrize("cloud", [*SEVEN, "local"])
def test_a_dry_run_answers_for_every_cloud_without_keys(mayfly, untouched, verb, cloud):
    code, out, err = mayfly(verb, "--cloud", cloud, "--workers", "3", "--dry-run", "--json")
    assert (code, err) == (0, "")
    document = json.loads(out)
    assert document["nodes"] == {"ps": 1, "worker": 3}
    assert document["dry_run"] is True
    assert document["price"]["known"] is (cloud in ("static", "local"))
    assert document["creates"]["directory in the bucket"] == 1
    written = [path.name for path in (untouched / "build").iterdir()]
    assert written == [f"{document['run']}.{'vars.yml' if cloud == 'static' else 'radl'}"]
    assert not (untouched / "ledger.sqlite").exists()


def test_a_dry_run_uses_the_prices_it_is_given(mayfly, untouched):
    price_file = untouched / "prices.yml"
    price_file.write_text(
        "format: 1\ncloud: aws\ncurrency: USD\ndate: 2026-11-01\nsource: made up\n"
        "other: {hour: 1}\n"
    )
    words = ["plan", "--cloud", "aws", "--dry-run", "--prices", str(price_file)]
    document = json.loads(mayfly(*words, "--budget", "50 USD", "--json")[1])
    assert document["price"]["per_hour"] == [3.0, 3.0]
    assert document["price"]["source"] == "made up"
    assert document["limits"]["budget"] == "50 USD"
    code, _, err = mayfly(*words, "--budget", "0.01 USD")
    assert code == 2
    assert "at least" in err


def test_a_plan_for_people_says_what_is_not_known(mayfly, untouched):
    code, out, _ = mayfly("plan", "--cloud", "aws", "--dry-run")
    assert code == 0
    for text in (
        "resolved at deploy: owner 136693071363",
        "price unknown",
        "never deployed",
        "3 instance",
        "no bucket for the model",
        "m6i.large, 2 CPU, 8 GiB",
    ):
        assert text in out


def test_a_plan_for_own_machines_prints_the_command(mayfly, untouched):
    hosts = untouched / "hosts"
    hosts.write_text("[ps]\na\n[worker]\nb\n")
    words = ["plan", "--cloud", "static", "--bucket", "b-1", "--inventory", str(hosts)]
    document = json.loads(mayfly(*words, "--json")[1])
    assert document["nodes"] == {"ps": 1, "worker": 1}
    assert document["command"].startswith(f"ansible-playbook -i {hosts} -e @")
    assert document["radl"] is None
    assert "1 worker: 2 GPU" in mayfly(*words, "--set", "nodes.worker.gpu=2")[1]


def test_deploy_on_own_machines_wants_an_inventory_that_is_there(mayfly, tmp_path):
    words = ["deploy", "--cloud", "static", "--bucket", "b-1"]
    code, _, err = mayfly(*words, "--inventory", str(tmp_path / "hosts"))
    assert (code, "there is no inventory" in err) == (2, True)
    code, _, err = mayfly(*words)
    assert (code, "--inventory FILE" in err) == (2, True)


def test_clouds_are_listed_with_how_far_they_were_exercised(mayfly):
    clouds = {each["cloud"]: each for each in json.loads(mayfly("clouds", "--json")[1])["clouds"]}
    assert {*SEVEN, "local"} <= {*clouds}
    assert clouds["aws"]["spot"] is True
    assert clouds["gcp"]["spot"] is False
    assert "never deployed" in clouds["azure"]["exercised"]
    assert "opennebula" in mayfly("clouds")[1]


def test_prices_are_fetched_kept_and_shown(mayfly, state, monkeypatch):
    from tests.unit.cloud_fakes import FakeEC2, FakePricing

    parts = {"ec2": FakeEC2(), "pricing": FakePricing({"m6i.large": [0.3], "x9.large": [9.0]})}
    monkeypatch.setattr("boto3.client", lambda service, region_name: parts[service])
    monkeypatch.delenv("AWS_REGION", raising=False)
    code, out, _ = mayfly("prices", "update", "--cloud", "aws", "--type", "x9.large", "--json")
    assert code == 0
    (fetched,) = json.loads(out)["prices"]
    assert {*fetched["types"]} == {"m6i.large", "x9.large"}
    assert (fetched["age_days"], fetched["stale"]) == (0, False)
    assert fetched["file"] == str(state / "prices/aws-us-east-1.json")
    (shown,) = json.loads(mayfly("prices", "show", "--json")[1])["prices"]
    assert shown == fetched
    assert "m6i.large" in mayfly("prices", "show")[1]


def test_without_any_prices_it_says_how_to_get_some(mayfly, monkeypatch):
    monkeypatch.delenv("MAYFLY_PRICES", raising=False)
    assert "mayfly prices update" in mayfly("prices", "show")[1]
