"""Azure's retail prices, which anybody may ask for.

https://learn.microsoft.com/rest/api/cost-management/retail-prices/azure-retail-prices
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from typing import Any

import requests

from mayfly.errors import RemoteError
from mayfly.prices import PriceList, TypePrice

URL = "https://prices.azure.com/api/retail/prices"
TIMEOUT_S = 30
PAGES = 20  # of a hundred prices; one type in one region has less than one
_OTHER_PRICES = ("Spot", "Low Priority")

Get = Callable[[str, Mapping[str, str]], dict[str, Any]]
"""URL and query → the JSON document that it answers."""


@dataclass(frozen=True)
class Azure:
    """The retail prices of one region."""

    region: str
    get: Get

    def prices(self, types: Iterable[str], today: date) -> PriceList:
        """Return the prices of the types for Linux on demand; raises RemoteError."""
        hours = {name: self._hour(name) for name in types}
        return PriceList(
            cloud="azure",
            region=self.region,
            currency="USD",
            date=today,
            source="Azure retail prices API",
            types={name: TypePrice(hour=hour) for name, hour in hours.items() if hour is not None},
        )

    def _hour(self, name: str) -> float | None:
        """Return the price of an hour; None unless exactly one is left of those that match."""
        found = {
            float(item["retailPrice"]) for item in self._items(name) if _is_linux_on_demand(item)
        }
        return found.pop() if len(found) == 1 else None

    def _items(self, name: str) -> Iterator[dict[str, Any]]:
        wanted = {
            "serviceName": "Virtual Machines",
            "armRegionName": self.region,
            "armSkuName": name,
            "priceType": "Consumption",
        }
        query = {"$filter": " and ".join(f"{key} eq '{value}'" for key, value in wanted.items())}
        url: str | None = URL
        for _ in range(PAGES):
            if not url:
                return
            page = self.get(url, query)
            yield from page.get("Items", [])
            url, query = page.get("NextPageLink"), {}


def get(url: str, query: Mapping[str, str]) -> dict[str, Any]:
    """Return the JSON document at a URL of the retail prices; raises RemoteError."""
    if not url.startswith(URL.rpartition("/")[0]):
        raise RemoteError(f"Azure's prices go on at {url}, which is not theirs")
    try:
        answer = requests.get(url, params=dict(query), timeout=TIMEOUT_S)
        answer.raise_for_status()
        document = answer.json()
    except (requests.RequestException, ValueError) as error:
        # What these say fills a screen; whom they were asked and how it failed is enough.
        cause = f"{type(error).__name__} at {URL}"
        raise RemoteError(
            f"Azure's prices were not fetched: {cause}", "give a file with --prices"
        ) from error
    return document if isinstance(document, dict) else {}


def _is_linux_on_demand(item: Mapping[str, Any]) -> bool:
    return (
        item.get("unitOfMeasure") == "1 Hour"
        and item.get("type") == "Consumption"
        and "Windows" not in str(item.get("productName"))
        and not any(word in str(item.get("skuName")) for word in _OTHER_PRICES)
    )
