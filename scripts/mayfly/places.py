"""Where in a cloud a run's nodes are made: the region, server or site, from job or environment."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from mayfly.clouds import CloudProfile, Setting, SettingName
from mayfly.errors import UserError
from mayfly.spec import ClusterSpec
from mayfly.unresolved import mark


@dataclass(frozen=True)
class Place:
    """The values of a cloud's settings; `missing` are those that nothing names."""

    values: Mapping[str, str] = field(default_factory=dict)
    missing: tuple[str, ...] = ()

    @property
    def region(self) -> str | None:
        """The region, zone or site; None where the cloud has none, or it is not known."""
        return self.values.get("region")


@dataclass(frozen=True)
class Target:
    """What a run is and where it is to be."""

    spec: ClusterSpec
    profile: CloudProfile
    place: Place


def find_place(spec: ClusterSpec, profile: CloudProfile, environ: Mapping[str, str]) -> Place:
    """Return what job, environment and the cloud's defaults say, in this order.

    Raises UserError for a value that cannot be one of this cloud's.
    """
    values: dict[str, str] = {}
    missing = []
    for name, setting in profile.settings.items():
        value = _value(name, setting, spec, environ)
        if value is not None:
            values[name] = _checked(name, value, setting, profile.name)
        elif setting.needed:
            missing.append(name)
    return Place(values, tuple(missing))


def require(place: Place, profile: CloudProfile) -> None:
    """Raise UserError that says how to name the first thing that is missing."""
    for name, setting in profile.settings.items():
        if name not in place.missing:
            continue
        raise UserError(
            f"{name} is not set for cloud {profile.name!r}",
            f"set {_ways(setting)}, such as {setting.example}",
        )


def missing_notices(place: Place, profile: CloudProfile) -> list[str]:
    """One line for each thing that `deploy` will want and a dry run does without."""
    settings = {str(name): setting for name, setting in profile.settings.items()}
    return [f"{name} is not set: deploy needs {_ways(settings[name])}" for name in place.missing]


def filled(place: Place) -> dict[str, str]:
    """The values, and marks for what is missing, as the image's URL takes them."""
    return {**place.values, **{name: mark(name) for name in place.missing}}


def _ways(setting: Setting) -> str:
    return " or ".join([*(["--region"] if setting.in_job else []), *setting.environment])


def _value(
    name: SettingName, setting: Setting, spec: ClusterSpec, environ: Mapping[str, str]
) -> str | None:
    if name == "region" and spec.region:
        return spec.region
    named = (environ.get(variable) for variable in setting.environment)
    return next((value for value in named if value), setting.default)


def _checked(name: str, value: str, setting: Setting, cloud: str) -> str:
    """The value; of a URL, only the host, which is how IM knows a server."""
    if "://" in value:
        value = urlsplit(value).hostname or value
    if not re.fullmatch(setting.pattern or r"[A-Za-z0-9._:-]+", value):
        raise UserError(
            f"{name} is {value!r}, which is none of cloud {cloud!r}",
            f"write one such as {setting.example}",
        )
    return value
