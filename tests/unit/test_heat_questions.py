from __future__ import annotations

from ipaddress import IPv4Network

from mayfly.heat.questions import ask_all


def answered(*answers: str):
    """What is asked, what is said about wrong answers, and the result."""
    asked: list[str] = []
    said: list[str] = []
    given = iter(answers)

    def ask(question: str) -> str:
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
