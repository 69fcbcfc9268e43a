"""Which cloud's keys are looked for where."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from mayfly.auth import aws, azure, egi, google, opennebula, openstack
from mayfly.auth.credential import Credential
from mayfly.errors import unknown

FINDERS: dict[str, Callable[[Mapping[str, str]], Credential]] = {
    "aws": aws.find,
    "gcp": google.find,
    "azure": azure.find,
    "openstack": openstack.find,
    "egi": egi.find,
    "opennebula": opennebula.find,
}
# Nodes there need no keys of ours: containers here, and machines that the user's own SSH reaches.
KEYLESS = ("local", "static")
CLOUDS = (*FINDERS, *KEYLESS)


def find_credential(cloud: str, environ: Mapping[str, str]) -> Credential | None:
    """The keys to a cloud, None where there are none.

    Raises Missing that names what is not set, UserError for what cannot be used.
    """
    if cloud not in CLOUDS:
        raise unknown("cloud", cloud, CLOUDS, "its credentials are not known")
    return FINDERS[cloud](environ) if cloud in FINDERS else None
