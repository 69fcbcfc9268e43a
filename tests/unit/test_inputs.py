"""Placeholders: in order, filled in memory, and only with values that break nothing."""

from __future__ import annotations

import pytest
import yaml

from mayfly import inputs
from mayfly.errors import UserError

TEXT = "b: '@input.two@'\na: '@input.one@'\nagain: '@input.two@'\n"
GOOD = {"one": "AK/IA+x=y", "two": "s3cr;et\\$(x) #%&"}


def test_names_come_in_order_of_first_appearance():
    assert inputs.names(TEXT) == ["two", "one"]


def test_a_placeholder_is_found_again():
    assert inputs.names(inputs.placeholder("s3_access_key_id")) == ["s3_access_key_id"]


def test_all_places_are_filled_and_yaml_gives_the_values_back():
    filled = yaml.safe_load(inputs.fill(TEXT, GOOD))
    assert filled == {"a": GOOD["one"], "b": GOOD["two"], "again": GOOD["two"]}


def test_text_without_placeholders_stays():
    assert inputs.fill("x: me@input.example\n", {}) == "x: me@input.example\n"


@pytest.mark.parametrize("values", [{"one": "x"}, {"one": "x", "two": ""}])
def test_a_value_that_is_missing(values):
    with pytest.raises(UserError, match="input two has no value"):
        inputs.fill(TEXT, values)


@pytest.mark.parametrize(
    "value",
    ["it's", 'say "x"', "a\nb", "a\rb", "a\tb", "a\0b", "@input.one@", "x@y", "{{ x }}", "{% x"]
    + ["{# x", " x", "x ", "\u2028"],
)
def test_values_that_would_break_the_document_are_refused_unseen(value):
    with pytest.raises(UserError) as caught:
        inputs.fill(TEXT, {"one": "x", "two": value})
    assert "input two contains" in str(caught.value)
    assert value not in str(caught.value)
