"""Lives of recipes on nodes: the built-in ones to their end, one whose command is killed, one
whose S3 server is away, and one that loses an idle node, is ended by Ctrl-C, and goes on elsewhere.

Slow: each makes and configures three nodes.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from machine import mayfly, networks, nodes, start

import testenv

pytestmark = pytest.mark.slow
TAG = secrets.token_hex(3)  # the bucket outlives the tests
ON_NODES = ("--cloud", "local", "--workers", "2", "--json")
MANY = 12
RECIPE = f"""
experiments:
  many:
    command: python3 -c 'import sys, time; time.sleep(2); print(sys.argv[1])' {{{{number}}}}
    parameters: {{number: {{range: 1-{MANY}}}}}
  one:
    needs: [many]
    command: python3 -c 'import time; time.sleep(180)'
  last:
    needs: [one]
    command: python3 -c 'print(1)'
"""
AWAY_S = 150.0  # a connection that hangs is given up, and made anew, several times
STEADY = f"""
experiments:
  steady:
    command: python3 -c 'import sys, time; time.sleep(20); print(sys.argv[1])' {{{{number}}}}
    parameters: {{number: {{range: 1-{MANY}}}}}
"""


def test_texts_are_tokenised_on_nodes(platform):
    tasks = whole_run("text", platform)
    (total,) = tasks["sum"]
    files = sum(task["results"]["files"] for task in tasks["texts"])
    assert len(tasks["tokenise"]) == -(-files // 10) > 5
    assert total["results"]["records"] == sum(t["results"]["paragraphs"] for t in tasks["tokenise"])
    assert total["results"]["records"] > 1000


def test_one_model_is_trained_on_two_nodes(platform):
    (task,) = whole_run("training", platform)["train"]
    assert task["results"]["nodes"] == 2
    assert task["results"]["accuracy"] > 0.85


def whole_run(recipe: str, platform: Any) -> dict[str, list[dict[str, Any]]]:
    """What the tasks of a built-in recipe have found, by experiment; nothing is left of its run."""
    name = f"{recipe}-{TAG}"
    outcome = mayfly("recipe", "run", recipe, "--name", name, *ON_NODES)
    assert outcome.code == 0, outcome.messages[-3000:]
    assert (outcome.document["outcome"], outcome.document["leftovers"]) == ("succeeded", 0)
    print(recipe, outcome.document["phases"])
    assert nodes(platform) == [] and networks(platform) == []
    return results(name)


def results(name: str) -> dict[str, list[dict[str, Any]]]:
    found = mayfly("recipe", "results", name, "--json", "--all").document["experiments"]
    return {each["name"]: each["tasks"] for each in found}


def test_a_run_whose_command_was_killed_goes_on(platform):
    name = f"inference-{TAG}"
    with following("recipe", "run", "inference", "--name", name, *ON_NODES) as command:
        command.until(lambda: state(name) == "running", 600)
        command.process.kill()
    runs = [each["run"] for each in mayfly("ls", "--json").document["runs"]]
    (run,) = (each for each in runs if each.startswith(name))
    deadline = time.monotonic() + 300
    while state(name) == "running" and time.monotonic() < deadline:
        time.sleep(5)
    assert state(name) == "succeeded"
    (merged,) = results(name)["merge"]
    assert merged["results"]["images"] == 597 and merged["results"]["accuracy"] > 0.85
    assert nodes(platform), "they wait for their dead-man timer, or for destroy"
    assert mayfly("destroy", run, "--json").document["leftovers"] == 0
    assert nodes(platform) == [] and networks(platform) == []


def test_a_server_that_is_away_ends_nothing(platform, tmp_path):
    """It answers nobody for longer than a task takes: what has ended waits for it, and so does who
    follows. Nothing runs twice."""
    name = f"away-{TAG}"
    file = tmp_path / "recipe.yml"
    file.write_text(f"name: {name}\n{STEADY}")
    server = json.loads((testenv.STATE / "local/s3/weed.pid").read_text())["pid"]
    with following("recipe", "run", str(file), *ON_NODES) as command:
        command.until(lambda: tasks_of(name, "steady").get("done", 0) > 1, 900)
        os.kill(server, signal.SIGSTOP)
        try:
            time.sleep(AWAY_S)
            assert command.process.poll() is None, command.said[-3000:]
        finally:
            os.kill(server, signal.SIGCONT)
        assert command.process.wait(600) == 0, command.said[-3000:]
    assert nodes(platform) == [] and networks(platform) == []
    (tasks,) = results(name).values()
    assert [(task["state"], task["attempts"]) for task in tasks] == [("done", 1)] * MANY


def test_idle_nodes_go_and_ctrl_c_leaves_a_run_that_goes_on(platform, tmp_path):
    name = f"lives-{TAG}"
    file = tmp_path / "recipe.yml"
    file.write_text(f"name: {name}\n{RECIPE}")
    with following("recipe", "run", str(file), *ON_NODES) as command:
        command.until(lambda: "removing worker-" in command.said, 900)
        command.until(lambda: len(nodes(platform)) == 2, 120)
        assert tasks_of(name, "one") == {"running": 1}
        command.process.send_signal(signal.SIGINT)
        assert command.process.wait(300) == 130, command.said[-3000:]
    assert f"mayfly recipe resume {name}" in command.said
    assert nodes(platform) == [] and networks(platform) == []
    assert state(name) == "interrupted"

    outcome = mayfly("recipe", "resume", name, "--here", "--json")
    assert outcome.code == 0, outcome.messages[-3000:]
    found = results(name)
    assert [task["attempts"] for task in found["many"]] == [1] * MANY, "none ran again"
    assert [task["state"] for task in found["one"] + found["last"]] == ["done", "done"]


class Following:
    """A command that runs, and what it has said so far."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process, self._lines = process, list[str]()
        for stream in (process.stdout, process.stderr):
            threading.Thread(target=self._read, args=(stream,), daemon=True).start()

    @property
    def said(self) -> str:
        return "".join(self._lines)

    def until(self, condition: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, self.said[-3000:]
            assert time.monotonic() < deadline, self.said[-3000:]
            time.sleep(2)

    def _read(self, stream: Any) -> None:
        self._lines.extend(stream)


@contextmanager
def following(*words: str) -> Iterator[Following]:
    process = start(*words)
    try:
        yield Following(process)
    finally:
        process.kill()
        process.wait()


def state(name: str) -> str:
    return str(mayfly("recipe", "status", name, "--json").document.get("state"))


def tasks_of(name: str, experiment: str) -> dict[str, int]:
    found = mayfly("recipe", "status", name, "--json").document.get("experiments", [])
    return next((each["states"] for each in found if each["name"] == experiment), {})
