# Copyright (C) 2026 Mayfly developers
# SPDX-License-Identifier: GPL-3.0-or-later
#
# This program is free software: you can redistribute it and/or modify it under the terms of the GNU
# General Public License as published by the Free Software Foundation, either version 3 of the
# License, or (at your option) any later version. It is distributed WITHOUT ANY WARRANTY; see the
# GNU General Public License, https://www.gnu.org/licenses/, for details.
"""IM connector `MayflyOpenStack`: OpenStack nodes whose floating addresses say whose they are.

IM's own connector gives a node a free floating address of the project's, or makes one, and marks
neither: when it loses sight of the node nobody can tell the two apart. Here the one that is made
carries the run's tag in its description, from the call that makes it (Neutron: attribute
`description` of POST /v2.0/floatingips). One of the project's is taken as it is, and stays.
"""

from __future__ import annotations

from IM.connectors.OpenStack import OpenStackCloudConnector
from libcloud.common.exceptions import BaseHTTPError
from libcloud.compute.drivers.openstack import (
    OpenStack_2_FloatingIpAddress,
    OpenStack_2_FloatingIpPool,
)

TAG = "mayfly-run"  # radl/partials/system.radl.j2 gives it to each node
BAD_REQUEST = 400


class MayflyOpenStackCloudConnector(OpenStackCloudConnector):
    """IM's OpenStack connector with marks on the floating addresses that it makes."""

    type = "MayflyOpenStack"  # IM takes fifteen characters

    def __init__(self, cloud_info, inf):
        super().__init__(cloud_info, inf)
        self.run = None  # that of the infrastructure, once a node of it wants an address

    def add_elastic_ip_from_pool(self, vm, node, fixed_ip=None, pool_name=None):
        """Give a node a floating address; (True, address) or (False, why not)."""
        self.run = self.get_instance_tags(vm.info.systems[0]).get(TAG)
        return super().add_elastic_ip_from_pool(vm, node, fixed_ip, pool_name)

    def get_ip_pool(self, driver, pool_name=None, exclude_pools=None):
        """The pool that an address is taken from, None for none; what it makes is marked."""
        pool = super().get_ip_pool(driver, pool_name, exclude_pools)
        if self.run and isinstance(pool, OpenStack_2_FloatingIpPool):
            return MarkingPool(pool, f"{TAG}={self.run}")
        return pool


class MarkingPool(OpenStack_2_FloatingIpPool):
    """A pool of floating addresses that gives a description to those that it makes."""

    def __init__(self, pool, description):
        super().__init__(pool.id, pool.name, pool.connection)
        self.description = description

    def create_floating_ip(self):
        """Make an address, without a mark where Neutron knows no descriptions."""
        wanted = {"floating_network_id": self.id, "description": self.description}
        try:
            answer = self.connection.request(
                "/v2.0/floatingips", method="POST", data={"floatingip": wanted}
            )
        except BaseHTTPError as error:
            if error.code != BAD_REQUEST:
                raise
            return super().create_floating_ip()
        made = answer.object["floatingip"]
        return OpenStack_2_FloatingIpAddress(
            made["id"], made["floating_ip_address"], self, driver=self.connection.driver
        )
