"""What happened to a run: a pure function from the documents that it left to one report.

The first error is the one that decided the run. A task that merely lost its peer fails too, and may
be the one that ends the run; the task that went first is then named instead.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from mayfly import verdicts
from mayfly.verdicts import Verdict
from mayfly.watch import FATAL, IGNORED, TASK, tail

LINES = 40  # of a log, in a report
_FATAL_LINE = re.compile(r"(?:fatal|failed): \[(?P<host>[^\]]+)\]")
_STAMP = re.compile(r"\w+ (\d{1,2} \w+ \d{4} +\d\d:\d\d:\d\d)")
_PEER_LOST = re.compile(
    r"UnavailableError|AbortedError|Socket closed|Connection reset|CancelledError"
)
_TRACEBACK = "Traceback (most recent call last):"
_CHAINED = ("During handling of", "The above exception")


@dataclass(frozen=True)
class Evidence:
    """What a run left; what could not be read is empty, and `notes` say why.

    `run` is a ledger's record as a document, `journal` its calls, `logs` has texts by task.
    """

    run: Mapping[str, Any]
    journal: Sequence[Mapping[str, Any]] = ()
    status: Mapping[str, Any] | None = None
    events: Sequence[Mapping[str, Any]] = ()
    staging: Sequence[Mapping[str, Any]] = ()
    messages: str = ""  # of contextualization
    logs: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class FailedTask:
    """An Ansible task that failed on a node."""

    task: str
    host: str
    message: str
    time: str | None = None  # when it began, by the clock of the node that runs Ansible
    lines: Sequence[str] = ()  # what IM's messages have of it


@dataclass(frozen=True)
class Failure:
    """The error that decided a run, and who is at fault for it."""

    message: str
    verdict: Verdict
    task: str | None = None
    node: str | None = None
    time: str | None = None
    lines: Sequence[str] = ()


def examine(evidence: Evidence) -> dict[str, Any]:
    """Return the report: verdict, first error, what to do next, phases, tasks and timeline."""
    failure = None if _is_well(evidence) else _find_failure(evidence)
    verdict = failure.verdict if failure else Verdict(verdicts.NONE, _how_it_is(evidence))
    run, status = evidence.run, evidence.status or {}
    return {
        "run": run["run"],
        "cloud": run.get("cloud"),
        "state": run.get("state"),
        "outcome": run.get("outcome"),
        "uri": run.get("uri"),
        "created": run.get("created"),
        "verdict": verdict.fault,
        "at_fault": verdicts.TITLES[verdict.fault],
        "why": verdict.why,
        "error": _error(failure),
        "advice": _advice(evidence, failure, verdict),
        "phases": _phases(evidence),
        "progress": {key: status.get(key) for key in _PROGRESS if status.get(key) is not None},
        "tasks": [{"task": name, **task} for name, task in (status.get("tasks") or {}).items()],
        "timeline": _timeline(evidence, failure),
        "notes": list(evidence.notes),
    }


_PROGRESS = ("global_step", "steps", "samples_seen", "samples_processed", "accuracy", "loss")


def _is_well(evidence: Evidence) -> bool:
    """Whether nothing is known to have gone wrong: it succeeded, goes on, or was ended early."""
    if evidence.run.get("outcome") in ("succeeded", "interrupted", "stopped"):
        return True
    failed = (evidence.status or {}).get("state") == "failed"
    return evidence.run.get("outcome") is None and not failed


def _how_it_is(evidence: Evidence) -> str:
    outcome, state = evidence.run.get("outcome"), evidence.run.get("state")
    if outcome == "succeeded":
        return "the run succeeded"
    if outcome == "stopped":
        return f"a limit of the job ended the run: {evidence.run.get('error')}"
    if outcome == "interrupted":
        return "the run was interrupted by who started it"
    return f"the run has not ended, as far as is known here: {state}"


# --- the first error ---------------------------------------------------------------------------


def _find_failure(evidence: Evidence) -> Failure:
    """Look where a run can break: training, configuration with staging in it, what deploy saw."""
    status = evidence.status or {}
    if error := status.get("error"):
        return _of_training(evidence, error)
    staging = next((report for report in evidence.staging if report.get("error")), None)
    failed = failed_tasks(evidence.messages)
    if staging and (not failed or "dataset" in failed[0].task):
        return _of_staging(staging, failed)
    if failed:
        return _of_contextualization(failed[0])
    return _of_deploy(evidence)


def _of_training(evidence: Evidence, error: Mapping[str, Any]) -> Failure:
    message = str(error.get("message") or "no cause given")
    task, node = error.get("task"), error.get("node")
    tasks = (evidence.status or {}).get("tasks") or {}
    log = evidence.logs.get(str(task)) or "\n".join(map(str, error.get("log_tail") or ()))
    cause = _earlier_cause(evidence, str(task)) if _PEER_LOST.search(_tell(log)) else None
    if cause:
        task, log = cause, evidence.logs[cause]
        node, code = tasks[cause].get("node"), tasks[cause].get("exit_code")
        message = f"{cause} ended with exit code {code}; {message}"
    lines = excerpt(log)
    code = tasks.get(task, {}).get("exit_code")
    time = _time_of_failure(evidence.events, task)
    return Failure(message, verdicts.judge(message, lines, code), task, node, time, lines)


def _earlier_cause(evidence: Evidence, task: str) -> str | None:
    """Return a failed task whose log has an error of its own, when `task` only lost its peer."""
    failed = [e["task"] for e in evidence.events if e.get("state") == "failed" and e.get("task")]
    others = (name for name in dict.fromkeys(failed) if name != task)
    return next((n for n in others if _has_own_error(evidence.logs.get(n, ""))), None)


def _has_own_error(log: str) -> bool:
    return _TRACEBACK in log and not _PEER_LOST.search(_tell(log))


def _tell(log: str) -> str:
    """The last line of the log's last traceback, empty when there is none."""
    found = excerpt(log) if _TRACEBACK in log else []
    return found[-1] if found else ""


