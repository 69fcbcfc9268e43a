from __future__ import annotations

import io

import pytest
from rich.console import Console
from tests.unit.deploy_fakes import FakeClock

from mayfly.display import FAILED, Phases, PlainDisplay, RichDisplay, duration, make_display
from mayfly.errors import RemoteError
from mayfly.redact import Secret
from mayfly.summary import explain, table


def plain() -> tuple[PlainDisplay, io.StringIO, FakeClock]:
    out, clock = io.StringIO(), FakeClock()
    return PlainDisplay(Console(file=out, width=200), clock), out, clock


def test_phases_are_measured_and_shown():
    display, out, clock = plain()
    phases = Phases(display, clock)
    with phases.phase("training") as report:
        report("step 10 of 100", 0.1)
        clock.sleep(75)
    assert phases.seconds == {"training": 75.0}
    assert out.getvalue().splitlines() == [
        "training …",
        "training  10% step 10 of 100",
        "training done in 1 min 15 s",
    ]


@pytest.mark.parametrize(
    ("error", "how"), [(RemoteError("no"), "FAILED"), (KeyboardInterrupt(), "interrupted")]
)
def test_a_phase_that_fails_is_measured_too(error, how):
    display, out, clock = plain()
    phases = Phases(display, clock)
    with pytest.raises(type(error)), phases.phase("export"):
        clock.sleep(2)
        raise error
    assert phases.seconds == {"export": 2.0}
    assert out.getvalue().endswith(f"export {how} after 2.0 s\n")


def test_plain_lines_do_not_flood():
    display, out, clock = plain()
    display.start("training")
    for step in range(100):
        display.update("training", f"step {step}", step / 100)
        clock.sleep(1)
    assert len(out.getvalue().splitlines()) == 1 + 10


def test_every_line_is_redacted():
    display, out, _ = plain()
    display.redact = display.redact.knowing([Secret("canary-value")])
    display.say("key canary-value")
    display.update("x", "canary-value")
    display.finish("x", 1.0, text="canary-value")
    assert "canary" not in out.getvalue()
    assert out.getvalue().count("********") == 3


def test_brackets_are_no_markup():
    display, out, _ = plain()
    display.say("TASK [hadoop : Install] [bold]x")
    assert out.getvalue() == "TASK [hadoop : Install] [bold]x\n"


def test_bars_show_phase_text_and_time():
    out = io.StringIO()
    with RichDisplay(Console(file=out, force_terminal=True, width=120)) as display:
        display.redact = display.redact.knowing([Secret("canary-value")])
        display.start("training")
        display.update("training", "step 5 of [100] canary-value", 0.05)
        display.finish("training", 75.0)
        display.finish("export", 3.0, how=FAILED)
        display.say("hello")
    shown = out.getvalue()
    for text in ("training", "step 5 of [100] ********", "1 min 15 s", "failed", "hello"):
        assert text in shown
    assert "canary" not in shown


def test_without_a_terminal_lines_are_plain(monkeypatch):
    monkeypatch.setattr("sys.stderr", io.StringIO())
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    assert isinstance(make_display(plain=False), PlainDisplay)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"),
        (59.9, "59.9 s"),
        (60, "1 min 00 s"),
        (3599, "59 min 59 s"),
        (7500, "2 h 05 min"),
    ],
)
def test_durations_are_readable(seconds, text):
    assert duration(seconds) == text


def test_an_error_of_ours_is_explained_with_its_type():
    assert explain(ValueError("x")) == {"kind": "InternalError", "message": "ValueError: x"}
    assert explain(RemoteError("a", "b")) == {"kind": "RemoteError", "message": "a — b"}
    assert explain(KeyboardInterrupt())["kind"] == "Interrupted"


def test_the_summary_is_a_table():
    document = {
        "run": "one",
        "model_uri": "s3://b/one/model/",
        "accuracy": 0.89123,
        "global_step": 1600,
        "phases": {"training": 75.0},
        "leftovers": 0,
    }
    out = io.StringIO()
    Console(file=out, width=100).print(table(document))
    for text in ("0.8912", "1,600", "1 min 15 s", "nothing"):
        assert text in out.getvalue()
