"""Commands to an engine, with a client that is a fake: it fails as Docker 20.10 does."""

from __future__ import annotations

from pathlib import Path

import pytest

from mayfly.errors import RemoteError
from mayfly.local import docker
from mayfly.local.docker import Docker

# `ps` shows the names in a file; `rm` fails while another process is at work, which ends at the
# third try (or never), and takes what is left then.
FAKE_CLIENT = """#!/bin/bash
cd "${0%/*}"
shift 2
case $1 in
ps) cat there ;;
rm)
  echo "$*" >> asked
  if [ "$(wc -l < asked)" -lt @TRIES@ ]; then
    echo "Error response from daemon: removal of container a is already in progress" >&2
    exit 1
  fi
  : > there ;;
esac
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Makes the fake client, which has containers a and b, the first there is."""

    def make(tries: int) -> Docker:
        client = tmp_path / "docker"
        client.write_text(FAKE_CLIENT.replace("@TRIES@", str(tries)))
        client.chmod(0o755)
        (tmp_path / "there").write_text("a\nb\n")
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
        return Docker("unix:///nowhere")

    return make


def test_a_container_that_another_process_removes_is_waited_for(fake, tmp_path: Path) -> None:
    fake(3).remove(["a", "b"])
    assert (tmp_path / "there").read_text() == ""
    assert (tmp_path / "asked").read_text() == "rm -f -v a b\n" * 3


def test_one_that_stays_is_an_error(fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docker, "REMOVAL_S", 0.1)
    with pytest.raises(RemoteError, match="already in progress"):
        fake(10**6).remove(["a"])


def test_nothing_to_remove_asks_nobody(fake, tmp_path: Path) -> None:
    fake(1).remove([])
    assert not (tmp_path / "asked").exists()
