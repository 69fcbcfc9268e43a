"""Machines of the user's own that are only files: each answers as on_machine.py would."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mayfly.own import on_machine

HOSTS = "[ps]\np\n[worker]\na\nb\n"


@dataclass
class FakeMachines:
    """Stands in for ansible-playbook on ask.yml: host → directory in which its files are."""

    roots: dict[str, Path]
    down: set[str] = field(default_factory=set)
    asked: list[tuple[str, str]] = field(default_factory=list)

    def run(self, words: Sequence[str], environ: object) -> str:
        given = json.loads(words[words.index("-e") + 1])
        self.asked.append((given["own_verb"], given["own_run"]))
        lines = []
        for number, host in enumerate(given["own_hosts"]):
            if host in self.down or host not in self.roots:
                why = json.dumps({"msg": "Failed to connect: Connection refused"})
                lines.append(f"fatal: [{host}]: UNREACHABLE! => {why}")
                continue
            machine = on_machine.Machine(self.roots[host], host == given["own_namenode"])
            answer = json.dumps(getattr(machine, given["own_verb"])(given["own_run"]))
            path = Path(given["own_answers"]) / f"{number}.json"
            path.write_text(json.dumps({"host": host, "answer": answer}))
        return "\n".join([*lines, "PLAY RECAP"])


def make(tmp_path: Path, monkeypatch) -> tuple[Path, FakeMachines]:
    """Three machines with nothing on them, and their inventory."""
    path = tmp_path / "hosts.ini"
    path.write_text(HOSTS)
    roots = {host: tmp_path / "machines" / host for host in "pab"}
    for root in roots.values():
        for name in ("run/systemd/system", "etc/mayfly", "var/lib/mayfly/tasks"):
            (root / name).mkdir(parents=True)
    fake = FakeMachines(roots)
    monkeypatch.setattr("mayfly.own.playbook.run", fake.run)
    monkeypatch.setattr(on_machine, "_systemctl", lambda *_: "")
    content = {"ps": {"hosts": ["p"]}, "worker": {"hosts": ["a", "b"]}}
    monkeypatch.setattr("mayfly.inventory.listed", lambda path: content)
    return path, fake


def leave(fake: FakeMachines, run: str) -> None:
    """What a run has on the machines once its playbooks have ended."""
    for root in fake.roots.values():
        (root / on_machine.TOPOLOGY).write_text(json.dumps({"run": run}))
        (root / on_machine.KEYS).write_text("secret")
        (root / on_machine.STATE / run).mkdir()
