from __future__ import annotations

import functools
import http.server
import subprocess
import threading
from pathlib import Path

import pytest

from mayfly.errors import UserError
from mayfly.heat.job import make_job
from mayfly.heat.repository import check_repository

URL = "https://example.org/team/repo.git"


@pytest.fixture(autouse=True)
def repository(tmp_path: Path, monkeypatch) -> Path:
    """A real repository that Git finds under URL."""
    work = tmp_path / "work"
    (work / "code").mkdir(parents=True)
    (work / "code/requirements.txt").touch()
    (work / "code/train.py").touch()
    (work / "alone.py").touch()
    git = ["git", "-C", str(work), "-c", "user.name=T", "-c", "user.email=t@localhost"]
    subprocess.run(["git", "init", "-q", "-b", "main", str(work)], check=True)
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "program"], check=True)
    subprocess.run([*git, "tag", "v1"], check=True)
    settings = tmp_path / "gitconfig"
    subprocess.run(["git", "config", "--file", settings, f"url.{work}.insteadOf", URL], check=True)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(settings))
    return work


def head(work: Path) -> str:
    done = subprocess.run(
        ["git", "-C", work, "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def check(**values: str) -> None:
    base = {"repository": URL, "directory": "code", "entrypoint": "train.py"}
    check_repository(make_job({**base, **values}))


@pytest.mark.parametrize("ref", ["", "main", "v1"])
def test_a_good_repository_passes(ref: str):
    check(ref=ref)


def test_a_commit_passes_long_or_short(repository: Path):
    check(ref=head(repository))
    check(ref=head(repository)[:8])


def test_a_repository_on_a_plain_web_server_passes(repository: Path, tmp_path, monkeypatch):
    bare = tmp_path / "www/repo.git"
    subprocess.run(["git", "clone", "-q", "--bare", repository, bare], check=True)
    subprocess.run(["git", "-C", bare, "update-server-info"], check=True)
    handler = functools.partial(Quiet, directory=str(bare.parent))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}/repo.git"
        settings = ["git", "config", "--file", tmp_path / "gitconfig"]
        subprocess.run([*settings, f"url.{url}.insteadOf", f"{URL}-plain"], check=True)
        for ref in ("", "v1"):
            check(repository=f"{URL}-plain", ref=ref)
        server.shutdown()


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"directory": "."}, "no 'requirements.txt'"),
        ({"directory": "elsewhere"}, "no 'elsewhere/requirements.txt'"),
        ({"entrypoint": "other.py"}, "no 'code/other.py'"),
        ({"ref": "v2"}, "no 'v2'"),
        ({"repository": URL.replace("team", "nobody") + "x"}, "cannot be cloned"),
    ],
)
def test_what_nodes_would_miss_is_said_here(values, says, monkeypatch):
    # The host of the last one does not exist: no network is asked.
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    with pytest.raises(UserError) as error:
        check(**values)
    assert says in str(error.value)


def test_without_git_the_user_is_told(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserError, match="git is not installed"):
        check()
