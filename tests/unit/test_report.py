from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from mayfly import redact, report
from mayfly.errors import UserError
from mayfly.ledger import Ledger
from mayfly.local import platform
from mayfly.run_store import RunStore

RUN = "faces-261128-100000-abcd"
SECRET = "unit/secret+that=shows"
LOG = f"""\
connecting with {SECRET} to https://me:tokentoken@git.example/x <script>alert(1)</script>
Traceback (most recent call last):
  File "train.py", line 1, in <module>
ValueError: {SECRET}
"""


@pytest.fixture
def ledger(tmp_path):
    opened = Ledger(tmp_path / "ledger.sqlite")
    opened.add(RUN, "aws", f"s3://mayfly/{RUN}/", {})
    opened.set_outcome(RUN, "failed", "the run failed: chief-0 ended")
    opened.set_state(RUN, "destroyed")
    yield opened
    opened.close()


@pytest.fixture
def environ(monkeypatch, client):
    """Keys of S3 whose server is moto, with what a failed run left in it."""
    message = "chief-0 ended with exit code 1 and is not restarted any more"
    error = {"task": "chief-0", "node": "n1", "message": message, "log_tail": []}
    tasks = {"chief-0": {"node": "n1", "state": "failed", "attempts": 3, "exit_code": 1}}
    status = {"state": "failed", "error": error, "tasks": tasks, "phases": {"training": 61.0}}
    event = {"time": "2026-11-28T10:05:00Z", "run": RUN, "event": "state", "state": "failed"}
    client.create_bucket(Bucket="mayfly")
    for name, text in {
        "status.json": json.dumps(status),
        "events.jsonl": json.dumps(event) + "\nnot JSON\n",
        "logs/chief-0.log": LOG,
        "logs/worker-0.log": "nothing of interest",
    }.items():
        client.put_object(Bucket="mayfly", Key=f"{RUN}/{name}", Body=text.encode())
    return {"MAYFLY_S3_ACCESS_KEY_ID": "unit-access-key", "MAYFLY_S3_SECRET_ACCESS_KEY": SECRET}


def test_it_is_made_from_the_bucket_after_destroy(ledger, environ):
    made = report.make_report(None, ledger, environ)
    assert (made["verdict"], made["error"]["task"]) == ("program", "chief-0")
    assert made["notes"] == []
    assert any(entry["bad"] for entry in made["timeline"])


def test_only_logs_of_tasks_that_failed_are_read(client, environ):
    left = report.read_bucket(RunStore(client, f"s3://mayfly/{RUN}/"))
    assert list(left["logs"]) == ["chief-0"]
    assert len(left["events"]) == 1


def test_no_secret_is_in_it_and_nothing_of_a_log_is_markup(ledger, environ):
    made = report.make_report(RUN, ledger, environ)
    page = report.render_html(made)
    shown = io.StringIO()
    Console(file=shown, width=120).print(report.render_terminal(made))
    for text in (json.dumps(made), page, shown.getvalue()):
        assert SECRET not in text
        assert "ValueError: ********" in text
    hidden = redact.hide({"lines": LOG.splitlines()}, str)["lines"][0]
    assert "tokentoken" not in hidden
    assert "https://********@git.example/x" in hidden


def test_the_page_escapes_and_needs_nothing_else(ledger, environ):
    made = report.make_report(RUN, ledger, environ)
    made["error"]["lines"] = ["<script>alert(1)</script>"]
    page = report.render_html(made)
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    assert not any(word in page for word in ("http://", "https://", "src=", "@import", "url("))
    assert "prefers-color-scheme: dark" in page
    assert "@media print" in page


def test_without_the_bucket_the_ledger_tells(ledger, environ, client):
    client.delete_objects(
        Bucket="mayfly",
        Delete={"Objects": [{"Key": o["Key"]} for o in _objects(client)]},
    )
    client.delete_bucket(Bucket="mayfly")
    made = report.make_report(RUN, ledger, environ)
    assert "from the ledger alone" in made["notes"][0]
    assert "no such bucket" in made["notes"][0]
    assert made["error"]["message"] == "the run failed: chief-0 ended"


def _objects(client):
    return client.list_objects_v2(Bucket="mayfly")["Contents"]


def test_a_local_platform_that_is_down_is_not_started(tmp_path, monkeypatch):
    monkeypatch.setattr(platform, "status", lambda environ: {"s3": None})
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ledger.add("one", "local", "s3://mayfly/one/", {})
    made = report.make_report("one", ledger, {})
    assert "S3 server does not run" in made["notes"][0]
    assert made["verdict"] == "none"


def test_a_page_is_written_whole_or_not_at_all(ledger, environ, tmp_path, monkeypatch):
    made = report.make_report(RUN, ledger, environ)
    path = tmp_path / "page.html"
    report.write_html(made, path)
    before = path.read_text()
    assert before.endswith("</html>\n")

    def broken(made):
        raise ZeroDivisionError

    monkeypatch.setattr(report, "render_html", broken)
    with pytest.raises(ZeroDivisionError):
        report.write_html(made, path)
    assert path.read_text() == before
    assert [p.name for p in tmp_path.glob(".page*")] == []


def test_a_place_that_cannot_be_written_is_one_line(tmp_path):
    with pytest.raises(UserError, match="absent"):
        report.write_html({}, tmp_path / "absent" / "page.html")
