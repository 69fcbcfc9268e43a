from __future__ import annotations

import pytest
from tests.unit.deploy_fakes import FakeClock, FakeIM

from mayfly.im import State
from mayfly.watch import (
    Broken,
    Pace,
    Status,
    current_task,
    tail,
    wait_for_nodes,
    wait_for_status,
    wait_until_configured,
)


def pace(patience: float = 60.0) -> Pace:
    clock = FakeClock()
    return Pace(1.0, patience, clock=clock, sleep=clock.sleep)


def status(**given) -> Status:
    return Status.of({"state": "training", "updated": "t0", "steps": 100, **given})


def follow(statuses: list[Status | None], states=("succeeded",), patience: float = 60.0):
    queue = list(statuses)
    shown: list[Status] = []

    def read() -> Status | None:
        return queue.pop(0) if len(queue) > 1 else queue[0]

    last = wait_for_status(states, read, lambda: "node 2 off", pace(patience), shown.append)
    return last, shown


def test_it_returns_the_status_that_was_waited_for():
    last, shown = follow(
        [
            None,
            status(global_step=1),
            status(updated="t1", global_step=50),
            status(state="succeeded"),
        ]
    )
    assert last.state == "succeeded"
    assert [s.global_step for s in shown] == [1, 50, 0]


def test_a_failed_run_says_where_and_why():
    error = {"task": "chief-0", "node": "10.0.0.3", "message": "exit code 1", "log_tail": ["boom"]}
    with pytest.raises(Broken, match="chief-0 on 10.0.0.3: exit code 1") as caught:
        follow([status(state="failed", error=error)])
    assert caught.value.log_tail == ["boom"]
    assert caught.value.details["task"] == "chief-0"


def test_a_run_that_falls_silent_has_failed_with_the_cause():
    with pytest.raises(Broken, match=r"no sign of life.*step 7 of 100.*node 2 off"):
        follow([status(global_step=7)], patience=30)


def test_a_run_that_never_reports_has_failed():
    with pytest.raises(Broken, match="it never reported"):
        follow([None], patience=30)


def test_a_long_run_with_news_is_not_silent():
    news = [status(updated=f"t{second}") for second in range(100)]
    last, _ = follow([*news, status(state="succeeded")], patience=5)
    assert last.state == "succeeded"


def test_a_run_that_reports_but_stands_still_has_failed():
    clock = FakeClock()
    news = iter(range(10_000))
    with pytest.raises(Broken, match=r"no progress for 50\.0 s \(limits\.idle\): step 7 of 100"):
        wait_for_status(
            ("succeeded",),
            lambda: status(updated=f"t{next(news)}", global_step=7),
            lambda: "all running",
            Pace(1.0, 20.0, 50.0, clock, clock.sleep),
            lambda _: None,
        )


def test_the_status_line_has_what_is_known():
    line = status(
        global_step=1234, steps=2000, examples_per_second=1310.4, loss=0.51234, accuracy=0.8765,
        eta_s=75,
    ).line()  # fmt: skip
    assert line == (
        "step 1,234 of 2,000 · 1,310 examples/s · loss 0.512 · accuracy 0.8765 · ETA 1 min 15 s"
    )
    assert status(global_step=100, eta_s=0).line() == "step 100 of 100 · last evaluation"
    assert Status.of({"state": "starting", "loss": None, "new_key": 1}).line() == "step 0"


def test_nodes_are_awaited_until_all_run():
    im = FakeIM(
        states={
            "i": [
                State("pending", {}),
                State("pending", {"0": "running", "1": "pending"}),
                State("running", {"0": "running", "1": "configured"}),
            ]
        }
    )
    seen: list[tuple[str, float | None]] = []
    wait_for_nodes(im, "i", 2, pace(), lambda text, part: seen.append((text, part)))
    assert seen[-1] == ("2 of 2 nodes are up", 1.0)


def test_nodes_that_cannot_be_made_are_named():
    im = FakeIM(states={"i": [State("failed", {"0": "running", "1": "failed"})]}, text="no quota")
    with pytest.raises(Broken, match="node 1 failed") as caught:
        wait_for_nodes(im, "i", 2, pace(), lambda *_: None)
    assert caught.value.log_tail == ["no quota"]


