from __future__ import annotations

from ipaddress import IPv4Network

import pytest

from mayfly.errors import UserError
from mayfly.heat.job import HeatJob, make_job
from mayfly.heat.questions import ask_all, ask_until_found
from mayfly.heat.repository import NotThere


def answered(*answers: str):
    """What is asked, what is said about wrong answers, and the result."""
    asked: list[str] = []
    said: list[str] = []
    given = iter(answers)

    def ask(question: str, offer: str | None) -> str:
        asked.append(question)
        return next(given)

    return ask_all(IPv4Network("10.0.0.0/28"), ask, said.append), asked, said


def test_four_questions_give_a_job():
    result, asked, said = answered(" https://example.org/repo.git ", "3", ".", "train.py")
    assert result == {
        "repository": "https://example.org/repo.git",
        "workers": 3,
        "directory": ".",
        "entrypoint": "train.py",
    }
    assert len(asked) == 4
    assert said == []


def test_the_question_names_the_true_maximum():
    _, asked, _ = answered("https://example.org/repo.git", "0", ".", "train.py")
    assert "min 0, max 10" in asked[1]


def test_a_wrong_answer_is_explained_and_asked_again():
    result, asked, said = answered(
        *("git@example.org:repo.git", "http://example.org/x", "https://example.org/repo.git"),
        *("many", "-1", "11", "10"),
        *("../x", "code"),
        *("train", "train.py"),
    )
    assert result["workers"] == 10
    assert len(asked) == 4 + len(said) == 11
    for line, says in zip(
        said, ["ssh", "https://", "whole", "whole", "0 to 10", "..", ".py"], strict=True
    ):
        assert says in line


def test_what_is_not_found_is_asked_again_and_offers_what_was_answered():
    answers = iter(["https://example.org/wrong.git", "2", "code", "train.py"])
    offered: list[str | None] = []
    said: list[str] = []

    def ask(question: str, offer: str | None) -> str:
        offered.append(offer)
        if question.startswith("HTTPS") and offer is not None:
            return "https://example.org/repo.git"
        return offer or next(answers)

    def look(wanted: HeatJob) -> None:
        if "wrong" in wanted.repository:
            raise NotThere("it cannot be cloned", "correct the URL")

    wanted = ask_until_found(IPv4Network("10.0.0.0/28"), ask, said.append, make_job, look)
    assert wanted.repository == "https://example.org/repo.git"
    assert (wanted.workers, wanted.directory, wanted.entrypoint) == (2, "code", "train.py")
    assert said == ["it cannot be cloned — correct the URL"]
    assert offered == [None] * 4 + ["https://example.org/wrong.git", "2", "code", "train.py"]


def test_what_no_answer_can_mend_is_not_asked_again():
    answers = iter(["https://example.org/repo.git", "2", "code", "train.py"])

    def look(wanted: HeatJob) -> None:
        raise UserError("git is not installed here", "install it")

    with pytest.raises(UserError, match="git is not installed"):
        ask_until_found(IPv4Network("10.0.0.0/28"), lambda *_: next(answers), print, make_job, look)
