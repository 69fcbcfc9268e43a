"""Which addresses of the stack's subnet nodes can have."""

from __future__ import annotations

from ipaddress import AddressValueError, IPv4Address, IPv4Network, NetmaskValueError

DEFAULT_CIDR = "192.168.100.0/24"
# Neutron's DHCP service takes a port in the subnet for each agent; two where it is redundant.
DHCP_PORTS = 2


def parse_cidr(value: str) -> IPv4Network:
    """The network in `value`. Raises ValueError when it is none, or has no room for a node."""
    try:
        network = IPv4Network(value)
    except (AddressValueError, NetmaskValueError, ValueError):
        raise ValueError(f"write an IPv4 network such as {DEFAULT_CIDR}") from None
    if _room(network) < 0:
        raise ValueError("is too small: the smallest network for a main node is a /29")
    return network


def gateway(network: IPv4Network) -> IPv4Address:
    """The router's address: the first, as Neutron chooses it."""
    return network[1]


def default_main_address(network: IPv4Network) -> IPv4Address:
    """The main node's address: the last, since Neutron gives the first ones to DHCP ports."""
    return network[-2]


def max_workers(network: IPv4Network) -> int:
    """How many workers fit beside the gateway, the DHCP ports and the main node."""
    return _room(network)


def check_main_address(value: str, network: IPv4Network) -> IPv4Address:
    """The main node's address. Raises ValueError when the subnet cannot give it."""
    try:
        address = IPv4Address(value)
    except AddressValueError:
        raise ValueError("is not an IPv4 address") from None
    if address not in network:
        raise ValueError(f"is not in the subnet {network}")
    if address == gateway(network):
        raise ValueError("is the gateway's address: choose another")
    if address in (network.network_address, network.broadcast_address):
        raise ValueError("is the network's own or its broadcast address: choose another")
    return address


def _room(network: IPv4Network) -> int:
    network_and_broadcast, router, main = 2, 1, 1
    return network.num_addresses - network_and_broadcast - router - main - DHCP_PORTS
