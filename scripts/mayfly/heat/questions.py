"""The four questions that `mayfly heat` asks on a terminal; each is asked until it is answered."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from ipaddress import IPv4Network
from types import MappingProxyType
from typing import Any

from mayfly.heat import job, subnet
from mayfly.heat.job import HeatJob
from mayfly.heat.repository import NotThere

Ask = Callable[[str, str | None], str]
Say = Callable[[str], None]


def ask_until_found(
    network: IPv4Network,
    ask: Ask,
    say: Say,
    make: Callable[[dict[str, Any]], HeatJob],
    look: Callable[[HeatJob], None],
) -> HeatJob:
    """The job that `make` makes of the answers, once `look` finds in the repository what it needs.

    When it raises NotThere, all questions are asked again, and what was answered before is offered.
    """
    answers: dict[str, Any] = {}
    while True:
        answers = ask_all(network, ask, say, answers)
        wanted = make(answers)
        try:
            look(wanted)
        except NotThere as error:
            say(str(error))
        else:
            return wanted


def ask_all(
    network: IPv4Network, ask: Ask, say: Say, before: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """The answers, as values of a HeatJob.

    `ask` puts a question with an answer to offer, one of `before`; `say` shows what is wrong.
    """
    most = subnet.max_workers(network)
    questions: dict[str, tuple[str, Callable[[str], Any]]] = {
        "repository": ("HTTPS .git repo URL to clone", job.check_repository),
        "workers": (
            f"How many workers beside the main node (min 0, max {most})",
            lambda text: job.check_workers(_whole(text), network),
        ),
        "directory": ("Directory of requirements.txt (. for the root)", job.check_directory),
        "entrypoint": ("Python entrypoint, relative to that directory", job.check_entrypoint),
    }
    offers = {name: str(value) for name, value in before.items()}
    return {
        name: _ask(question, offers.get(name), check, ask, say)
        for name, (question, check) in questions.items()
    }


def _ask(question: str, offer: str | None, check: Callable[[str], Any], ask: Ask, say: Say) -> Any:
    while True:
        answer = ask(question, offer).strip()
        try:
            return check(answer)
        except ValueError as error:
            say(f"{answer!r}: {error}")


def _whole(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise ValueError("write a whole number")
    return int(text)
