"""Machines of the user's own as a place: taken, looked at, freed, and proved to be free."""

from __future__ import annotations

import pytest
from tests.unit import own_fakes
from tests.unit.deploy_fakes import FakeClock

from mayfly.destroy import Destroyer
from mayfly.errors import RemoteError, UserError
from mayfly.ledger import Ledger
from mayfly.own import on_machine, playbook
from mayfly.own.machines import Machines, OwnMachines
from mayfly.own.manager import Machinist
from mayfly.sweep import proof
from mayfly.sweep.things import Marks
from mayfly.watch import Pace

RUN, OTHER = "faces-261128-100000-abcd", "cats-261128-090000-0123"
MARKS = Marks(frozenset([RUN]))


@pytest.fixture
def own(tmp_path, monkeypatch):
    return own_fakes.make(tmp_path, monkeypatch)


@pytest.fixture
def ledger(tmp_path, own):
    made = Ledger(tmp_path / "ledger.sqlite")
    made.add(RUN, "static", f"s3://bucket/{RUN}/", {}, str(own[0]))
    made.add_place(RUN, "p,a,b")
    return made


def destroyer(own, ledger) -> Destroyer:
    path, _ = own
    clock = FakeClock()
    pace = Pace(1.0, 100.0, clock=clock, sleep=clock.sleep)
    machinist = Machinist(path, {}, {}, path.parent)
    return Destroyer(machinist, ledger, None, None, OwnMachines(path, {}), pace)


def test_machines_without_a_run_are_free_and_can_be_taken(own):
    path, fake = own
    machines = Machines(path, {})
    machines.require_free()
    machines.claim(RUN)
    assert {(root / on_machine.CLAIM).read_text() for root in fake.roots.values()} == {RUN}
    machines.claim(RUN)


def test_a_machine_of_another_run_is_refused_and_names_it(own):
    path, fake = own
    (fake.roots["b"] / on_machine.CLAIM).write_text(OTHER)
    for wanted in (Machines(path, {}).require_free, lambda: Machines(path, {}).claim(RUN)):
        with pytest.raises(UserError, match=f"machine b is in use by run {OTHER}.*destroy"):
            wanted()


def test_a_machine_that_does_not_answer_is_named_with_its_reason(own):
    path, fake = own
    fake.down = {"a", "b"}
    with pytest.raises(RemoteError, match=r"machine a \(and 1 more\).*Connection refused.*ping"):
        Machines(path, {}).require_free()
    assert fake.asked == [("look", "nobody")], "nothing was changed"


def test_a_machine_without_systemd_is_refused(own):
    path, fake = own
    (fake.roots["p"] / "run/systemd/system").rmdir()
    with pytest.raises(UserError, match="p of .* has no systemd"):
        Machines(path, {}).require_free()


def test_destroy_frees_the_machines_and_proves_it(own, ledger):
    _, fake = own
    Machines(own[0], {}).claim(RUN)
    own_fakes.leave(fake, RUN)
    found = destroyer(own, ledger).destroy(ledger.get(RUN), lambda _: None)
    assert found.clean and found.count == 0
    for root in fake.roots.values():
        assert not (root / on_machine.KEYS).exists()
        assert not (root / on_machine.CLAIM).exists()
    assert fake.asked[-3:] == [("look", RUN), ("free", RUN), ("look", RUN)], "one call frees all"
    assert ledger.get(RUN).destroyed
    document = proof.document(found)
    text = proof.lines(document)
    assert document["im"] is None and "IM" not in text
    assert f"the machines of {own[0]}: p, a, b" in text and "nothing is left" in text


def test_a_machine_that_is_away_leaves_the_run_undestroyed(own, ledger):
    _, fake = own
    own_fakes.leave(fake, RUN)
    fake.down = {"b"}
    with pytest.raises(RemoteError, match="not listed: b: Failed to connect"):
        destroyer(own, ledger).destroy(ledger.get(RUN), lambda _: None)
    assert not (fake.roots["a"] / on_machine.KEYS).exists(), "the others are freed"
    assert (fake.roots["b"] / on_machine.KEYS).exists()
    assert ledger.get(RUN).state == "destroying"
    fake.down = set()
    assert destroyer(own, ledger).destroy(ledger.get(RUN), lambda _: None).clean


def test_a_machine_that_left_the_inventory_is_not_forgotten(own, ledger, monkeypatch):
    path, fake = own
    own_fakes.leave(fake, RUN)
    content = {"ps": {"hosts": ["p"]}, "worker": {"hosts": ["a"]}}
    monkeypatch.setattr("mayfly.inventory.listed", lambda path: content)
    del fake.roots["b"]
    place = OwnMachines(path, {}).place("p,a,b")
    fake.down = {"b"}
    (why, *_) = {each.why for each in place.look(MARKS).unlisted}
    assert why.startswith("b: ") and "no longer has it" in why


def test_hdfs_that_is_down_is_told(own, ledger, monkeypatch):
    _, fake = own
    Machines(own[0], {}).claim(RUN)
    refuse = lambda *_: (_ for _ in ()).throw(OSError("Connection refused"))  # noqa: E731
    monkeypatch.setattr(on_machine.Machine, "_ask_hdfs", refuse)
    with pytest.raises(RemoteError, match="HDFS refuses: Connection refused"):
        destroyer(own, ledger).destroy(ledger.get(RUN), lambda _: None)


def test_reasons_are_read_from_what_ansible_prints():
    text = (
        "TASK [Ask] ****\n"
        'fatal: [w]: UNREACHABLE! => {"changed": false, "msg": "Task failed: no route"}\n'
        'fatal: [a -> localhost]: FAILED! => {"msg": "non-zero return code", "stderr": "no\\n"}\n'
        "fatal: [b]: FAILED! => {not JSON}\n"
        'fatal: [c]: FAILED! => {"changed": false}\nPLAY RECAP\n'
    )
    assert playbook.reasons(text) == {
        "w": "no route",
        "a": "non-zero return code: no",
        "b": "{not JSON}",
        "c": "no reason given",
    }
