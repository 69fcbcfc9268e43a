"""The end of a stack: deleted by openstacksdk, and looked for until nothing of it is there."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mayfly.errors import RemoteError, UserError
from mayfly.heat.template import MARK

PAUSE_S = 5
# How to look for what costs money or blocks a quota, by its Heat type.
_FIND: dict[str, Callable[[Any], Callable[..., Any]]] = {
    "OS::Nova::Server": lambda cloud: cloud.compute.find_server,
    "OS::Neutron::FloatingIP": lambda cloud: cloud.network.find_ip,
    "OS::Neutron::Router": lambda cloud: cloud.network.find_router,
    "OS::Neutron::Net": lambda cloud: cloud.network.find_network,
    "OS::Neutron::Subnet": lambda cloud: cloud.network.find_subnet,
    "OS::Neutron::Port": lambda cloud: cloud.network.find_port,
    "OS::Neutron::SecurityGroup": lambda cloud: cloud.network.find_security_group,
}


@dataclass(frozen=True)
class Deleted:
    """What `delete` did: whether the stack was there, and how many resources were its own."""

    found: bool
    resources: int


def connect(region: str | None = None) -> Any:
    """A connection to the cloud of OS_CLOUD or the other OS_* variables, in a region of its.

    Raises UserError.
    """
    sdk = _sdk()
    try:
        cloud = sdk.connect(**({"region_name": region} if region else {}))
        cloud.authorize()
    except Exception as error:  # keystoneauth, os-client-config and sdk each have their own
        raise UserError(
            f"no OpenStack to talk to: {error}", "set OS_CLOUD, or source your project's openrc.sh"
        ) from error
    return cloud


def _sdk() -> Any:
    """The library, loaded when it is first needed: that takes longer than most commands do.

    Raises UserError where it is not installed.
    """
    try:
        return importlib.import_module("openstack")
    except ImportError as error:  # an extra of its own: nobody else needs it
        raise UserError(
            "openstacksdk is not installed", "run: .venv/bin/pip install 'openstacksdk>=4,<5'"
        ) from error


def delete(
    cloud: Any, name: str, timeout_s: float, sleep: Callable[[float], None] = time.sleep
) -> Deleted:
    """Delete the stack `name` and wait until it and its resources are gone; twice is harmless.

    Raises UserError for a stack that is not ours, RemoteError for one that does not go away.
    """
    try:
        return _delete(cloud, name, timeout_s, sleep)
    except _sdk().exceptions.SDKException as error:
        raise RemoteError(
            f"stack {name!r}: {error}", "correct it there and delete again"
        ) from error


def _delete(cloud: Any, name: str, timeout_s: float, sleep: Callable[[float], None]) -> Deleted:
    found = cloud.orchestration.find_stack(name, ignore_missing=True)
    if found is None:
        return Deleted(False, 0)
    # The listing has no description; only a stack by itself does.
    found = cloud.orchestration.get_stack(found.id)
    if not str(found.description or "").startswith(MARK):
        raise UserError(
            f"stack {name!r} was not made from a template of Mayfly",
            f"if it is to go: openstack stack delete {name}",
        )
    resources = _resources(cloud, found)
    cloud.orchestration.delete_stack(found, ignore_missing=True)
    _wait(cloud, found.id, name, timeout_s, sleep)
    left = [text for text in (_look(cloud, *item) for item in resources) if text]
    if left:
        raise RemoteError(
            f"stack {name!r} is deleted, but some of it is left: {', '.join(left)}",
            "delete them in the dashboard, or with `openstack`",
        )
    return Deleted(True, len(resources))


def _wait(
    cloud: Any, stack_id: str, name: str, timeout_s: float, sleep: Callable[[float], None]
) -> None:
    end = time.monotonic() + timeout_s
    while (state := _state(cloud, stack_id)) is not None:
        if state.status == "DELETE_FAILED":
            raise RemoteError(
                f"stack {name!r} cannot be deleted: {state.status_reason}",
                f"see `openstack stack resource list {name}`, and delete it again",
            )
        if time.monotonic() > end:
            raise RemoteError(f"stack {name!r} is not gone yet ({state.status})", "delete it again")
        sleep(PAUSE_S)


def _resources(cloud: Any, stack: Any) -> list[tuple[str, str]]:
    """The type and the id of each resource that can be looked for."""
    listed = cloud.orchestration.resources(stack)
    known = ((item.resource_type, item.physical_resource_id) for item in listed)
    return [(kind, own) for kind, own in known if kind in _FIND and own]


def _state(cloud: Any, stack_id: str) -> Any:
    """The stack, or None when it is gone; Heat keeps showing deleted ones by their id."""
    try:
        found = cloud.orchestration.get_stack(stack_id)
    except _sdk().exceptions.NotFoundException:
        return None
    return None if found.status == "DELETE_COMPLETE" else found


def _look(cloud: Any, kind: str, own_id: str) -> str | None:
    return f"{kind} {own_id}" if _FIND[kind](cloud)(own_id, ignore_missing=True) else None
