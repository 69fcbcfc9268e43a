"""`mayfly heat delete` against a cloud of objects: what it asks of openstacksdk, in which order."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from mayfly.errors import RemoteError, UserError
from mayfly.heat import stack


class Gone(Exception):
    """Stands for openstack.exceptions.NotFoundException."""


class Cloud:
    """A stack that goes away after some looks, and resources that may stay."""

    def __init__(self, *states: str, description: str = "Mayfly: training", stay: bool = False):
        self.states = list(states)
        self.description = description
        self.deleted: list[str] = []
        self.found: list[tuple[str, str]] = []
        self.orchestration = self
        self.compute = SimpleNamespace(find_server=self.finder("server", stay))
        names = ("ip", "router", "network", "subnet", "port", "security_group")
        self.network = SimpleNamespace(**{f"find_{n}": self.finder(n, False) for n in names})

    def finder(self, kind: str, stay: bool) -> Any:
        def find(own_id: str, *, ignore_missing: bool) -> Any:
            assert ignore_missing
            self.found.append((kind, own_id))
            return object() if stay else None

        return find

    def find_stack(self, name: str, *, ignore_missing: bool) -> Any:
        assert ignore_missing
        return SimpleNamespace(id=f"id-of-{name}") if self.states else None

    def get_stack(self, stack_id: str) -> Any:
        assert stack_id == "id-of-mine"
        status = self.states.pop(0) if self.deleted and self.states else "CREATE_COMPLETE"
        if status == "gone":
            raise Gone
        return SimpleNamespace(
            id=stack_id, description=self.description, status=status, status_reason="a port is used"
        )

    def resources(self, _: Any) -> Any:
        kinds = {"main": "OS::Nova::Server", "ip": "OS::Neutron::FloatingIP"}
        for name, kind in {**kinds, "main_trained": "OS::Heat::WaitCondition"}.items():
            yield SimpleNamespace(resource_type=kind, physical_resource_id=f"{name}-id")

    def delete_stack(self, found: Any, *, ignore_missing: bool) -> None:
        self.deleted.append(found.id)


@pytest.fixture(autouse=True)
def exceptions(monkeypatch):
    fake = SimpleNamespace(NotFoundException=Gone, SDKException=Gone)
    monkeypatch.setattr(stack, "_sdk", lambda: SimpleNamespace(exceptions=fake))


def delete(cloud: Cloud, timeout_s: float = 100):
    return stack.delete(cloud, "mine", timeout_s, sleep=lambda _: None)


def test_it_waits_until_the_stack_is_gone_and_looks_for_its_resources():
    cloud = Cloud("DELETE_IN_PROGRESS", "DELETE_IN_PROGRESS", "gone")
    done = delete(cloud)
    assert (done.found, done.resources) == (True, 2)
    assert cloud.deleted == ["id-of-mine"]
    assert cloud.found == [("server", "main-id"), ("ip", "ip-id")]


def test_heat_shows_deleted_stacks_by_their_id():
    assert delete(Cloud("DELETE_COMPLETE")).found


def test_a_stack_that_is_not_there_is_no_error():
    assert not delete(Cloud()).found


def test_a_stack_of_somebody_else_is_left_alone():
    cloud = Cloud("gone", description="Kubernetes")
    with pytest.raises(UserError, match="not made from a template of Mayfly"):
        delete(cloud)
    assert cloud.deleted == []


def test_a_stack_that_cannot_be_deleted_says_why():
    with pytest.raises(RemoteError, match="a port is used"):
        delete(Cloud("DELETE_IN_PROGRESS", "DELETE_FAILED"))


def test_what_takes_too_long_can_be_repeated():
    with pytest.raises(RemoteError, match="delete it again"):
        delete(Cloud(*["DELETE_IN_PROGRESS"] * 9), timeout_s=-1)


def test_a_resource_that_is_left_is_named():
    with pytest.raises(RemoteError, match="OS::Nova::Server main-id"):
        delete(Cloud("gone", stay=True))


def test_without_openstacksdk_the_user_is_told_what_to_install(monkeypatch):
    monkeypatch.undo()  # the stand-in of above
    monkeypatch.setitem(sys.modules, "openstack", None)
    with pytest.raises(UserError, match="pip install"):
        stack.connect()
