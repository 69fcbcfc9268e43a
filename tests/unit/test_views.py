"""What people are told of a run."""

from __future__ import annotations

import pytest
from rich.console import Console

from mayfly.ledger import Record
from mayfly.views import status_document, status_table

STATES = {"ps-0": "configured", "worker-0": "off", "worker-1": "stopped"}
COST = {"spent": 0.5, "forecast": 2.0, "budget": 1.5, "currency": "USD"}


def record(cloud: str, im: str | None = None) -> Record:
    return Record("r", cloud, "training", "s3://b/r/", "i", {}, None, None, None, "", "", im=im)


def text(document: dict) -> str:
    console = Console(record=True, width=200)
    console.print(status_table(document, None))
    return console.export_text()


@pytest.mark.parametrize(
    ("cloud", "im", "said"),
    [
        ("azure", None, "still costs as much as before"),
        ("gcp", None, "still costs its disk and its address"),
        ("aws", "https://im.example.org", "still costs its disk"),
        ("aws", None, None),
        ("local", None, None),
    ],
)
def test_a_node_that_is_off_still_costs_where_that_does_not_end_it(cloud, im, said):
    document = status_document(record(cloud, im), None, STATES)
    if said is None:
        assert document["notices"] == []
        return
    (notice,) = document["notices"]
    assert notice.startswith("worker-0, worker-1: powered off") and said in notice
    assert "`mayfly destroy r`" in notice
    assert "powered off" in text(document)
    up = status_document(record(cloud, im), None, {"ps-0": "configured"})
    assert up["notices"] == []


def test_a_status_says_what_is_spent():
    document = status_document(record("aws"), None, {}, "", COST)
    assert document["cost"] == COST
    assert "0.500 of 1.5 USD spent, 2.00 at the end: it will be stopped" in text(document)
    assert status_document(record("aws"), None, {})["cost"] is None
