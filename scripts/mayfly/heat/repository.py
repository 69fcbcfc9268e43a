"""A look into the Git repository before nodes do it: they would find out only minutes later."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path, PurePosixPath

from mayfly.errors import UserError
from mayfly.heat.job import HeatJob

LIMIT_S = 60
SKIP = "or skip this look with --no-check, when only the nodes can reach it"


class NotThere(UserError):
    """The repository, or what nodes need of it, is not to be found."""


def check_repository(job: HeatJob) -> None:
    """Raise NotThere when the repository cannot be read, or lacks what nodes will run.

    Only names are fetched (a shallow clone without files, where the server can do that).
    """
    if not shutil.which("git"):
        raise UserError("git is not installed here", f"install it, {SKIP}")
    with tempfile.TemporaryDirectory(prefix="mayfly-heat-") as directory:
        clone = Path(directory, "repository")
        commit = _fetch(job, clone)
        for name in ("requirements.txt", job.entrypoint):
            path = str(PurePosixPath(job.directory, name))
            if _git("cat-file", "-e", f"{commit}:{path}", at=clone).returncode:
                raise NotThere(
                    f"there is no {path!r} in {job.repository}{_at(job)}",
                    "correct the directory or the entrypoint, or push the file",
                )


def _fetch(job: HeatJob, clone: Path) -> str:
    """Fetch the names of the ref into `clone`; returns what to call it there."""
    _start(clone)
    wanted = ("--", job.repository, job.ref or "HEAD")
    done = _git("fetch", "-q", "--depth=1", "--filter=blob:none", *wanted, at=clone)
    if "dumb http" in done.stderr:  # a plain web server has no part of a history to give
        _start(clone)
        done = _git("fetch", "-q", *wanted, at=clone)
    if done.returncode and job.ref:
        # A short commit has no name on the server: look for it in the whole history.
        _start(clone)
        everything = ("refs/heads/*:refs/heads/*", "refs/tags/*:refs/tags/*")
        whole = _git("fetch", "-q", "--", job.repository, *everything, at=clone)
        if whole.returncode == 0:
            if _git("cat-file", "-e", f"{job.ref}^{{commit}}", at=clone).returncode:
                raise NotThere(
                    f"there is no {job.ref!r} in {job.repository}",
                    "give a branch, tag or commit that is there",
                )
            return job.ref
        done = whole
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no answer"]
        raise NotThere(
            f"{job.repository} cannot be cloned: {lines[-1]}", f"correct the URL, {SKIP}"
        )
    return "FETCH_HEAD"


def _start(clone: Path) -> None:
    """An empty repository: one that has tried --filter expects all servers to know it."""
    shutil.rmtree(clone, ignore_errors=True)
    _git("init", "-q", "--bare", str(clone))


def _git(*words: str, at: Path | None = None) -> subprocess.CompletedProcess[str]:
    # No prompt: an unknown repository makes servers ask for a password.
    environment = {**os.environ, "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
    place = ["-C", str(at)] if at else []
    command = ["git", *place, "-c", "credential.helper=", *words]
    try:
        return subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"no answer within {LIMIT_S} s")


def _at(job: HeatJob) -> str:
    return f" at {job.ref}" if job.ref else ""
