"""Amazon EC2: what exists in a region, and what it costs, by boto3 clients that are passed in.

Price list: https://docs.aws.amazon.com/awsaccountbilling/latest/aboutv2/price-changes.html
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Any

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    NoCredentialsError,
    PartialCredentialsError,
)

from mayfly.auth.aws import clock_advice
from mayfly.clouds import ImageRule, InstanceType
from mayfly.errors import MayflyError, RemoteError, UserError, nearest, unknown
from mayfly.prices import PriceList, TypePrice

# The price list is served from few regions; the spot history reaches back three months at most.
PRICES_REGION = "us-east-1"
SPOT_HISTORY = timedelta(days=1)
DISK = "gp3"

ClientOf = Callable[[str, str], Any]
"""Service and region → boto3 client."""


@dataclass(frozen=True)
class Aws:
    """EC2 in one region. Every method raises UserError for what does not exist there, and
    RemoteError when Amazon refuses or does not answer."""

    client_of: ClientOf
    region: str

    def check_region(self) -> None:
        """Raise UserError unless the account can use the region."""
        answer = self._ask("ec2", "describe_regions", PRICES_REGION, AllRegions=True)
        known = {region["RegionName"]: region.get("OptInStatus") for region in answer["Regions"]}
        if self.region not in known:
            raise unknown("region", self.region, known, "see `aws ec2 describe-regions`")
        if known[self.region] == "not-opted-in":
            raise UserError(
                f"region {self.region!r} is not enabled for this account",
                "enable it in the account's settings, or take another region",
            )

    def find_image(self, rule: ImageRule) -> str:
        """Return the identifier of the newest image by the rule."""
        wanted = {
            "name": rule.name,
            "architecture": "x86_64",
            "state": "available",
            "root-device-type": "ebs",
        }
        filters = [{"Name": name, "Values": [value]} for name, value in wanted.items()]
        answer = self._ask("ec2", "describe_images", Owners=[str(rule.owner)], Filters=filters)
        images = sorted(answer["Images"], key=lambda image: str(image["CreationDate"]))
        if not images:
            raise UserError(
                f"no image {rule.name!r} of owner {rule.owner} in region {self.region}",
                "give another one with --image ami-…",
            )
        return str(images[-1]["ImageId"])

    def check_image(self, image: str) -> str:
        """Return the identifier that the user gave, when there is such an image."""
        try:
            answer = self._ask("ec2", "describe_images", ImageIds=[image])
        except _Refused as error:
            if not error.code.startswith("InvalidAMI"):
                raise
            answer = {"Images": []}
        if not answer["Images"]:
            raise UserError(
                f"image {image!r} does not exist in region {self.region}, or is not yours to use",
                "check the identifier: each region has its own",
            )
        return image

    def sizes(self, types: Iterable[str]) -> dict[str, InstanceType]:
        """Return what instance types have; raises UserError for one that the region lacks."""
        names = list(types)
        self.check_types(names)
        if not names:
            return {}
        answer = self._ask("ec2", "describe_instance_types", InstanceTypes=names)
        return {each["InstanceType"]: _size(each) for each in answer["InstanceTypes"]}

    def check_types(self, types: Iterable[str]) -> None:
        """Raise UserError for the first type that the region does not offer."""
        for name in types:
            if not self._offered(name):
                offered = self._offered(f"{name.partition('.')[0]}.*")
                guess = nearest(name, offered)
                raise UserError(
                    f"instance type {name!r} does not exist in region {self.region}",
                    f"did you mean {guess!r}?" if guess else "take another type or region",
                )

    def prices(self, types: Iterable[str], today: date) -> PriceList:
        """Return the current prices of the types, as far as Amazon has them."""
        names = list(types)
        spot = self._spot(names)
        hours = {name: self._hour(name) for name in names}
        disk = self._price("AmazonEC2", "GB-Mo", productFamily="Storage", volumeApiName=DISK)
        address = self._price("AmazonVPC", "Hrs", group="VPCPublicIPv4Address")
        transfer = self._price(
            "AWSDataTransfer", "GB", transferType="AWS Outbound", toLocation="External"
        )
        return PriceList(
            cloud="aws",
            region=self.region,
            currency="USD",
            date=today,
            source="AWS Price List API and EC2 spot price history",
            types={
                name: TypePrice(hour=hour, spot=spot.get(name))
                for name, hour in hours.items()
                if hour is not None
            },
            disk_gb_month=disk,
            address_hour=address,
            transfer_gb=transfer,
        )

    def _offered(self, pattern: str) -> list[str]:
        """Return the types that the region offers, of those that match (`g5.*`)."""
        answer = self._ask(
            "ec2",
            "describe_instance_type_offerings",
            LocationType="region",
            Filters=[{"Name": "instance-type", "Values": [pattern]}],
        )
        return sorted(str(each["InstanceType"]) for each in answer["InstanceTypeOfferings"])

    def _hour(self, name: str) -> float | None:
        return self._price(
            "AmazonEC2",
            "Hrs",
            instanceType=name,
            operatingSystem="Linux",
            tenancy="Shared",
            preInstalledSw="NA",
            capacitystatus="Used",
        )

    def _price(self, service: str, unit: str, **attributes: str) -> float | None:
        """Return the price of the one product with these attributes; None unless it is unique.

        Of prices in steps (transfer) the first one counts, which is the highest.
        """
        place = "fromRegionCode" if service == "AWSDataTransfer" else "regionCode"
        fields = {place: self.region, **attributes}
        filters = [
            {"Type": "TERM_MATCH", "Field": name, "Value": value} for name, value in fields.items()
        ]
        answer = self._ask(
            "pricing", "get_products", PRICES_REGION, ServiceCode=service, Filters=filters
        )
        products = (json.loads(text) for text in answer["PriceList"])
        found = {max(prices) for product in products if (prices := list(_rates(product, unit)))}
        found.discard(0.0)
        return found.pop() if len(found) == 1 else None

    def _spot(self, types: list[str]) -> dict[str, tuple[float, float]]:
        """Return the lowest and the highest spot price of each type in the last day."""
        answer = self._ask(
            "ec2",
            "describe_spot_price_history",
            InstanceTypes=types,
            ProductDescriptions=["Linux/UNIX"],
            StartTime=datetime.now(UTC) - SPOT_HISTORY,
        )
        seen: dict[str, list[float]] = {}
        for entry in answer["SpotPriceHistory"]:
            seen.setdefault(entry["InstanceType"], []).append(float(entry["SpotPrice"]))
        return {name: (min(prices), max(prices)) for name, prices in seen.items()}

    def _ask(self, service: str, call: str, region: str | None = None, **given: Any) -> Any:
        try:
            return getattr(self.client_of(service, region or self.region), call)(**given)
        except ClientError as error:
            raise _Refused(call, error) from error
        except (NoCredentialsError, PartialCredentialsError) as error:
            raise UserError(f"no AWS keys: {error}", _NO_KEYS) from error
        except BotoCoreError as error:
            raise RemoteError(f"Amazon was not asked ({call}): {error}", _KEYS) from error


_NO_KEYS = "run `aws configure`, or set AWS_*; --dry-run looks without keys"
_KEYS = "check keys and network: `aws sts get-caller-identity`"


class _Refused(MayflyError):
    """Amazon answered with an error; `code` says which. Exit code 1."""

    def __init__(self, call: str, error: ClientError) -> None:
        detail = error.response.get("Error", {})
        self.code = str(detail.get("Code", ""))
        advice = clock_advice(error.response) or _KEYS
        super().__init__(f"Amazon refused {call}: {detail.get('Message') or self.code}", advice)


def _size(described: dict[str, Any]) -> InstanceType:
    gpus = described.get("GpuInfo", {}).get("Gpus", [])
    count = sum(int(gpu["Count"]) for gpu in gpus)
    model = " ".join((gpus[0].get("Manufacturer", ""), gpus[0].get("Name", ""))) if count else None
    return InstanceType(
        cpu=described["VCpuInfo"]["DefaultVCpus"],
        memory_mb=described["MemoryInfo"]["SizeInMiB"],
        gpu=count,
        gpu_model=model,
    )


def _rates(product: dict[str, Any], unit: str) -> Iterator[float]:
    """Yield the prices per unit on demand of a product of the price list, in US dollars."""
    for term in product.get("terms", {}).get("OnDemand", {}).values():
        for rate in term.get("priceDimensions", {}).values():
            if rate.get("unit") == unit and "USD" in rate.get("pricePerUnit", {}):
                yield float(rate["pricePerUnit"]["USD"])