def _time_of_failure(events: Iterable[Mapping[str, Any]], task: str | None) -> str | None:
    """When the task is first said to have failed, else when the run is."""
    events = list(events)
    of_task = (e["time"] for e in events if task and e.get("task") == task and _is_bad(e))
    of_run = (e["time"] for e in events if e.get("event") == "state" and _is_bad(e))
    return next(of_task, None) or next(of_run, None)


def _is_bad(event: Mapping[str, Any]) -> bool:
    return event.get("state") in ("failed", "lost") or event.get("event") in ("lost", "hung")


def _of_staging(report: Mapping[str, Any], failed: Sequence[FailedTask]) -> Failure:
    message = str(report["error"])
    host = failed[0].host if failed else f"share {report.get('share')}"
    verdict = verdicts.judge(message, ())
    return Failure(f"staging failed: {message}", verdict, "staging", host, report.get("finished"))


def _of_contextualization(failed: FailedTask) -> Failure:
    verdict = verdicts.judge_contextualization(failed.task, failed.message)
    name = failed.task.rpartition(" : ")[2]
    message = f"contextualization failed at “{name}”: {failed.message}"
    return Failure(message, verdict, failed.task, failed.host, failed.time, failed.lines)


def _of_deploy(evidence: Evidence) -> Failure:
    """Only the control side knows: what it told the ledger."""
    error = (evidence.run.get("summary") or {}).get("error") or {}
    message = str(evidence.run.get("error") or error.get("message") or "no cause is known")
    lines = [str(line) for line in error.get("log_tail") or ()][-LINES:]
    task, node, time = error.get("task"), error.get("node"), _noticed(evidence)
    if message.startswith("contextualization failed"):
        failed = failed_tasks("\n".join(lines))
        if failed:
            found = _of_contextualization(failed[0])
            return Failure(message, found.verdict, found.task, found.node, time, lines)
    return Failure(message, verdicts.judge(message, lines), task, node, time, lines)


def _noticed(evidence: Evidence) -> str | None:
    """When the control side knew: its call failed, or it began to destroy, or it wrote last."""
    failed = (call.get("ended") for call in evidence.journal if call.get("outcome") == "failed")
    destroys = (c.get("intended") for c in evidence.journal if c.get("action") == "destroy")
    return next(failed, None) or next(destroys, None) or evidence.run.get("updated")


# --- logs --------------------------------------------------------------------------------------


def failed_tasks(messages: str) -> list[FailedTask]:
    """Return the Ansible tasks that failed and were not ignored, oldest first where they say when.

    IM's messages are ordered by node, not by time.
    """
    found: list[FailedTask] = []
    task, time, begin = "", None, 0
    lines = [line.rstrip() for line in messages.splitlines() if line.strip()]
    for number, (line, after) in enumerate(zip(lines, [*lines, ""][1:], strict=True)):
        if named := TASK.match(line):
            task, time, begin = named["name"], _time_of_task(after), number
        elif FATAL.match(line) and after != IGNORED and (host := _FATAL_LINE.match(line)):
            shown = tail("\n".join(lines[begin:]), LINES)
            found.append(FailedTask(task, host["host"], _ansible_message(line), time, shown))
    return sorted(found, key=lambda failed: failed.time or "9")


def _time_of_task(line: str) -> str | None:
    """The time in `Saturday 28 November 2026  05:14:54.027859`, which follows a task's name."""
    stamp = _STAMP.match(line)
    try:
        return datetime.strptime(stamp[1], "%d %B %Y %H:%M:%S").isoformat() + "Z" if stamp else None
    except ValueError:
        return None


def _ansible_message(line: str) -> str:
    """What went wrong, from `fatal: [host]: FAILED! => {…}`: the last line that was printed."""
    text = line.partition("=> ")[2]
    try:
        result = json.loads(text)
    except ValueError:
        return text[:300] or line[:300]
    printed = str(result.get("stderr") or result.get("module_stderr") or "").strip()
    message = str(result.get("msg") or "failed")
    if printed and message in ("non-zero return code", "MODULE FAILURE"):
        message = printed.splitlines()[-1]
    return " ".join(message.split())[:600]


