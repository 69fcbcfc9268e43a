"""A fake EC2 and S3: moto's server, with what moto leaves out of EC2 and these tests look at.

Usage: fake_ec2_server.py PORT DIRECTORY; MOTO_AMIS_PATH names the images. While the file
`spot_hold` is in the directory, spot requests stay open and no spot node is made.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

from moto.ec2.exceptions import EC2ClientError
from moto.ec2.models import EC2Backend
from moto.ec2.models.amis import Ami
from moto.ec2.models.instances import Instance
from moto.ec2.models.spot_requests import SpotInstanceRequest
from moto.server import ThreadedMotoServer

HOLD = Path(sys.argv[2]) / "spot_hold"
run_instances, terminate = EC2Backend.run_instances, Instance.terminate
filter_of_image, make_request = Ami.get_filter_value, SpotInstanceRequest.__init__


class NoCapacity(EC2ClientError):
    def __init__(self) -> None:
        super().__init__("InsufficientInstanceCapacity", "There is no Spot capacity (fake).")


def fake_run_instances(self: Any, image: str, count: int, *rest: Any, **asked: Any) -> Any:
    """Amazon makes a request for each spot node, answers a repeated token with what it made, and
    tags interfaces."""
    made_before = self.__dict__.setdefault("fake_tokens", {})
    token = asked.get("client_token")
    if token in made_before:
        return made_before[token]
    tags = copy.deepcopy(asked.get("tags") or {})
    spot = asked.get("instance_market_options")
    if spot and HOLD.exists():
        request_for(self, image, asked, tags)
        raise NoCapacity
    made = run_instances(self, image, count, *rest, **asked)
    for node in made.instances:
        for interface in node.nics.values():
            interface.add_tags(tags.get("network-interface", {}))
        if spot:
            request = request_for(self, image, asked, tags)
            request.instance, request.state, request._status_code = node, "active", "fulfilled"
    if token:
        made_before[token] = made
    return made


def request_for(backend: Any, image: str, asked: dict[str, Any], tags: dict[str, Any]) -> Any:
    """The request of a spot node: open, until it has a node."""
    (request,) = backend.request_spot_instances(
        price=None, image_id=image, count=1, spot_instance_type="one-time", valid_from=None,
        valid_until=None, launch_group=None, availability_zone_group=None, key_name=None,
        security_groups=[], user_data=None, instance_type=asked["instance_type"], placement=None,
        kernel_id=None, ramdisk_id=None, monitoring_enabled=False, subnet_id=None,
        tags={"spot-instances-request": tags.get("spot-instances-request", {})},
    )  # fmt: skip
    return request


def fake_request(self: Any, *given: Any, **named: Any) -> None:
    """A request without a node: it gets one when there is one."""
    make_request(self, *given, **named)
    self.state, self._status_code = "open", "capacity-not-available"


def fake_instance_id(self: Any) -> str | None:
    return self.instance.id if self.instance else None


def fake_terminate(self: Any) -> Any:
    """To terminate twice is no error at Amazon. The request of a spot node is closed with it."""
    if self._state.name == "terminated":
        return copy.copy(self._state)
    before = terminate(self)
    for request in self.ec2_backend.spot_instance_requests.values():
        if request.instance is self:
            request.state = "closed"
    return before


def fake_filter_of_image(self: Any, name: str, *rest: Any) -> Any:
    return "ebs" if name == "root-device-type" else filter_of_image(self, name, *rest)


def main() -> None:
    EC2Backend.run_instances = fake_run_instances
    Instance.terminate = fake_terminate
    Ami.get_filter_value = fake_filter_of_image
    SpotInstanceRequest.__init__ = fake_request
    SpotInstanceRequest.launch_instance = lambda self: None
    SpotInstanceRequest.instance_id = property(fake_instance_id)
    server = ThreadedMotoServer("127.0.0.1", int(sys.argv[1]), verbose=False)
    server._server_entry()


if __name__ == "__main__":
    main()
