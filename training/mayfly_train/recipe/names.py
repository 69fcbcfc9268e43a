"""Names of a run's objects, below its address."""

from __future__ import annotations

RUN = "run.json"
HEAD = "head.json"
CANCEL = "cancel.json"
ENGINE = "engine.json"
LEDGER = "ledger.sqlite"
SCHEDULER = "nodes/scheduler.json"
PROGRESS = "nodes/progress.json"
ENDED = "nodes/ended.json"
NODE_LOGS = "nodes/logs/"
DONE = "done/"


def done(task: str) -> str:
    """The marker that says that a task is finished, with its result; it is written once."""
    return f"{DONE}{task}.json"


def attempt(task: str, attempt: str) -> str:
    """How an attempt ended that is not the accepted one."""
    return f"attempts/{task}/{attempt}.json"


def output(task: str, attempt: str) -> str:
    """The prefix of what a task has left: the attempt's own, so that a late one overwrites none."""
    return f"outputs/{task}/{attempt}/"


def log(task: str, attempt: str, stream: str) -> str:
    """The prefix of the pieces of an attempt's stdout or stderr."""
    return f"logs/{task}/{attempt}/{stream}/"


def medians(experiment: str) -> str:
    """What the median rule compares with."""
    return f"medians/{experiment}.json"


def expansion(experiment: str) -> str:
    """What an experiment was expanded from."""
    return f"expansions/{experiment}.json"


def node_log(node: str, session: str, kind: str) -> str:
    """The prefix of the pieces of a node's own log; a node of the same name has another session."""
    return f"{NODE_LOGS}{node}/{session}/{kind}/"
