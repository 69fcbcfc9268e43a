"""Which provider is asked for what, and with which clients.

The clients are made when they are first needed. Whoever has keys of another kind passes in other
functions that make them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import date
from typing import Any, Protocol

from mayfly.clouds import CloudProfile, InstanceType
from mayfly.errors import MayflyError, UserError
from mayfly.images import Finder
from mayfly.node_types import Nodes, undescribed
from mayfly.places import Place
from mayfly.prices import Found, PriceList
from mayfly.providers import azure
from mayfly.providers.aws import Aws, ClientOf
from mayfly.providers.azure import Azure
from mayfly.providers.openstack import OpenStack
from mayfly.spec import ClusterSpec


class Pricer(Protocol):
    """Where prices are fetched."""

    def prices(self, types: Iterable[str], today: date) -> PriceList: ...


@dataclass(frozen=True)
class Clients:
    """How to reach each provider; None where there is no way."""

    aws: ClientOf | None = None
    openstack: Callable[[], Any] | None = None
    azure: azure.Get | None = azure.get


def finder(
    spec: ClusterSpec, profile: CloudProfile, place: Place, clients: Clients
) -> Finder | None:
    """Return who looks images up; None where nobody has to, or nobody can."""
    lookup = profile.image.lookup if profile.image else None
    if lookup == "ec2" and clients.aws and place.region:
        return Aws(clients.aws, place.region)
    if lookup == "openstack" and clients.openstack and "://" not in (spec.image or ""):
        return OpenStack(clients.openstack())
    return None


def pricer(profile: CloudProfile, place: Place, clients: Clients) -> Pricer | None:
    """Return who knows the cloud's prices, or None."""
    if profile.prices == "aws" and clients.aws and place.region:
        return Aws(clients.aws, place.region)
    if profile.prices == "azure" and clients.azure and place.region:
        return Azure(place.region, clients.azure)
    return None


def check_types(
    nodes: tuple[Nodes, ...], profile: CloudProfile, place: Place, clients: Clients
) -> dict[str, InstanceType]:
    """Ask whether region and types exist, and return the sizes of those not described.

    Raises UserError for what does not exist; nothing is asked where nobody can be.
    """
    if profile.instances == "flavors" and clients.openstack:
        flavors = [group.type for group in nodes if group.type]
        if flavors:
            OpenStack(clients.openstack()).check_flavors(flavors)
        return {}
    if profile.prices != "aws" or not clients.aws or not place.region:
        return {}
    amazon = Aws(clients.aws, place.region)
    amazon.check_region()
    new = undescribed(nodes)
    amazon.check_types(group.type for group in nodes if group.type and group.type not in new)
    return amazon.sizes(new)


def fetch(
    types: Iterable[str], profile: CloudProfile, place: Place, clients: Clients, today: date
) -> PriceList:
    """Return the provider's prices; raises UserError when it has no price list to ask for."""
    source = pricer(profile, place, clients)
    if source is None:
        raise UserError(
            f"prices of cloud {profile.name!r} cannot be fetched",
            "write them into a file, as docs/costs.md shows, and give it with --prices",
        )
    return source.prices([*types], today)


def find_prices(
    nodes: tuple[Nodes, ...], profile: CloudProfile, place: Place, clients: Clients, today: date
) -> tuple[Found | None, str]:
    """Return the prices of these nodes as they are now, or None and the reason."""
    if pricer(profile, place, clients) is None:
        return None, f"nobody can be asked for prices of {profile.title}: give --prices FILE"
    types = dict.fromkeys(group.type for group in nodes if group.type)
    try:
        fetched = fetch(types, profile, place, clients, today)
    except MayflyError as error:
        return None, str(error)
    return Found(fetched, fetched.source), ""
