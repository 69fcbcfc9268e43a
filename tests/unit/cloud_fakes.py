"""Stand-ins for providers, and plans to look at. No price in here is a real one."""

from __future__ import annotations

import datetime as dt
import json
from dataclasses import dataclass, field
from typing import Any

from botocore.exceptions import ClientError

from mayfly.prices import PriceList

TODAY = dt.date(2026, 11, 28)


def price_list(**changes: Any) -> PriceList:
    """Made-up prices of aws in us-east-1."""
    values = {
        "cloud": "aws",
        "region": "us-east-1",
        "currency": "USD",
        "date": "2026-11-20",
        "source": "made up",
        "types": {
            "m6i.large": {"hour": 0.1},
            "c6i.xlarge": {"hour": 0.2, "spot": [0.05, 0.08]},
        },
        "disk_gb_month": 0.073,
        "address_hour": 0.005,
        "transfer_gb": 0.1,
    }
    return PriceList.model_validate({**values, **changes})


@dataclass
class FakePricing:
    """Amazon's price list: products by instance type, and some without one."""

    hours: dict[str, list[float]]
    disk: list[float] = field(default_factory=lambda: [0.08])
    asked: list[dict[str, str]] = field(default_factory=list)

    def get_products(self, ServiceCode: str, Filters: list[dict[str, str]]) -> dict[str, Any]:  # noqa: N803
        fields = {each["Field"]: each["Value"] for each in Filters}
        self.asked.append({"service": ServiceCode, **fields})
        if "instanceType" in fields:
            prices, unit = self.hours.get(fields["instanceType"], []), "Hrs"
        elif "volumeApiName" in fields:
            prices, unit = self.disk, "GB-Mo"
        elif ServiceCode == "AWSDataTransfer":
            return {"PriceList": [product([0.09, 0.085, 0.0], "GB")]}
        else:
            prices, unit = [0.005], "Hrs"
        return {"PriceList": [product([price], unit) for price in prices]}


def product(prices: list[float], unit: str) -> str:
    """A product as the price list has it: JSON text, each price a step."""
    rates = {
        str(step): {"unit": unit, "pricePerUnit": {"USD": f"{price:.10f}"}}
        for step, price in enumerate(prices)
    }
    return json.dumps({"terms": {"OnDemand": {"A.B": {"priceDimensions": rates}}}})


@dataclass
class FakeEC2:
    """A region of Amazon, by its listings."""

    images: list[dict[str, str]] = field(default_factory=list)
    types: dict[str, dict[str, Any]] = field(default_factory=dict)
    spot: list[dict[str, str]] = field(default_factory=list)
    regions: dict[str, str] = field(default_factory=lambda: {"us-east-1": "opt-in-not-required"})
    refusal: str | None = None

    def describe_regions(self, **_: Any) -> dict[str, Any]:
        self._refuse()
        listed = [{"RegionName": name, "OptInStatus": way} for name, way in self.regions.items()]
        return {"Regions": listed}

    def describe_images(self, **asked: Any) -> dict[str, Any]:
        self._refuse()
        wanted = asked.get("ImageIds")
        found = [image for image in self.images if not wanted or image["ImageId"] in wanted]
        if wanted and not found:
            raise refusal("InvalidAMIID.NotFound", "DescribeImages")
        return {"Images": found}

    def describe_instance_type_offerings(self, Filters: Any, **_: Any) -> dict[str, Any]:  # noqa: N803
        pattern = Filters[0]["Values"][0]
        begin = pattern.removesuffix("*")
        found = [
            name
            for name in self.types
            if name == pattern or ("*" in pattern and name.startswith(begin))
        ]
        return {"InstanceTypeOfferings": [{"InstanceType": name} for name in found]}

    def describe_instance_types(self, InstanceTypes: list[str]) -> dict[str, Any]:  # noqa: N803
        return {
            "InstanceTypes": [{"InstanceType": name, **self.types[name]} for name in InstanceTypes]
        }

    def describe_spot_price_history(self, **_: Any) -> dict[str, Any]:
        return {"SpotPriceHistory": self.spot}

    def _refuse(self) -> None:
        if self.refusal:
            raise refusal(self.refusal, "DescribeSomething")


def refusal(code: str, operation: str) -> ClientError:
    """Amazon's error with a code."""
    return ClientError({"Error": {"Code": code, "Message": f"the text of {code}"}}, operation)


def size(cpu: int, memory_mb: int, gpus: int = 0) -> dict[str, Any]:
    """A type as EC2 describes it."""
    gpu = {"GpuInfo": {"Gpus": [{"Count": gpus, "Manufacturer": "NVIDIA", "Name": "X"}]}}
    return {
        "VCpuInfo": {"DefaultVCpus": cpu},
        "MemoryInfo": {"SizeInMiB": memory_mb},
        **(gpu if gpus else {}),
    }