def excerpt(log: str) -> list[str]:
    """Return the lines that explain a failure: the last traceback with its causes, or the end."""
    lines = [line.rstrip() for line in log.splitlines()]
    starts = [n for n, line in enumerate(lines) if line.startswith(_TRACEBACK)]
    if not starts:
        return lines[-LINES:]
    first = starts[-1]
    for earlier in reversed(starts[:-1]):
        if not any(line.startswith(_CHAINED) for line in lines[earlier:first]):
            break
        first = earlier
    last = next((n for n in range(starts[-1] + 1, len(lines)) if lines[n][:1].strip()), len(lines))
    return lines[first : last + 1][-LINES:]


# --- the rest of the page ----------------------------------------------------------------------


def _error(failure: Failure | None) -> dict[str, Any] | None:
    if failure is None:
        return None
    return {
        "message": failure.message,
        "task": failure.task,
        "node": failure.node,
        "time": failure.time,
        "lines": list(failure.lines),
    }


def _advice(evidence: Evidence, failure: Failure | None, verdict: Verdict) -> list[str]:
    run, state = evidence.run["run"], evidence.run.get("state")
    task = (failure.task if failure else None) or "chief-0"
    advice = [line.replace("{run}", run).replace("{task}", task) for line in verdict.advice]
    if state == "kept":
        advice.append(f"the nodes still cost: `mayfly destroy {run}` once they are not needed")
    elif state != "destroyed" and evidence.run.get("outcome"):
        advice.append(f"the nodes are not destroyed yet: `mayfly destroy {run}`")
    return advice


def _phases(evidence: Evidence) -> list[dict[str, Any]]:
    """Seconds by phase: what deploy measured, else what the run says of itself."""
    measured = (evidence.run.get("summary") or {}).get("phases")
    phases = measured or (evidence.status or {}).get("phases") or {}
    return [{"name": n, "seconds": round(float(s), 1)} for n, s in phases.items() if s and s >= 0.1]  # noqa: PLR2004


def _timeline(evidence: Evidence, failure: Failure | None) -> list[dict[str, Any]]:
    """Everything with a time, oldest first; what has none stands before the nodes' end."""
    tasks = failed_tasks(evidence.messages)[:10] if failure else []
    failed = [_entry(f.time, f.host, f"failed: {f.task}: {f.message}", bad=True) for f in tasks]
    entries = [*_of_ledger(evidence), *_of_staging_reports(evidence), *failed]
    entries += map(_of_event, evidence.events)
    timed = sorted((e for e in entries if e["time"]), key=lambda entry: str(entry["time"])[:19])
    place = next((n for n, e in enumerate(timed) if e["what"].startswith("destroy")), len(timed))
    return [*timed[:place], *(e for e in failed if not e["time"]), *timed[place:]]


def _entry(time: str | None, where: str, what: str, bad: bool = False) -> dict[str, Any]:
    return {"time": time, "where": where, "what": what, "bad": bad}


def _of_ledger(evidence: Evidence) -> list[dict[str, Any]]:
    run = evidence.run
    entries = [_entry(run.get("created"), "control", "the run was registered")]
    for call in evidence.journal:
        what = f"{call['action']} {call['target']}"
        entries.append(_entry(call.get("intended"), "control", f"{what}: asked for"))
        if call.get("ended"):
            bad = call.get("outcome") == "failed"
            detail = f": {call['detail']}" if call.get("detail") else ""
            entries.append(
                _entry(call["ended"], "control", f"{what}: {call['outcome']}{detail}", bad)
            )
    if run.get("outcome"):
        why = f": {run['error']}" if run.get("error") and not evidence.status else ""
        text = f"last change of the ledger's record: {run.get('state')}, {run['outcome']}{why}"
        entries.append(_entry(run.get("updated"), "control", text))
    return entries


def _of_staging_reports(evidence: Evidence) -> list[dict[str, Any]]:
    entries = []
    for report in evidence.staging:
        where = f"share {report.get('share')}"
        entries.append(_entry(report.get("started"), where, "staging begins"))
        if report.get("finished"):
            size = f"{(report.get('bytes_done') or 0) / 2**20:,.0f} MiB"
            text = f"staging failed: {report['error']}" if report.get("error") else f"staged {size}"
            entries.append(_entry(report["finished"], where, text, bool(report.get("error"))))
    return entries


def _of_event(event: Mapping[str, Any]) -> dict[str, Any]:
    """Any event of events.jsonl, also one of a kind that is not known here."""
    known = {"time", "run", "event", "task", "node", "error", "state"}
    where = " on ".join(str(event[key]) for key in ("task", "node") if event.get(key)) or "run"
    others = ((k, v) for k, v in event.items() if k not in known and v is not None)
    message = (event.get("error") or {}).get("message")
    told = (event.get("state"), *(f"{k.replace('_', ' ')} {v}" for k, v in others), message)
    text = ", ".join(str(part) for part in told if part)
    return _entry(event.get("time"), where, f"{event.get('event')}: {text}", _is_bad(event))
