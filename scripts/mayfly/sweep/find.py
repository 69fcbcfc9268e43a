"""Whose account can be swept, and with which library."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from botocore.config import Config

from mayfly.clouds import load_cloud
from mayfly.heat import stack
from mayfly.sweep.aws import AwsAccount
from mayfly.sweep.openstack import OpenStackAccount
from mayfly.sweep.things import Account

SWEPT = ("aws", "openstack")
_PATIENT = Config(connect_timeout=10, read_timeout=60, retries={"mode": "standard"})


def find_account(cloud: str, environ: Mapping[str, str]) -> Account | None:
    """Return the account that the keys in the environment are for; None where we have no sweep.

    Boto3 and openstacksdk find the keys where they always do, when something is first asked.
    """
    if cloud == "aws":
        return AwsAccount(_client, _default_region(cloud, environ))
    if cloud == "openstack":
        return OpenStackAccount(stack.connect)
    return None


def _client(service: str, region: str) -> Any:
    import boto3  # noqa: PLC0415 (it takes long to import)

    return boto3.client(service, region_name=region, config=_PATIENT)  # type: ignore[call-overload]


def _default_region(cloud: str, environ: Mapping[str, str]) -> str:
    setting = load_cloud(cloud).settings["region"]
    named = (environ.get(variable) for variable in setting.environment)
    return next((value for value in named if value), str(setting.default))
