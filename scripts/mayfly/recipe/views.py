"""Documents about recipes as people read them."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

COLUMNS = ("EXPERIMENT", "NEEDS", "TASKS", "NODES", "KNOWN LATER")


def plan_view(document: Mapping[str, Any]) -> RenderableType:
    """A plan: the graph, the sums, and each experiment's first and last command."""
    table = Table(title=escape(f"recipe {document['recipe']}"), title_justify="left")
    for column in COLUMNS:
        table.add_column(column)
    for each in document["experiments"]:
        tasks = "?" if each["tasks"] is None else str(each["tasks"])
        later = each["known_later"] or ""
        needs = ", ".join(each["needs"])
        table.add_row(*map(escape, (each["name"], needs, tasks, str(each["nodes"]), later)))
    least = "" if document["tasks_known"] else " at least"
    nodes = f"nodes: {document['nodes']} and a head"
    lines = [f"tasks:{least} {document['tasks']}", nodes, f"price: {price_text(document['price'])}"]
    for each in document["experiments"]:
        for which in ("first", "last"):
            for words in each[which] or ():
                lines.append(f"{each['name']}, {which}: {shlex.join(words)}")
        if not each["first"]:
            lines.append(f"{each['name']}: commands are known later")
    return Group(table, *map(escape, lines))


def price_text(price: Mapping[str, Any]) -> str:
    """A price for people."""
    if not price["known"]:
        return f"unknown ({price['why']})"
    if price["currency"] is None:
        return str(price["why"])
    low, high = (f"{amount:.2f}" for amount in price["per_hour"])
    amount = low if low == high else f"{low} to {high}"
    return f"{amount} {price['currency']} an hour, at full size ({', '.join(price['types'])})"


def status_view(document: Mapping[str, Any]) -> RenderableType:
    """A run's state, and a row for each experiment."""
    title = f"recipe {document['run']}: {document['state']} ({document['address']})"
    table = Table(title=escape(title), title_justify="left")
    counted = ("done", "stopped", "failed", "running")
    for column in ("EXPERIMENT", "STATE", "TASKS", *map(str.upper, counted), "WHY"):
        table.add_column(column)
    for each in document["experiments"]:
        tasks = "?" if each["tasks"] is None else str(each["tasks"])
        counts = [str(each["states"].get(state, 0)) for state in counted]
        message = each["message"] or ""
        table.add_row(*map(escape, (each["name"], each["state"], tasks, *counts, message)))
    return table


def results_view(document: Mapping[str, Any], most: int) -> RenderableType:
    """The best tasks of each experiment, and what it took."""
    parts: list[RenderableType] = []
    for each in document["experiments"]:
        about = f"{each['direction']} {each['objective']}, " if each["objective"] else ""
        title = f"{each['name']}: {about}{each['node_seconds']:.1f} node seconds"
        table = Table(title=escape(title), title_justify="left")
        columns = ["TASK", "STATE", each["objective"] or "VALUE", "PARAMETERS", "SECONDS"]
        why = any(task["message"] for task in each["tasks"][:most])
        for column in [*columns, "WHY"] if why else columns:
            table.add_column(escape(column))
        for task in each["tasks"][:most]:
            value = "" if task["value"] is None else f"{task['value']:g}"
            chosen = " ".join(f"{name}={value}" for name, value in task["parameters"].items())
            seconds = "" if task["seconds"] is None else f"{task['seconds']:.1f}"
            row = [task["task"], task["state"], value, chosen, seconds]
            table.add_row(*map(escape, [*row, task["message"] or ""] if why else row))
        parts.append(table)
        if (more := len(each["tasks"]) - most) > 0:
            parts.append(f"and {more} more: --all, --csv or --json shows them")
    return Group(*parts)
