"""Preflight between machines in network namespaces, with a firewall and a slow link."""

from __future__ import annotations

import pytest
from tests import netns
from tests.unit.train_fakes import FakeBoard

from mayfly_train import markers


@pytest.fixture(scope="module")
def network():
    with netns.Network(3) as made:
        yield made


def test_the_slow_edge_is_named(network, tmp_path):
    netns.slow_down(network)
    reports, _ = network.preflight(tmp_path)
    assert all(report["ok"] for report in reports.values()), reports
    assert {report["interface"] for report in reports.values()} == {"eth0"}
    slowest = reports["n1"]["allreduce"]["slowest"]
    assert (slowest["from"], slowest["to"]) == ("n2", "n3")
    assert slowest["mib_per_s"] < 4  # 16 Mbit/s are 1.9


def test_eight_machines_find_each_other(tmp_path):
    with netns.Network(8) as made:
        reports, _ = made.preflight(tmp_path)
    assert [report["ok"] for report in reports.values()] == [True] * 8, reports


def test_a_dropped_edge_is_named(network, tmp_path):
    netns.drop(network)
    reports, _ = network.preflight(tmp_path, grace=1)
    found = [fault for report in reports.values() for fault in report["faults"]]
    assert [(f["from"], f["to"], f["port"]) for f in found] == [("n2", "n1", netns.PORT)]
    assert found[0]["reason"] == "no connection within 1 s"
    assert not any(report["ok"] for report in reports.values())
    failed = markers.read_json(FakeBoard(tmp_path), markers.FAILED)
    assert failed["node"] == "n2"
    assert failed["message"].startswith(
        "n2 (10.77.0.3) → n1 (10.77.0.2) port 2222: no connection within 1 s — a firewall"
    )
