"""Words and placeholders: no value becomes two words, none is read by a shell."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest

from mayfly_train.recipe.template import BadTemplate, Name, Renderer, parse

ODD = ["two words", "'; touch /tmp/x; '", "$HOME", "*", 'a"b', "", "ä\nb", "-rf"]


@pytest.mark.parametrize("value", ODD)
def test_a_value_is_one_word_whatever_is_in_it(value: str):
    words = Renderer(parse("echo {{x}} --x={{x}} '{{x}}'"), ["x"], False)([[value]])[0]
    assert words == ("echo", value, f"--x={value}", value)


@pytest.mark.parametrize("value", ODD)
def test_a_shell_gets_values_quoted(value: str):
    words = Renderer(parse("printf %s {{x}} | cat", shell=True), ["x"], True)([[value]])[0]
    assert subprocess.run(words, capture_output=True, text=True, check=True).stdout == value


def test_a_literal_that_looks_like_a_mark_is_kept():
    assert parse(r"a 'b c' d\ e") == (("a",), ("b c",), ("d e",))
    assert parse("--{{a}}-{{ b }}") == (("--", Name("a"), "-", Name("b")),)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("a | b", "only a shell"),
        ("a && b", "only a shell"),
        ("a > {{output}}/x", "only a shell"),
        ("a $(b)", "only a shell"),
        ("a 'b", "no closing quotation"),
        ("  ", "is empty"),
        ("a {{x", "no placeholder"),
        ("a {{x-y}}", "no placeholder"),
        ("a }} b", "no placeholder"),
    ],
)
def test_what_would_surprise_is_refused(text: str, part: str):
    with pytest.raises(BadTemplate, match=part):
        parse(text)


def test_operators_inside_quotes_are_words():
    assert parse("echo 'a | b' \"c > d\" e\\;") == (("echo",), ("a | b",), ("c > d",), ("e;",))


def test_a_placeholder_in_quotes_is_refused_for_a_shell():
    with pytest.raises(BadTemplate, match="quoted already"):
        parse('echo "{{x}}"', shell=True)


def test_rendering_is_by_column():
    line = parse("run {{a}} {{b}}")
    assert Renderer(line, ["a", "b"], False)([["1", "2"], ["x", "y"]]) == [
        ("run", "1", "x"),
        ("run", "2", "y"),
    ]
    assert shlex.join(Renderer(line, ["b", "a"], False)([["1"], ["x"]])[0]) == "run x 1"


@pytest.mark.parametrize(
    "script",
    [
        "cat <<END\n{{x}}\nEND",
        "true # {{x}}",
        "echo `echo {{x}}`",
        "echo $(echo {{x}})",
        "# don't\necho '{{x}}'",
    ],
)
@pytest.mark.parametrize(
    "value", ["$(touch ran)", "`touch ran`", "a\ntouch ran", "'; touch ran; '"]
)
def test_no_value_is_run_wherever_it_stands(script: str, value: str, tmp_path: Path):
    words = Renderer(parse(script, shell=True), ["x"], True)([[value]])[0]
    subprocess.run(words, cwd=tmp_path, check=False, capture_output=True)
    assert list(tmp_path.iterdir()) == []


def test_a_plain_value_stands_in_a_script_as_it_is():
    script = "echo {{x}} {{y}}"
    (words,) = Renderer(parse(script, shell=True), ["y", "x"], True)([["a b"], ["0.5"]])
    assert words[-1] == "mayfly_0='a b'\necho 0.5 \"$mayfly_0\""
