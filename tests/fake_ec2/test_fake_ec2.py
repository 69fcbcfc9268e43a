"""AWS from `mayfly deploy` to an empty account: real command, IM and connector, a fake EC2."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

import testenv
from fake_ec2 import cases
from fake_ec2.cases import Outcome
from mayfly.first_boot import UNIT

NODES = 3
CAPACITY, QUOTA = "InsufficientInstanceCapacity", "VcpuLimitExceeded"


def case(name: str, function: cases.Case) -> Any:
    return pytest.mark.case(name, function)


def assert_marked(outcome: Outcome, **counts: int) -> None:
    """Each of so many things has the run's tag and the infrastructure's."""
    marks = outcome.told["marks"]
    wanted = {
        "mayfly-run": marks["run"].run,
        "IM-INFRA-ID": marks["run"].infrastructure,
    }
    for kind, count in counts.items():
        tags = marks["tags"][kind.replace("_", " ")]
        assert len(tags) == count, kind
        assert all(wanted.items() <= each.items() for each in tags), (kind, tags)


def assert_told_to_end(first_boots: list[str]) -> None:
    """Each node has its timer before anybody has logged in; anybody on it can read that."""
    assert len(first_boots) == NODES
    for text in first_boots:
        assert text.startswith("#cloud-config\n")
        (command,) = yaml.safe_load(text)["bootcmd"]
        assert f"--unit={UNIT} --on-active=" in command[-1]
        assert command[-1].endswith("systemctl poweroff")
        assert testenv.CANARY not in text


@case("created", cases.created_and_destroyed)
def test_created_and_destroyed(outcome: Outcome, clean: Outcome):
    assert_marked(
        outcome, instance=NODES, volume=NODES, interface=NODES, security_group=3, spot_request=0
    )
    assert outcome.told["marks"]["ends"] == ["terminate"] * NODES
    assert_told_to_end(outcome.told["marks"]["first_boots"])
    assert outcome.told["calls"].count("RunInstances") == NODES
    assert outcome.told["status"]["state"] == "configuring"


@case("interrupted", cases.interrupted)
def test_an_interrupted_deploy_leaves_nothing(outcome: Outcome, clean: Outcome):
    assert (outcome.told["code"], outcome.told["left"]) == (130, {})
    assert outcome.told["document"]["leftovers"] == 0
    assert outcome.told["again"].code == 0


@case("interrupted", cases.interrupted)
def test_another_process_is_kept_off_a_run_at_work(outcome: Outcome, clean: Outcome):
    destroy, status, gc = (outcome.told["others"][name] for name in cases.OTHERS)
    assert destroy.code == 2
    assert f"is at work: mayfly deploy, process {outcome.told['pid']} since" in destroy.messages
    assert (status.code, status.document["state"]) == (0, "configuring")
    (found,) = gc.document["runs"]
    assert (gc.code, found["goes_on"], gc.document["removed"]) == (0, True, 0)
    assert len(outcome.told["there"]["instance"]) == NODES


@case("spot", cases.spot_fulfilled)
def test_spot_nodes(outcome: Outcome, clean: Outcome):
    assert_marked(outcome, instance=NODES, volume=NODES, interface=NODES, spot_request=2)
    assert (outcome.told["marks"]["spot"], outcome.told["marks"]["ends"]) == (2, ["terminate"] * 3)
    assert_told_to_end(outcome.told["marks"]["first_boots"])
    assert (outcome.told["code"], outcome.told["left"]) == (130, {})


@case("spot_held", cases.spot_held_open)
def test_a_spot_request_that_stays_open_is_cancelled(outcome: Outcome, clean: Outcome):
    assert outcome.told["ended"].code == 1
    assert CAPACITY in outcome.told["ended"].messages
    assert outcome.told["asked"] == 2  # one ps on demand, and one of the two alike workers


REFUSALS = [
    pytest.param(
        code,
        after,
        marks=case(f"{code}-{after}", cases.refused(code, status, after)),
        id=f"{code}-{after}",
    )
    for code, status in ((CAPACITY, 500), (QUOTA, 400))
    for after in range(NODES)
]


@pytest.mark.parametrize(("code", "after"), REFUSALS)
def test_a_refused_node_ends_the_run_with_the_reason(
    outcome: Outcome, clean: Outcome, code: str, after: int
):
    """IM's own connector asks 27 times."""
    ended = outcome.told["ended"]
    assert ended.code == 1
    assert code in ended.messages
    assert outcome.told["left"] == {}
    assert ended.document["leftovers"] == 0
    assert outcome.told["asked"] <= max(after, 1) + 1


