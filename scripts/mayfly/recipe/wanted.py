"""What the command line says of a run on nodes, and what it goes on with. Loads next to nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

NOTED = ("workers", "region", "budget", "max_duration")


@dataclass(frozen=True)
class Wanted:
    """What the command line says."""

    cloud: str | None
    workers: int | None = None
    region: str | None = None
    budget: str | None = None
    max_duration: str | None = None
    prices: Path | None = None
    yes: bool = False
    as_json: bool = False
    debug: bool = False


def as_before(given: Wanted, noted: Mapping[str, Any] | None) -> Wanted | None:
    """What a run goes on with: what is given, else what it was started with here. None for a run
    on this machine."""
    if given.cloud is None and noted is None:
        return None
    if given.cloud is not None and (noted is None or given.cloud != noted["cloud"]):
        return given
    kept = noted or {}
    changes: dict[str, Any] = {
        name: kept.get(name) for name in NOTED if getattr(given, name) is None
    }
    return replace(given, cloud=kept["cloud"], **changes)
