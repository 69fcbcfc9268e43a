"""Who is at fault for a failure, and what to do next: rules over the words that our code writes.

The first rule that matches decides, so those that name a cause stand above those that only name
where it showed. Every rule has a realistic document in tests/unit/test_autopsy.py.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

PROGRAM, DATA, LIMITS, INFRASTRUCTURE, NONE = "program", "data", "limits", "infrastructure", "none"
TITLES = {
    PROGRAM: "the training program",
    DATA: "the data",
    LIMITS: "a limit of the job",
    INFRASTRUCTURE: "the infrastructure",
    NONE: "nobody",
}


@dataclass(frozen=True)
class Verdict:
    """Who is at fault, why that is thought, and what to do; `{run}` and `{task}` are filled in."""

    fault: str
    why: str
    advice: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Rule:
    pattern: str
    verdict: Verdict


def _rule(pattern: str, fault: str, why: str, *advice: str) -> _Rule:
    return _Rule(pattern, Verdict(fault, why, advice))


# What the message of the failure says.
_MESSAGES = (
    _rule(
        r"took longer than max_duration",
        LIMITS,
        "the run was ended because it had its time: limits.max_duration",
        "see in the timeline whether training went on; if so, give it longer:"
        " --set limits.max_duration=…",
        "or ask for less: --steps, or more workers: --workers",
    ),
    _rule(
        r"limits\.idle",
        LIMITS,
        "the run was ended because its step stood still for limits.idle",
        "read the tasks' logs at the time of the last step: `mayfly logs {run} chief-0`",
        "a program with long pauses between steps needs more: --set limits.idle=…",
    ),
    _rule(
        r"HDFS is full|could only be written to \d|No space left|ENOSPC|disk.?full|DiskOutOfSpace",
        INFRASTRUCTURE,
        "a disk, or HDFS as a whole, is full",
        "ask for larger disks, or more nodes: nodes.worker.instance, --workers",
        "keep fewer checkpoints in the program",
    ),
    _rule(
        r"does not match its manifest|ends within a record|not a dataset:|no manifest\.json under|"
        r"nothing under s3://|is not a manifest|files of another dataset|DataLossError|"
        r"[Cc]orrupted record|truncated record|CRC|InvalidTFRecord",
        DATA,
        "the dataset is not what it says it is",
        "put it again from a good source: `mayfly data put SOURCE s3://…`",
    ),
    _rule(
        r"AccessDenied|access denied|does not know the access key|secret key .* is wrong|"
        r"session token .* (has expired|is not valid)|no such bucket|NoSuchBucket",
        INFRASTRUCTURE,
        "the S3 service refused what the run needs of it",
        "check the keys and the bucket's policy: reading the data, writing below the run's URI",
    ),
    _rule(
        r"export failed",
        INFRASTRUCTURE,
        "training had succeeded; copying the model to S3 did not",
        "when the nodes are kept, finish it: `mayfly export {run}`",
    ),
    _rule(
        r"HDFS (does not answer|has not answered|at \S+ failed)|cannot reach HDFS|"
        r"HDFS is .* of \d+ datanodes|Name node is in safe mode",
        INFRASTRUCTURE,
        "HDFS was lost, and with it the tasks' notice board",
        "look at the first parameter server's node, which runs the NameNode",
        "run the job again: nothing of it was wrong",
    ),
    _rule(
        r"IM does not answer|IM was restarted",
        INFRASTRUCTURE,
        "the IM service that makes and configures nodes was gone for too long",
        "see that it runs, then run the job again: nothing of it was wrong",
    ),
    _rule(
        r"the run has given no sign of life|lost sight|nodes were not made|no node came up|"
        r"IM does not|IM could not|powered off",
        INFRASTRUCTURE,
        "nodes could not be made, or went away",
        "look at the cloud: quota, spot nodes taken back, a network that is down",
        "run the job again: nothing of it was wrong",
    ),
    _rule(
        r"no new global step|the run cannot go on without it",
        INFRASTRUCTURE,
        "a task that the others need was gone",
        "see in the timeline which task and node fell silent first",
        "run the job again: nothing of it was wrong, unless the program itself waits for ever",
    ),
    _rule(
        r"^preflight: .* port \d+: in use by",
        INFRASTRUCTURE,
        "a port that the engine needs is taken on a node: nothing was trained",
        "end the process that the message names, or use nodes of the run's own",
    ),
    _rule(
        r"^preflight: ",
        INFRASTRUCTURE,
        "the nodes do not reach each other as the engine needs: nothing was trained",
        "read what preflight found: from which node to which, the port and the reason",
        "look at firewalls and security groups of the nodes' network, /etc/hosts, and the clocks",
    ),
    _rule(
        r"training did not start within",
        INFRASTRUCTURE,
        "the tasks never found each other",
        "read the chief's log: `mayfly logs {run} chief-0`",
        "a program that prepares for longer than that has to do it before: put the data ready-made",
    ),
)

# What the log lines of the failed task say, when the message only says that it ended.
_LINES = (
    _rule(
        r"ModuleNotFoundError|ImportError: cannot import|No module named",
        PROGRAM,
        "the program imports what is not installed",
        "name the package in the requirements.txt beside the program",
    ),
    _rule(
        r"DataLossError|[Cc]orrupted record|truncated record",
        DATA,
        "the program met records that cannot be read",
        "put the dataset again from a good source: `mayfly data put SOURCE s3://…`",
    ),
    _rule(
        r"No space left|ENOSPC|could only be written to \d",
        INFRASTRUCTURE,
        "a disk, or HDFS as a whole, is full",
        "ask for larger disks, or more nodes: nodes.worker.instance, --workers",
    ),
    _rule(
        r"ResourceExhaustedError|MemoryError|Cannot allocate memory|CUDA_ERROR_OUT_OF_MEMORY",
        PROGRAM,
        "the program asked for more memory than its node has",
        "a smaller batch: --set trainer.args.batch_size=…",
        "or larger nodes: nodes.worker.instance",
    ),
    _rule(
        r"UnavailableError|Connection reset by peer|Socket closed|failed to connect to all",
        INFRASTRUCTURE,
        "the task lost the connection to another one",
        "see in the timeline which task ended first, and read its log",
    ),
)

# The part of a node that contextualization was at, by the role in the task's name.
_ROLES = {
    "trainer": (
        r"Check out the program|Require the entrypoint|Install the program's requirements",
        Verdict(
            PROGRAM,
            "the program could not be installed as the job file names it",
            ("check trainer.program, trainer.entrypoint and the program's requirements.txt",),
        ),
    ),
    "dataset": (
        r"does not match its manifest|ends within a record|manifest|not a dataset|nothing under",
        Verdict(
            DATA,
            "the dataset is not what it says it is",
            ("put it again from a good source: `mayfly data put SOURCE s3://…`",),
        ),
    ),
}
_CONTEXTUALIZATION = Verdict(
    INFRASTRUCTURE,
    "a node could not be configured",
    (
        "read the failed task above: packages, network and disks of that node",
        "look at a node that stays: `mayfly deploy … --keep`, then `mayfly ssh`",
    ),
)
_KILLED = Verdict(
    INFRASTRUCTURE,
    "the task was killed from outside, most often by the kernel for want of memory",
    (
        "larger nodes: nodes.worker.instance",
        "or a smaller batch: --set trainer.args.batch_size=…",
    ),
)
_BAD_COMMAND = Verdict(
    PROGRAM,
    "the program does not take the arguments that it was given (exit code 2)",
    ("compare trainer.args in the job file with what the program takes",),
)
_PROGRAM = Verdict(
    PROGRAM,
    "the program itself ended with an error, again and again",
    (
        "mend the program where the lines of the first error point",
        "read the whole log: `mayfly logs {run} {task}`",
    ),
)
_HUNG = Verdict(
    PROGRAM,
    "the program did not answer or step any more, though its node did",
    ("look for a deadlock or an endless wait; `mayfly logs {run} {task}` has what it said last",),
)
UNKNOWN = Verdict(
    INFRASTRUCTURE,
    "nothing that is known names the program or the data",
    ("read the timeline and the logs: `mayfly logs {run}`",),
)
KILLED_CODES = (-9, 137)
_ENDED = re.compile(r"ended (with exit code (?P<code>-?\d+)|without an exit code)")
_HANGS = re.compile(r"^supervisor: \S+ hangs:", re.MULTILINE)


def judge(message: str, lines: Sequence[str], exit_code: int | None = None) -> Verdict:
    """Return the verdict on a failure of a run, from its message and the failed task's lines."""
    text = "\n".join(lines)
    ended = _ENDED.search(message)
    if ended is None:
        return _first(_MESSAGES, message) or _first(_MESSAGES, text) or UNKNOWN
    code = int(ended["code"]) if ended["code"] else exit_code
    if found := _first(_LINES, text):
        return found
    if _HANGS.search(text):
        return _HUNG
    if code in KILLED_CODES:
        return _KILLED
    return _BAD_COMMAND if code == 2 else _PROGRAM  # noqa: PLR2004


def judge_contextualization(task: str, message: str) -> Verdict:
    """Return the verdict on an Ansible task that failed; `task` is `collection.role : name`."""
    role = task.partition(" : ")[0].rpartition(".")[2]
    pattern, verdict = _ROLES.get(role, ("", _CONTEXTUALIZATION))
    if re.search(pattern, f"{task}\n{message}"):
        return verdict
    return _first(_MESSAGES, message) or _CONTEXTUALIZATION


def _first(rules: Sequence[_Rule], text: str) -> Verdict | None:
    return next((rule.verdict for rule in rules if re.search(rule.pattern, text)), None)
