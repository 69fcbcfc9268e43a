"""The machines of an inventory as a place: what of a run is on them, and how it is taken away.

Nothing on them is destroyed: a run's units are stopped, and what is its own is removed, its keys to
S3 first of all. HDFS, what the roles installed, and what others have there stays.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mayfly import inventory
from mayfly.errors import RemoteError, UserError
from mayfly.inventory import Hosts
from mayfly.own import playbook
from mayfly.sweep.things import Listing, Marks, Refused, Thing, Unlisted, now

HERE = Path(__file__).parent
KINDS = ("unit", "S3 keys", "state", "HDFS directory", "claim")
SILENT = "no answer"


@dataclass(frozen=True)
class Answers:
    """What machines said, and why the others said nothing: host → JSON document, or reason."""

    said: Mapping[str, Mapping[str, Any]]
    silent: Mapping[str, str]


@dataclass
class Machines:
    """The machines of one inventory, all of them or those that a run began with."""

    path: Path
    environ: Mapping[str, str]
    only: tuple[str, ...] = ()
    grace_s: float = 0.0
    lag_s: float = 0.0
    _refusals: dict[str, str] = field(default_factory=dict)
    _freed: bool = False

    @property
    def name(self) -> str:
        """What it is, for people."""
        return f"the machines of {self.path}" + (f": {', '.join(self.only)}" if self.only else "")

    def hosts(self) -> Hosts:
        """Return the machines that the inventory has now. Raises UserError."""
        return inventory.read(self.path)

    def require_free(self) -> None:
        """Raise an error when a machine does not answer, cannot be used, or a run has it."""
        answers = self._ask("look", "nobody")
        self._require_all(answers)
        bare = [host for host, answer in answers.said.items() if not answer["systemd"]]
        if bare:
            raise UserError(f"{', '.join(bare)} of {self.path} has no systemd", "take another one")
        _require_unused(answers, "")

    def claim(self, run: str) -> None:
        """Take all machines for a run; raises an error when one is not to be had.

        A machine that was taken before another one was refused is given back by `remove`.
        """
        answers = self._ask("claim", run)
        self._require_all(answers)
        _require_unused(answers, run)

    def look(self, marks: Marks) -> Listing:
        """List what is on the machines of the one run that has these marks."""
        (run,) = marks.runs or ("",)
        self._freed = False
        try:
            answers = self._ask("look", run)
        except (RemoteError, UserError) as error:
            unlisted = tuple(Unlisted(kind, str(error)) for kind in KINDS)
            return Listing(self.name, (KINDS,), (), unlisted, taken=now())
        things = [
            Thing(kind, f"{what} on {host}", self.name, run, state)
            for host, answer in answers.said.items()
            for kind, what, state in answer["things"]
        ]
        return Listing(self.name, (KINDS,), tuple(things), _unlisted(answers), taken=now())

    def remove(self, thing: Thing) -> None:
        """Free all machines of the thing's run, once after each look. Raises Refused."""
        if not self._freed:
            self._freed = True
            answers = self._ask("free", thing.run)
            told = {host: said["refusal"] for host, said in answers.said.items() if said["refusal"]}
            self._refusals = {**answers.silent, **told}
        host = thing.id.rpartition(" on ")[2]
        if host in self._refusals:
            raise Refused(f"{thing}: {self._refusals[host]}", for_good=True)

    def _require_all(self, answers: Answers) -> None:
        if answers.silent:
            host, why = next(iter(answers.silent.items()))
            others = len(answers.silent) - 1
            more = f" (and {others} more)" if others else ""
            raise RemoteError(
                f"machine {host}{more} cannot be used: {why}",
                f"try `ansible -i {self.path} -b -m ping all`",
            )

    def _ask(self, verb: str, run: str) -> Answers:
        """Have each machine do something; see on_machine.py. Raises RemoteError, UserError."""
        hosts = self.hosts()
        asked = self.only or hosts.names
        with tempfile.TemporaryDirectory(prefix="mayfly-ask-") as directory:
            given = {
                "own_hosts": asked,
                "own_script": str(HERE / "on_machine.py"),
                "own_verb": verb,
                "own_run": run,
                "own_namenode": min(hosts.ps or hosts.worker),
                "own_answers": directory,
            }
            words = ["-i", str(self.path), "-e", json.dumps(given), str(HERE / "ask.yml")]
            output = playbook.run(words, playbook.environment(self.environ))
            said = _read(Path(directory))
        why = playbook.reasons(output)
        gone = f"{self.path} no longer has it"
        silent = {
            host: why.get(host, SILENT) if host in hosts.names else gone
            for host in asked
            if host not in said
        }
        return Answers({host: said[host] for host in asked if host in said}, silent)


@dataclass(frozen=True)
class OwnMachines:
    """An inventory in the part of an account: its regions are lists of its machines."""

    path: Path
    environ: Mapping[str, str]

    def who(self) -> str | None:
        """Return None: no account is behind it."""
        return None

    def place(self, region: str | None) -> Machines:
        """Return the machines that are named, with commas between; all of them for None."""
        return Machines(self.path, self.environ, tuple(region.split(",")) if region else ())


def _read(directory: Path) -> dict[str, Mapping[str, Any]]:
    found = {}
    for path in directory.glob("*.json"):
        document = json.loads(path.read_text(encoding="utf-8"))
        answer = document["answer"]
        found[document["host"]] = json.loads(answer) if isinstance(answer, str) else answer
    return found


def _require_unused(answers: Answers, run: str) -> None:
    used = {host: answer["used_by"] for host, answer in answers.said.items()}
    for host, other in used.items():
        if other and other != run:
            raise UserError(
                f"machine {host} is in use by run {other}",
                f"wait for its end, or `mayfly destroy {other}` where it was started",
            )


def _unlisted(answers: Answers) -> tuple[Unlisted, ...]:
    missing = []
    if answers.silent:
        why = "; ".join(f"{host}: {reason}" for host, reason in answers.silent.items())
        missing = [Unlisted(kind, why) for kind in KINDS]
    told = [answer["hdfs"] for answer in answers.said.values() if answer.get("hdfs")]
    if told and not missing:
        missing = [Unlisted("HDFS directory", told[0])]
    return tuple(missing)
