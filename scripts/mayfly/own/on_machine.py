"""What is done on a machine of the user's own, as root: look at it, claim it, free it of a run.

Ansible's module `script` sends this file there, so it imports nothing of ours. It prints one JSON
document. A machine is a run's by the claim, a file that a restart takes away, or else by the
topology document that role trainer has left.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import urllib.error
import urllib.request
from fnmatch import fnmatch
from http import HTTPStatus
from pathlib import Path
from typing import Any

CLAIM = "run/mayfly-run"
TOPOLOGY = "etc/mayfly/cluster.json"
KEYS = "etc/mayfly/s3.env"
STATE = "var/lib/mayfly/tasks"
MARKS = ("var/lib/mayfly/ended", "var/lib/mayfly/alive", "etc/mayfly/keep")
# In the order in which they are stopped: who looks after the tasks first, who tells of their
# failure last.
UNITS = (
    "mayfly-deadman.timer",
    "mayfly-run.service",
    "mayfly-export.service",
    "mayfly-task@*.service",
    "mayfly-tensorboard.service",
    "mayfly-preflight.service",
    "mayfly-task-failed@*.service",
)
# These run only while a run goes on; the others stay, or are waiting, after it.
WORKING = ("mayfly-run.service", "mayfly-export.service", "mayfly-task@*.service")
RUN = re.compile(r"[a-z0-9][a-z0-9-]{0,47}")  # it becomes a part of paths that are removed
ACTIVE = ("active", "activating", "deactivating", "reloading")
HDFS_TIMEOUT_S = 30


class Machine:
    """The machine whose file system begins at `root`."""

    def __init__(self, root: Path, namenode: bool) -> None:
        """`namenode`: HDFS has its NameNode here, so here is asked for the run's directory."""
        self.root = root
        self.namenode = namenode

    def look(self, run: str) -> dict[str, Any]:
        """Return whose the machine is, and what is there of `run`: pairs of kind and name."""
        active, owner = self._active(), self._owner()
        working = [unit for unit in active if any(fnmatch(unit, name) for name in WORKING)]
        document: dict[str, Any] = {
            "systemd": (self.root / "run/systemd/system").is_dir(),
            "used_by": self._claim() or (owner or "nobody knows which" if working else None),
            "things": [],
        }
        things = document["things"]
        if owner == run:
            units = {**dict.fromkeys(self._enabled(), "enabled"), **dict.fromkeys(active, "active")}
            things += [["unit", unit, state] for unit, state in sorted(units.items())]
            things += [["S3 keys", f"/{KEYS}", ""]] if (self.root / KEYS).exists() else []
        state = Path(STATE) / run
        things += [["state", f"/{state}", ""]] if (self.root / state).exists() else []
        things += [["claim", f"/{CLAIM}", ""]] if self._claim() == run else []
        try:
            if self._ask_hdfs("GET", "GETFILESTATUS", run):
                things.append(["HDFS directory", f"/mayfly/{run}", ""])
        except OSError as error:
            document["hdfs"] = f"HDFS does not answer: {error}"
        return document

    def claim(self, run: str) -> dict[str, Any]:
        """Take the machine for `run`, unless another one has it: its name is in the answer."""
        path = self.root / CLAIM
        mine = path.with_name(f"{path.name}.{os.getpid()}")
        mine.write_text(run, encoding="utf-8")
        try:
            os.link(mine, path)  # whole or not at all: whoever comes second reads a name
        except FileExistsError:
            pass
        finally:
            mine.unlink()
        return {"used_by": self._claim()}

    def free(self, run: str) -> dict[str, Any]:
        """Stop a run's units and remove what is its own; the claim goes last.

        What other runs or the user have there stays, and so do HDFS and all that was installed.
        """
        if self._owner() == run:
            _systemctl("stop", *UNITS)
            if enabled := self._enabled():
                _systemctl("disable", *enabled)
            _systemctl("reset-failed", *UNITS)
            for name in (KEYS, *MARKS):
                (self.root / name).unlink(missing_ok=True)
        shutil.rmtree(self.root / STATE / run, ignore_errors=True)
        refusal = None
        try:
            self._ask_hdfs("DELETE", "DELETE&recursive=true", run)
        except OSError as error:
            refusal = f"HDFS refuses: {error}"
        if refusal is None and self._claim() == run:
            (self.root / CLAIM).unlink()
        return {"refusal": refusal}

    def _claim(self) -> str | None:
        try:
            return (self.root / CLAIM).read_text(encoding="utf-8").strip() or None
        except OSError:
            return None

    def _topology(self) -> dict[str, Any]:
        try:
            found = json.loads((self.root / TOPOLOGY).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def _owner(self) -> str | None:
        return self._claim() or self._topology().get("run")

    def _active(self) -> list[str]:
        listed = _systemctl("list-units", "--all", "--plain", "--full", "--no-legend", *UNITS)
        rows = [line.split() for line in listed.splitlines()]
        return [row[0] for row in rows if len(row) > 2 and row[2] in ACTIVE]  # noqa: PLR2004

    def _enabled(self) -> list[str]:
        wanted = (self.root / "etc/systemd/system").glob("*.wants/mayfly-*")
        return sorted(path.name for path in wanted if any(fnmatch(path.name, n) for n in UNITS))

    def _ask_hdfs(self, method: str, operation: str, run: str) -> bool:
        """Whether HDFS has a directory of the run's; before there is a topology it has none."""
        address = self._topology().get("namenode", {}).get("http")
        if not (self.namenode and address):
            return False
        url = f"{address}/webhdfs/v1/mayfly/{run}?op={operation}&user.name=hdfs"
        request = urllib.request.Request(url, method=method)
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            direct.open(request, timeout=HDFS_TIMEOUT_S).close()
        except urllib.error.HTTPError as error:
            if error.code == HTTPStatus.NOT_FOUND:
                return False
            raise
        return True


def _systemctl(*words: str) -> str:
    """Run systemctl and return what it printed: its exit code says nothing about many units."""
    done = subprocess.run(["systemctl", *words], capture_output=True, text=True, check=False)
    return done.stdout


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("verb", choices=("look", "claim", "free"))
    parser.add_argument("run")
    parser.add_argument("--namenode", action="store_true")
    parser.add_argument("--root", type=Path, default=Path("/"))
    given = parser.parse_args()
    if not RUN.fullmatch(given.run):
        parser.error(f"no run has the name {given.run!r}")
    machine = Machine(given.root, given.namenode)
    print(json.dumps(getattr(machine, given.verb)(given.run)))


if __name__ == "__main__":
    main()
