"""The four questions that `mayfly heat` asks on a terminal; each is asked until it is answered."""

from __future__ import annotations

from collections.abc import Callable
from ipaddress import IPv4Network
from typing import Any

from mayfly.heat import job, subnet

Ask = Callable[[str], str]
Say = Callable[[str], None]


def ask_all(network: IPv4Network, ask: Ask, say: Say) -> dict[str, Any]:
    """The answers, as values of a HeatJob. `ask` puts a question; `say` shows what is wrong."""
    most = subnet.max_workers(network)
    return {
        "repository": _ask("HTTPS .git repo URL to clone", job.check_repository, ask, say),
        "workers": _ask(
            f"How many workers beside the main node (min 0, max {most})",
            lambda text: job.check_workers(_whole(text), network),
            ask,
            say,
        ),
        "directory": _ask(
            "Directory of requirements.txt (. for the root)", job.check_directory, ask, say
        ),
        "entrypoint": _ask(
            "Python entrypoint, relative to that directory", job.check_entrypoint, ask, say
        ),
    }


def _ask(question: str, check: Callable[[str], Any], ask: Ask, say: Say) -> Any:
    while True:
        answer = ask(question).strip()
        try:
            return check(answer)
        except ValueError as error:
            say(f"{answer!r}: {error}")


def _whole(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise ValueError("write a whole number")
    return int(text)