@case("no_room", cases.no_room_in_the_first_zone)
def test_the_next_offer_is_made_once_what_the_first_has_made_is_gone(
    outcome: Outcome, clean: Outcome
):
    assert outcome.told["zones"] == [cases.ZONES[1]] * NODES
    first, second = outcome.told["ended"].document["attempts"]
    assert [first["cause"], second["cause"]] == ["capacity", None]
    assert (cases.ZONES[0] in first["offer"], cases.ZONES[1] in second["offer"]) == (True, True)
    done = [
        (entry.action, entry.outcome)
        for entry in outcome.told["journal"]
        if entry.action in ("offer", "create", "destroy")
    ]
    assert done == [
        ("offer", "failed"),
        ("create", "done"),
        ("destroy", "done"),
        ("offer", "done"),
        ("create", "done"),
    ]
    assert outcome.told["asked"] == 2 + NODES
    assert "IM was restarted" not in outcome.told["ended"].messages  # it was, between the offers
    assert (outcome.told["ended"].code, outcome.told["left"]) == (130, {})


@case("not_permitted", cases.not_permitted)
def test_a_missing_permission_is_named_and_no_other_offer_tried(outcome: Outcome, clean: Outcome):
    ended = outcome.told["ended"]
    assert ended.code == 1
    assert [each["cause"] for each in ended.document["attempts"]] == ["permission"]
    assert "the keys need ec2:RunInstances;" in ended.messages
    assert [entry.action for entry in outcome.told["journal"]].count("offer") == 1
    assert (outcome.told["asked"], outcome.told["left"]) == (2, {})


@case("throttled", cases.throttled)
def test_what_was_only_asked_too_often_is_asked_again(outcome: Outcome, clean: Outcome):
    assert len(outcome.told["ours"]["instance"]) == NODES
    assert outcome.told["asked"] == NODES + 1


@case("foreign_group", cases.foreign_group_in_the_way)
def test_a_group_of_somebody_else_is_not_used(outcome: Outcome, clean: Outcome):
    assert outcome.told["ended"].code == 1
    assert "InvalidGroup.Duplicate" in outcome.told["ended"].messages
    assert outcome.told["asked"] == 0


@case("database", cases.database_deleted)
def test_im_may_forget_everything(outcome: Outcome, clean: Outcome):
    assert len(outcome.told["there"]["instance"]) == NODES


@case("foreign_im", cases.foreign_im)
def test_a_foreign_im_makes_and_destroys_nodes(outcome: Outcome, clean: Outcome):
    assert len(outcome.told["there"]["instance"]) == NODES
    assert len(outcome.told["there"]["security group"]) == 3
    destroyed = outcome.told["destroyed"]
    assert (destroyed.code, destroyed.document["ok"]) == (0, True)
    assert "without IM" not in destroyed.messages  # else our sweep alone has done it


@case("foreign_im", cases.foreign_im)
def test_a_foreign_im_gets_no_spot_nodes(outcome: Outcome, clean: Outcome):
    """`true` is refused before anything is made; `prefer` becomes on demand."""
    refused = outcome.told["spot"]
    assert refused.code == 2
    assert "spot is True, and IM_URL names a foreign IM: IM 2.0 cannot cancel" in refused.messages
    assert outcome.told["writes_for_spot"] == []
    assert "spot request" not in outcome.told["there"]
    assert [node.get("InstanceLifecycle") for node in outcome.told["nodes"]] == [None] * NODES


@case("foreign_im", cases.foreign_im)
def test_our_own_im_is_not_asked_to_destroy_what_another_made(outcome: Outcome, clean: Outcome):
    refused = outcome.told["elsewhere"]
    assert refused.code == 2
    assert "was made by the IM at http://127.0.0.1:" in refused.messages
    assert outcome.told["still_there"] == outcome.told["there"]


@case("fewer_nodes", cases.quota_for_fewer_nodes)
def test_a_recipe_takes_the_nodes_that_the_quota_allows(outcome: Outcome, clean: Outcome):
    ended = outcome.told["ended"]
    assert [each["cause"] for each in ended.document["attempts"]] == ["quota", None]
    assert len(outcome.told["nodes"]) == 3  # a head and two workers
    assert outcome.told["asked"] == 4 + 3
    assert (ended.code, outcome.told["left"]) == (130, {})


KILLED = [
    pytest.param(point, marks=case(str(point), cases.killed(point)), id=str(point))
    for point in cases.points(6, seed=6)
]


@pytest.mark.parametrize("point", KILLED)
def test_killed_anywhere(outcome: Outcome, clean: Outcome, point: cases.Point):
    assert outcome.told["happened"], "nobody was killed: there are fewer calls than that"


def test_the_key_is_in_no_file(labs):
    """Ledgers, logs, IM's directories, what was rendered, and what the commands said."""
    for future in labs.futures.values():
        future.exception()
    assert [hit for lab in labs.every for hit in lab.canary_in()] == []
