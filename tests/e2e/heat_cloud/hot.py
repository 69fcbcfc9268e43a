"""The functions of HOT that our templates use; what is not known here is an error.

tests/golden compares its results with those of Heat's own classes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

OTHER_FUNCTIONS = {
    "get_file", "repeat", "resource_facade", "digest", "str_split", "map_merge", "map_replace",
    "yaql", "if", "filter", "str_replace_strict", "str_replace_vstrict", "make_url",
    "list_concat_unique", "contains", "equals", "not", "and", "or",
}  # fmt: skip


@dataclass(frozen=True)
class Hot:
    """A template with its parameters' values; resources come from who makes them."""

    template: dict[str, Any]
    parameters: Mapping[str, Any]
    stack_name: str
    reference: Callable[[str], str]  # get_resource
    attribute: Callable[[str, str], Any]  # get_attr

    @classmethod
    def parse(cls, text: str, parameters: Mapping[str, Any], stack_name: str, **others: Any) -> Hot:
        template = yaml.safe_load(text)
        return cls(template, values(template["parameters"], parameters), stack_name, **others)

    def resolve(self, value: Any) -> Any:
        """The value with all functions in it replaced by their results."""
        if isinstance(value, list):
            return [self.resolve(item) for item in value]
        if not isinstance(value, dict):
            return value
        if len(value) == 1:
            ((name, arguments),) = value.items()
            if name in OTHER_FUNCTIONS:
                raise ValueError(f"{name} is not in the subset")
            if name in FUNCTIONS:
                return FUNCTIONS[name](self, arguments)
        return {key: self.resolve(item) for key, item in value.items()}

    def get_param(self, name: str) -> Any:
        return self.stack_name if name == "OS::stack_name" else self.parameters[name]

    def list_join(self, arguments: list[Any]) -> str:
        delimiter, parts = arguments
        return delimiter.join(as_text(self.resolve(part)) for part in parts)

    def list_concat(self, lists: list[Any]) -> list[Any]:
        return [item for one in lists for item in self.resolve(one)]

    def str_replace(self, arguments: dict[str, Any]) -> str:
        text = arguments["template"]
        ((placeholder, value),) = arguments["params"].items()
        return text.replace(placeholder, as_text(self.resolve(value)))


FUNCTIONS: dict[str, Callable[[Hot, Any], Any]] = {
    "get_param": Hot.get_param,
    "get_resource": lambda hot, name: hot.reference(name),
    "get_attr": lambda hot, path: hot.attribute(*path),
    "list_join": Hot.list_join,
    "list_concat": Hot.list_concat,
    "str_replace": Hot.str_replace,
}


def values(declared: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters' values, with the types that Heat gives them."""
    unknown = set(given) - set(declared)
    assert not unknown, f"the template has no parameter {unknown}"
    found = {}
    for name, parameter in declared.items():
        value = given.get(name, parameter.get("default"))
        assert value is not None, f"parameter {name} has no value"
        if parameter["type"] == "number":
            value = int(value)
        elif parameter["type"] == "comma_delimited_list":
            value = [item for item in str(value).split(",") if item]
        else:
            assert parameter["type"] == "string", parameter["type"]
        found[name] = value
    return found


def as_text(value: Any) -> str:
    """As Heat's ReplaceJson and JoinMultiple do it."""
    return json.dumps(value, sort_keys=True) if isinstance(value, dict | list) else str(value)