FATAL = """\
TASK [Change the host name]
fatal: [10.0.0.2_0]: FAILED! => busy
...ignoring
TASK [hadoop : Install]
ok: [10.0.0.2_0]
TASK [agent : Install the agent]
fatal: [10.0.0.2_0]: FAILED! => no wheel
PLAY RECAP
ERROR executing playbook (1/1)
"""


def test_contextualization_that_fails_shows_the_first_task_that_did():
    im = FakeIM(states={"i": [State("running", {"0": "unconfigured", "1": "running"})]}, text=FATAL)
    with pytest.raises(Broken, match="node 0 unconfigured.* — fatal.*no wheel") as caught:
        wait_until_configured(im, "i", pace(), lambda *_: None, lambda: None)
    assert caught.value.log_tail == [
        "TASK [agent : Install the agent]",
        "fatal: [10.0.0.2_0]: FAILED! => no wheel",
    ]


def test_a_stage_that_failed_for_good_is_not_followed_by_the_others():
    """IM goes on with the next stages, and says that the node is unconfigured at the very end."""
    running = State("running", {"0": "running"})
    text = f"{FATAL}ERROR executing task dataset_ps_ps: (1/1)"
    im = FakeIM(states={"i": [running]}, text=text)
    with pytest.raises(Broken, match="dataset_ps_ps"):
        wait_until_configured(im, "i", pace(), lambda *_: None, lambda: None)
    done = State("configured", {"0": "configured"})
    again = text.replace("(1/1)", "(1/3)")
    im = FakeIM(states={"i": [running, done]}, text=again)
    wait_until_configured(im, "i", pace(), lambda *_: None, lambda: None)


def test_contextualization_that_says_nothing_is_given_up():
    im = FakeIM(states={"i": [State("running", {"0": "running"})]}, text="TASK [x : Wait]")
    with pytest.raises(Broken, match="no news in"):
        wait_until_configured(im, "i", pace(20), lambda *_: None, lambda: None)


def test_an_unknown_state_is_borne_for_a_while_only():
    unknown, fine = State("unknown", {"0": "unknown"}), State("configured", {"0": "configured"})
    im = FakeIM(states={"i": [unknown, unknown, fine]})
    wait_until_configured(im, "i", pace(), lambda *_: None, lambda: None)
    with pytest.raises(Broken, match="lost sight"):
        wait_until_configured(
            FakeIM(states={"i": [unknown]}), "i", pace(), lambda *_: None, lambda: None
        )


def test_the_current_task_is_the_last_one():
    text = "TASK [Gathering Facts] ***\nok\nTASK [mayfly.training.hadoop : Format it] ****\n"
    assert current_task(text) == "Format it"
    assert current_task("") == "preparing the nodes"


def test_no_messages_at_all_explain_nothing():
    """IM has none when it could not make any node."""
    assert tail("") == []
    im = FakeIM(states={"i": [State("failed", {"0": "failed"})]}, text="")
    with pytest.raises(Broken, match="node 0 failed"):
        wait_for_nodes(im, "i", 1, pace(), lambda *_: None)


def test_without_a_fatal_line_the_last_lines_explain():
    assert tail("\n".join(str(n) for n in range(100)), lines=3) == ["97", "98", "99"]


def test_an_im_that_was_restarted_while_it_made_nodes_is_not_waited_for():
    im = FakeIM(states={"i": [State("running", {"0": "running"})]}, restarts=1)
    quick = pace(1800)
    with pytest.raises(Broken, match="restarted while it made the nodes: 1 of 3"):
        wait_for_nodes(im, "i", 3, quick, lambda text, fraction: None)
    assert quick.clock() < 120


def test_an_im_that_was_restarted_is_asked_once_to_configure_again():
    working = State("running", {"0": "running"})
    im = FakeIM(states={"i": [working, working, State("configured", {})]}, restarts=1)
    wait_until_configured(im, "i", pace(), lambda text, fraction: None, lambda: None)
    assert im.reconfigured == ["i"]
