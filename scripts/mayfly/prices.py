"""Price lists: what a user wrote, or `mayfly prices update` fetched. No price is in this program.

A file holds one list or several, as YAML documents (JSON is YAML, too); docs/costs.md describes it.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from mayfly.errors import UserError

STALE_DAYS = 30


class _Model(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )


def _ordered(spot: tuple[float, float] | None) -> tuple[float, float] | None:
    if spot is not None and spot[0] > spot[1]:
        raise ValueError("write the lowest price before the highest")
    return spot


Price = Annotated[float, Field(ge=0)]


class TypePrice(_Model):
    """What one node costs."""

    hour: Price
    """For an hour on demand."""
    spot: Annotated[tuple[Price, Price] | None, AfterValidator(_ordered)] = None
    """Lowest and highest price of an hour as a spot node, as they were lately."""


class PriceList(_Model):
    """The prices of one cloud, in one region or in all."""

    format: Literal[1] = 1
    """Version of this format."""
    cloud: str
    """A file in radl/clouds/."""
    region: str | None = None
    """The region, as a job names it; None: the same everywhere."""
    currency: str = Field(pattern=r"^[A-Z]{3}$")
    """ISO 4217 code of all prices."""
    date: dt.date
    """The day from which the prices are."""
    source: str = Field(min_length=1)
    """Where they are from, for people."""
    types: dict[str, TypePrice] = {}
    """Price of each instance type."""
    other: TypePrice | None = None
    """Price of a node whose type is not listed, or that has none."""
    disk_gb_month: Price | None = None
    """A GB of system disk for a month of 730 hours."""
    address_hour: Price | None = None
    """A public address for an hour."""
    transfer_gb: Price | None = None
    """A GB that leaves the region."""

    def of(self, name: str | None) -> TypePrice | None:
        """The price of a type; None when it is not known."""
        return self.types.get(name or "", self.other)

    def is_stale(self, today: dt.date) -> bool:
        """Whether the list is older than STALE_DAYS."""
        return self.age(today) > STALE_DAYS

    def age(self, today: dt.date) -> int:
        """Days since its date."""
        return (today - self.date).days


@dataclass(frozen=True)
class Found:
    """A price list, and where it was."""

    prices: PriceList
    origin: str


def read(path: Path) -> list[PriceList]:
    """All lists in a file. Raises UserError that names the first thing that is wrong in it."""
    try:
        documents = list(yaml.safe_load_all(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise UserError(f"cannot read the prices {path}: {error.strerror}", _HINT) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}, line {mark.line + 1}" if mark else str(path)
        raise UserError(f"{where} is not YAML", "correct it there") from None
    if not documents:
        raise UserError(f"there are no prices in {path}", _HINT)
    return [_parsed(document, path) for document in documents]


def find_given(
    cloud: str, region: str | None, environ: Mapping[str, str], given: Path | None
) -> Found | None:
    """The list for a cloud and region in the file `given`, or the one that MAYFLY_PRICES names.

    None when there is no such file. Raises UserError when it has no list for them.
    """
    named = given or (Path(environ["MAYFLY_PRICES"]) if environ.get("MAYFLY_PRICES") else None)
    if named is None:
        return None
    found = _best(read(named), cloud, region)
    if found is None:
        raise UserError(f"no prices of {_place(cloud, region)} in {named}", _HINT)
    return Found(found, str(named))


def find_stored(cloud: str, region: str | None, directory: Path) -> Found | None:
    """The list for a cloud and region that was fetched into a directory, if there is one."""
    path = stored_path(directory, cloud, region)
    found = _best(read(path), cloud, region) if path.exists() else None
    return Found(found, str(path)) if found else None


def stored_path(directory: Path, cloud: str, region: str | None) -> Path:
    """Where the fetched list of a cloud and region lies."""
    return directory / f"{cloud}-{region or 'all'}.json"


def store(prices: PriceList, directory: Path) -> Path:
    """Write a fetched list in place of an older one, and return its path."""
    path = stored_path(directory, prices.cloud, prices.region)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(prices.model_dump(mode="json", exclude_none=True), indent=1)
    new = path.with_suffix(".new")
    new.write_text(text + "\n", encoding="utf-8")
    new.replace(path)
    return path


_HINT = "see docs/costs.md for the form, or run `mayfly prices update`"


def _place(cloud: str, region: str | None) -> str:
    return f"{cloud} in {region}" if region else cloud


def _best(lists: Iterable[PriceList], cloud: str, region: str | None) -> PriceList | None:
    """The list of this region before the one for all regions."""
    fitting = [prices for prices in lists if prices.cloud == cloud]
    exact = [prices for prices in fitting if prices.region == region]
    return next(iter(exact or [prices for prices in fitting if prices.region is None]), None)


def _parsed(document: object, path: Path) -> PriceList:
    try:
        return PriceList.model_validate(document)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in first["loc"]) or "the document"
        value = "" if first["type"] == "missing" else f" is {first['input']!r}"
        raise UserError(f"{path}: {key}{value}: {first['msg']}", _HINT) from None
