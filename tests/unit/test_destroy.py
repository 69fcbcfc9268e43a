from __future__ import annotations

import pytest
from tests.unit.deploy_fakes import FakeClock, FakeIM, FakeTraces

from mayfly.destroy import Destroyer
from mayfly.errors import RemoteError
from mayfly.ledger import Ledger
from mayfly.watch import Pace

RUN = "faces-261128-100000-abcd"


@pytest.fixture
def ledger(tmp_path):
    opened = Ledger(tmp_path / "ledger.sqlite")
    opened.add(RUN, "local", f"s3://mayfly/{RUN}/", {})
    yield opened
    opened.close()


def destroyer(im: FakeIM, ledger: Ledger, traces: FakeTraces | None = None) -> Destroyer:
    clock = FakeClock()
    pace = Pace(1.0, 60.0, clock=clock, sleep=clock.sleep)
    return Destroyer(im, ledger, None, traces, pace=pace)


def destroy(im: FakeIM, ledger: Ledger, traces: FakeTraces | None = None) -> list[str]:
    said: list[str] = []
    proof = destroyer(im, ledger, traces).destroy(ledger.get(RUN), said.append)
    assert (proof.clean, proof.count, proof.left()) == (True, 0, [])
    return said


def test_it_ends_when_im_and_the_cloud_list_nothing(ledger):
    im = FakeIM(radls={"infra-7": f"description {RUN}"}, polls_until_gone=3)
    ledger.set_infrastructure(RUN, "infra-7")
    traces = FakeTraces(left=["node-1", "network-1"])
    destroy(im, ledger, traces)
    assert im.radls == {}
    assert traces.left == []
    assert traces.removed == []
    assert traces.wiped == im.wiped == ["infra-7"]
    assert ledger.get(RUN).destroyed
    assert [(e.action, e.target, e.outcome) for e in ledger.journal(RUN)] == [
        ("destroy", "infra-7", "done")
    ]


def test_it_asks_again_when_im_refuses(ledger):
    """IM answers 409 to a DELETE while it still creates nodes."""
    im = FakeIM(radls={"infra-7": RUN}, refusals=["still adding", "still adding"])
    ledger.set_infrastructure(RUN, "infra-7")
    said = destroy(im, ledger)
    assert im.asked == ["infra-7"] * 3
    assert any("still adding" in line for line in said)


def test_it_does_not_nag_while_im_is_deleting(ledger):
    im = FakeIM(radls={"infra-7": RUN}, polls_until_gone=20)
    ledger.set_infrastructure(RUN, "infra-7")
    destroy(im, ledger)
    assert im.asked == ["infra-7"]


def test_it_finds_an_infrastructure_whose_id_never_came_back(ledger):
    im = FakeIM(radls={"infra-9": f"description {RUN} ()", "other": "description x ()"})
    destroy(im, ledger)
    assert list(im.radls) == ["other"]


def test_nodes_that_im_has_forgotten_are_removed(ledger):
    """IM's database was lost, say, or it could not remove a node and forgot it."""
    ledger.set_infrastructure(RUN, "infra-7")
    traces = FakeTraces(left=["node-1", "network-1"], orphans=True)
    destroy(FakeIM(), ledger, traces)
    assert traces.removed == ["infra-7"]
    assert traces.wiped == ["infra-7"]


def test_what_does_not_go_away_is_named(ledger):
    im = FakeIM(radls={"infra-7": RUN})
    ledger.set_infrastructure(RUN, "infra-7")
    traces = FakeTraces(left=["node-1"], stuck=True)
    with pytest.raises(RemoteError, match="node-1"):
        destroyer(im, ledger, traces).destroy(ledger.get(RUN), lambda text: None)
    assert traces.wiped == []
    assert not ledger.get(RUN).destroyed


def test_a_refusing_im_is_given_up_with_its_message(ledger):
    im = FakeIM(radls={"infra-7": RUN}, refusals=["no credentials"] * 1000)
    ledger.set_infrastructure(RUN, "infra-7")
    with pytest.raises(RemoteError, match="no credentials"):
        destroyer(im, ledger).destroy(ledger.get(RUN), lambda text: None)
    assert ledger.get(RUN).state == "destroying"
    assert ledger.journal(RUN)[-1].outcome == "failed"


def test_a_run_without_anything_is_destroyed_at_once(ledger):
    im = FakeIM()
    destroy(im, ledger)
    assert im.asked == []
    assert ledger.get(RUN).destroyed


def test_the_known_infrastructure_goes_though_others_cannot_be_read(ledger):
    im = FakeIM(radls={"infra-7": RUN})
    ledger.set_infrastructure(RUN, "infra-7")
    im.find = lambda text: (_ for _ in ()).throw(RemoteError("IM could not read radl"))
    with pytest.raises(RemoteError, match="read radl"):
        destroyer(im, ledger).destroy(ledger.get(RUN), lambda text: None)
    assert im.radls == {}
    assert not ledger.get(RUN).destroyed
