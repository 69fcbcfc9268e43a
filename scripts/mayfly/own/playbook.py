"""ansible-playbook as a process: started, listened to, and ended with all that it started."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from mayfly.errors import RemoteError

GRACE_S = 10.0  # between asking it to end and ending it
_REFUSED = re.compile(
    r"^(?:fatal|failed): \[(?P<host>[^\]\s]+)[^\]]*\]: (?:FAILED|UNREACHABLE)! => (?P<why>\{.*\})",
    re.MULTILINE,
)


def environment(environ: Mapping[str, str], **more: str) -> dict[str, str]:
    """Return the environment that ansible-playbook gets: the user's, in which output is plain.

    Hosts' keys are checked as the user's own ssh does, unless the user says otherwise.
    """
    path = os.pathsep.join([str(Path(sys.executable).parent), environ.get("PATH", os.defpath)])
    plain = {
        "ANSIBLE_STDOUT_CALLBACK": "ansible.builtin.default",
        "ANSIBLE_CALLBACK_RESULT_FORMAT": "json",
        "ANSIBLE_CALLBACK_FORMAT_PRETTY": "false",
        "ANSIBLE_NOCOLOR": "1",
        "ANSIBLE_RETRY_FILES_ENABLED": "0",
        "PYTHONUNBUFFERED": "1",
    }
    given = {name: text for name, text in environ.items() if name != "ANSIBLE_FORCE_COLOR"}
    return {"ANSIBLE_HOST_KEY_CHECKING": "True", **given, **plain, "PATH": path, **more}


class Playbook:
    """One ansible-playbook, in a session of its own: Ctrl-C reaches us, and we end it."""

    def __init__(self, words: Sequence[str], environ: Mapping[str, str]) -> None:
        """Start it with these arguments; its output is collected from then on."""
        self._lines: list[str] = []
        self._process = subprocess.Popen(
            [sys.executable, "-m", "ansible", "playbook", *words],
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def output(self) -> str:
        """Return all that it has printed so far."""
        return "".join(self._lines)

    def code(self) -> int | None:
        """Return its exit code, None while it runs."""
        code = self._process.poll()
        if code is not None:
            self._reader.join(timeout=GRACE_S)
        return code

    def wait(self) -> int:
        """Wait for its end and return its exit code; it ends with whatever interrupts this."""
        try:
            code = self._process.wait()
        except BaseException:
            self.stop()
            raise
        self._reader.join(timeout=GRACE_S)
        return code

    def stop(self) -> None:
        """End it, and all that it started here."""
        for number in (signal.SIGINT, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE_S)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.append(line)


def run(words: Sequence[str], environ: Mapping[str, str]) -> str:
    """Run a playbook to its end and return its output, however it ended for single machines.

    Raises RemoteError when it never got so far as to reach a machine.
    """
    book = Playbook(words, environ)
    code, text = book.wait(), book.output()
    if code and "PLAY RECAP" not in text:
        last = " ".join(text.split()[-40:]) or f"exit code {code}"
        raise RemoteError(f"ansible-playbook fails: {last}", "is the inventory right?")
    return text


def reasons(output: str) -> dict[str, str]:
    """Return why machines did not do what they were asked to, on one line: host → reason."""
    return {found["host"]: _reason(found["why"]) for found in _REFUSED.finditer(output)}


def _reason(text: str) -> str:
    try:
        document = json.loads(text)
    except ValueError:
        return " ".join(text.split())
    said = [document.get(key) for key in ("msg", "stderr", "module_stderr")]
    lines = [" ".join(str(each).split()).removeprefix("Task failed: ") for each in said if each]
    return ": ".join(dict.fromkeys(lines)) or "no reason given"
