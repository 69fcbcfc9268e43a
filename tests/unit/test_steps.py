"""From playbooks to stages: order, groups, and what a configure block must not hold."""

from __future__ import annotations

from typing import Any

import pytest

from mayfly.errors import MayflyError
from mayfly.steps import GroupPlay, load_stages, read_stages


def stages(**playbooks: Any):
    """Stages of playbooks given by name, imported by site.yml in this order."""
    site = [{"ansible.builtin.import_playbook": f"{name}.yml"} for name in playbooks]
    files = {"site.yml": site, **{f"{name}.yml": plays for name, plays in playbooks.items()}}
    return read_stages(files.__getitem__)


def play(hosts: str, *roles: Any, **more: Any) -> dict[str, Any]:
    return {"name": "x", "hosts": hosts, "become": True, "roles": list(roles), **more}


def test_our_own_playbooks():
    found = load_stages()
    assert [stage.name for stage in found] == ["hdfs", "dataset", "runtime", "train"]
    assert [stage.number for stage in found] == [1, 2, 3, 4]
    roles = {stage.name: {play.group: play.role_names for play in stage.plays} for stage in found}
    assert roles["hdfs"] == dict.fromkeys(("ps", "worker"), ("deadman", "hadoop", "juicefs"))
    assert "dataset" in roles["dataset"]["worker"]
    assert "dataset" not in roles["dataset"]["ps"]
    assert roles["runtime"] == {"ps": ("gpu", "runtime"), "worker": ("gpu", "runtime", "horovod")}
    assert "model_export" in roles["train"]["worker"]
    assert roles["train"]["ps"] == ("trainer",)


def test_the_order_is_the_one_of_site():
    found = stages(second=[play("all", "n.c.b")], first=[play("all", "n.c.a")])
    assert [(stage.number, stage.name) for stage in found] == [(1, "second"), (2, "first")]


@pytest.mark.parametrize("hosts", ["all", "ps:worker", "worker,ps"])
def test_plays_for_both_groups(hosts):
    (stage,) = stages(one=[play(hosts, "n.c.a")])
    assert [play.group for play in stage.plays] == ["ps", "worker"]


def test_the_plays_of_a_group_become_one_in_their_order():
    (stage,) = stages(
        one=[
            play("all", "n.c.a", {"role": "n.c.b"}, vars={"a_x": 1, "a_y": 1}),
            play("worker", "n.c.c", "n.c.a", vars={"a_y": 2}),
        ]
    )
    ps, worker = stage.plays
    assert ps == GroupPlay("ps", ("n.c.a", "n.c.b"), {"a_x": 1, "a_y": 1})
    assert worker == GroupPlay("worker", ("n.c.a", "n.c.b", "n.c.c"), {"a_x": 1, "a_y": 2})


def test_a_stage_may_leave_a_group_alone():
    (stage,) = stages(one=[play("worker", "n.c.a")])
    assert [play.group for play in stage.plays] == ["worker"]


def test_tasks_in_a_playbook_are_refused():
    with pytest.raises(MayflyError, match="'tasks'"):
        stages(one=[play("all", "n.c.a", tasks=[])])


@pytest.mark.parametrize("hosts", ["localhost", "ps:!worker", ""])
def test_other_hosts_are_refused(hosts):
    with pytest.raises(MayflyError, match="hosts may be"):
        stages(one=[play(hosts, "n.c.a")])


def test_site_holds_imports_only():
    with pytest.raises(MayflyError, match="site.yml"):
        read_stages({"site.yml": [play("all", "n.c.a")]}.__getitem__)
