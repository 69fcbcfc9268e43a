"""What end-to-end tests are made of: commands as a user types them, and eyes on the machine."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import testenv
from mayfly.local import platform as local

ROOT = Path(__file__).resolve().parents[2]


ONE_RUN_S = 1500


@dataclass(frozen=True)
class Outcome:
    """What a command left: exit code, the JSON document of its standard output, its messages."""

    code: int
    document: dict[str, Any]
    messages: str


def run(
    *command: str,
    env: dict[str, str] | None = None,
    cwd: Path = ROOT,
    timeout: float = ONE_RUN_S,
) -> Outcome:
    """Run a command whose standard output is one JSON document (or nothing)."""
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**testenv.environment(), **(env or {})},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    print(done.stderr[-6000:], file=sys.stderr)
    return Outcome(done.returncode, json.loads(done.stdout or "{}"), done.stderr)


def mayfly(
    *arguments: str, env: dict[str, str] | None = None, timeout: float = ONE_RUN_S
) -> Outcome:
    return run(str(ROOT / ".venv/bin/mayfly"), *arguments, env=env, timeout=timeout)


def start(*arguments: str) -> subprocess.Popen[str]:
    """Begin a command whose output is read later."""
    return subprocess.Popen(
        [str(ROOT / ".venv/bin/mayfly"), *arguments],
        cwd=ROOT,
        env=testenv.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def docker(platform: local.LocalPlatform, *arguments: str) -> str:
    command = ["docker", "-H", platform.docker_host, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def nodes(platform: local.LocalPlatform) -> list[str]:
    """Names of the containers that are nodes of some infrastructure, stopped ones too."""
    shown = docker(
        platform, "ps", "-a", "--filter", "label=im.infrastructure", "--format", "{{.Names}}"
    )
    return shown.split()


def networks(platform: local.LocalPlatform) -> list[str]:
    shown = docker(
        platform, "network", "ls", "--filter", "label=im.infrastructure", "--format", "{{.Name}}"
    )
    return shown.split()


class CanaryWatch(threading.Thread):
    """Looks for the canary while a run lives: in command lines and in the nodes' journals.

    Nodes are containers, so the machine's /proc shows their processes too. A file on a node may
    hold the secret only when it is root's and closed to everybody else: by its own mode or by a
    directory above it, which another user is asked to find out. That is done on the node and at
    once, since Ansible's temporary files live for less than a second.
    """

    JOURNAL = "journalctl --no-pager -q 2>/dev/null | grep -aF {canary} | head -n 3; true"
    FILES = (
        "grep -rlsF {canary} /etc /var /opt/mayfly/lib /tmp /root /home 2>/dev/null"
        ' | while read -r path; do if runuser -u nobody -- test -r "$path"'
        ' || find "$path" -prune ! -user root 2>/dev/null | grep -q .'
        """; then stat -c '%a %U %n' "$path" 2>/dev/null || echo "? ? $path"; fi; done; true"""
    )

    def __init__(self, platform: local.LocalPlatform) -> None:
        super().__init__(daemon=True)
        self.platform = platform
        self.finished = threading.Event()
        self.found: set[str] = set()
        self.looked_at_processes = 0
        self.looked_into_nodes = 0

    def __enter__(self) -> CanaryWatch:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.finished.set()
        self.join(timeout=60)

    def run(self) -> None:
        turn = 0
        while not self.finished.wait(1):
            turn += 1
            self.look_at_processes()
            if turn % 30 == 0:
                self.look_into_nodes()

    def look_at_processes(self) -> None:
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                line = path.read_bytes()
            except OSError:
                continue
            self.looked_at_processes += 1
            # The search itself, in look_into_nodes, carries the canary only on standard input.
            if testenv.CANARY.encode() in line:
                self.found.add(f"process: {line[:60]!r}")

    def look_into_nodes(self) -> None:
        for name in nodes(self.platform):
            journal, files = (self.on_node(name, what) for what in (self.JOURNAL, self.FILES))
            self.found |= {f"journal of {name}: {line}" for line in journal or ()}
            self.found |= {f"file on a node: {line}" for line in files or ()}
            self.looked_into_nodes += journal is not None and files is not None

    def on_node(self, name: str, script: str) -> list[str] | None:
        """The lines that a script prints, the canary masked; None when the node has gone."""
        program = script.format(canary='"$canary"')
        command = ["docker", "-H", self.platform.docker_host, "exec", "-i", name, "sh", "-c"]
        done = subprocess.run(
            [*command, f"read -r canary; {program}"],
            input=testenv.CANARY + "\n",
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:  # the message of the engine may be on standard output
            return None
        return done.stdout.replace(testenv.CANARY, "CANARY").splitlines()


def publish_repository(platform, bucket, tmp_path: Path, name: str, files: dict[str, str]) -> str:
    """A Git repository behind HTTP, in the bucket that all may read; returns its URL."""
    work, bare = tmp_path / "work", tmp_path / f"{name}.git"
    for path, text in files.items():
        (work / path).parent.mkdir(parents=True, exist_ok=True)
        (work / path).write_text(text)
    git = ["git", "-C", str(work), "-c", "user.name=Test", "-c", "user.email=test@localhost"]
    subprocess.run(["git", "init", "-q", "-b", "main", str(work)], check=True)
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "program"], check=True)
    subprocess.run(["git", "clone", "-q", "--bare", str(work), str(bare)], check=True)
    subprocess.run(["git", "-C", str(bare), "update-server-info"], check=True)
    for path in bare.rglob("*"):
        if path.is_file():
            key = f"repositories/{bare.name}/{path.relative_to(bare)}"
            bucket.upload_file(str(path), "mayfly-public", key)
    return f"git+{platform.s3_endpoint}/mayfly-public/repositories/{bare.name}@main"
