"""A task's log: from the run's bucket once it was uploaded, from the task's node before."""

from __future__ import annotations

from typing import Any

from mayfly import access, remote
from mayfly.errors import unknown
from mayfly.im import Manager
from mayfly.ledger import Record
from mayfly.run_store import RunStore

DIRECTORY = "/var/log/mayfly"


def read(record: Record, task: str, lines: int, im: Manager, client: Any) -> dict[str, Any]:
    """Return the last lines of a task's log, and where they come from.

    Raises UserError when there is no such log.
    """
    store = RunStore(client, record.uri)
    uploaded = {name.removesuffix(".log"): uri for name, uri in store.logs().items()}
    document: dict[str, Any] = {"run": record.run, "task": task}
    if task in uploaded:
        text = store.read_text(uploaded[task])
        return {**document, "source": str(uploaded[task]), "lines": text.splitlines()[-lines:]}
    if record.destroyed or not access.looks_like_task(task):
        raise unknown("log", task, uploaded, hint="the run left no logs")
    found = access.nodes(im, record)
    name = access.node_of_task(task)
    path = f"{DIRECTORY}/{task}.log"
    text = remote.run(found, remote.choose(found, name), ["tail", "-n", str(lines), path])
    return {**document, "source": f"{name}:{path}", "lines": text.splitlines()}
