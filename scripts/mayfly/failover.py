"""Why a provider gave no nodes, and which offer is tried next: pure, from the words of its error.

What IM passes on ends in the provider's own text. Sources of the texts: the error codes of the EC2
API, of Compute Engine ("resource errors" and "quota errors") and of Azure Resource Manager, nova's
exceptions, and reports of users; tests/unit/test_failover.py has whole ones.
"""

from __future__ import annotations

import re
from collections.abc import Sequence, Set
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from mayfly.errors import RunFailed

MESSAGE_LENGTH = 300


class Cause(StrEnum):
    """What kept a provider from making nodes."""

    CAPACITY = "capacity"
    QUOTA = "quota"
    PERMISSION = "permission"
    IMAGE = "image"  # there is none of that name in that place
    PRICE = "price"  # never a provider's word: the offer became dearer than was agreed
    OTHER = "other"


# The first that is found decides: nova answers 403 for a quota, too.
_SIGNS = (
    (
        Cause.QUOTA,
        r"(Instance|Vcpu|Address|Volume|SecurityGroup\w*|RulesPerSecurityGroup|NetworkInterface)"
        r"LimitExceeded|MaxSpotInstanceCountExceeded|Max spot instance count exceeded"
        r"|Quota '?\S+'? exceeded|QUOTA_EXCEEDED|quotaExceeded|QuotaExceeded"
        r"|Quota exceeded|OverQuota|exceeding (approved|quota limit)"
        r"|Maximum number of \w+ (allowed )?\S*\s?exceeded|limit of \S+ reached for \w+ quota",
    ),
    (
        Cause.PERMISSION,
        r"UnauthorizedOperation|[Nn]ot authorized to perform|AuthFailure|InvalidClientTokenId"
        r"|SignatureDoesNotMatch|ExpiredToken|RequestExpired|OptInRequired|PendingVerification"
        r"|AccessDenied|check the credentials|Policy doesn't allow|requires authentication"
        r"|Required '[\w.]+' permission|PERMISSION_DENIED|has not been used in project"
        r"|AuthorizationFailed|does not have authorization|InvalidAuthenticationToken|AADSTS\d+",
    ),
    (
        Cause.CAPACITY,
        r"Insufficient(Instance|Host|ReservedInstance|FreeAddresses\w*)?Capacity"
        r"|sufficient \S+ capacity|SpotMaxPriceTooLow|capacity-not-available|no Spot capacity"
        r"|not supported in your requested Availability Zone"
        r"|No valid host was found|not enough hosts available"
        r"|ZONE_RESOURCE_POOL_EXHAUSTED|not have enough resources available|STOCKOUT|stockout"
        r"|currently unavailable in the \S+ zone"
        r"|SkuNotAvailable|AllocationFailed|Overconstrained\w*AllocationRequest"
        r"|Capacity Restrictions|sufficient capacity",
    ),
    (
        Cause.IMAGE,
        r"InvalidAMIID\.(NotFound|Unavailable|Malformed)"
        r"|Can not find requested image|Image \S+ could not be found"
        r"|The resource '\S+/images/\S+' was not found|PlatformImageNotFound",
    ),
)
_MISSING = (
    r"not authorized to perform: (?P<what>[\w:*]+)",
    r"Required '(?P<what>[\w.]+)' permission",
    r"to perform action '(?P<what>[\w./]+)'",
    r"Policy doesn't allow (?P<what>[\w:]+)",
    r"UnauthorizedOperation\) when calling the (?P<what>\w+) operation",
)


def classify(text: str) -> Cause:
    """Return why there are no nodes; OTHER for words that are not known."""
    return next((cause for cause, signs in _SIGNS if re.search(signs, text)), Cause.OTHER)


def missing_permission(text: str) -> str | None:
    """Return the name of the permission that an error says is missing, None when it does not."""
    found = (re.search(pattern, text) for pattern in _MISSING)
    return next((match["what"] for match in found if match), None)


def telling_line(text: str) -> str:
    """Return the part of IM's words that says why, on one line and shortened."""
    lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
    signs = [re.compile(pattern) for _, pattern in _SIGNS]
    chosen = next((line for line in lines if any(sign.search(line) for sign in signs)), None)
    line = chosen or (lines[0] if lines else "no reason given")
    at = min((m.start() for m in (sign.search(line) for sign in signs) if m), default=0)
    # Before the reason stand IM's words, as long as they like.
    line = line if at < MESSAGE_LENGTH // 2 else "…" + line[at - 60 :]
    return line if len(line) <= MESSAGE_LENGTH else line[: MESSAGE_LENGTH - 1] + "…"


@dataclass(frozen=True)
class Pool:
    """What a quota is counted in, and how much of it an offer needs; its zone does not matter."""

    region: str | None
    types: tuple[tuple[str, str | None, bool], ...]
    """Group, instance type and whether spot, of each group."""
    nodes: int
    """How many nodes, of all groups."""

    def is_in(self, spent: Set[Pool]) -> bool:
        """Whether a quota is known to be too small for it: fewer nodes of a kind may fit yet."""
        kind = (self.region, self.types)
        return any((one.region, one.types) == kind and self.nodes >= one.nodes for one in spent)


def next_offer(cause: Cause, at: int, pools: Sequence[Pool], spent: set[Pool]) -> int | None:
    """Return the number of the offer to try after that of number `at`, None to stop.

    `spent` are the pools whose quota is known not to do; the one of `at` is added to it.
    """
    if cause in (Cause.PERMISSION, Cause.OTHER):
        return None
    if cause is Cause.QUOTA:
        spent.add(pools[at])
    later = range(at + 1, len(pools))
    return next((number for number in later if not pools[number].is_in(spent)), None)


@dataclass(frozen=True)
class Attempt:
    """One offer that was tried; `cause` is None when its nodes were made."""

    offer: str
    price_per_hour: float | None
    currency: str | None
    cause: str | None
    message: str | None

    def document(self) -> dict[str, Any]:
        """Return it as --json has it."""
        return {**asdict(self), "ok": self.cause is None}

    def line(self) -> str:
        """Return it for people: `us-east-1a, worker g5.xlarge: capacity: …`."""
        return f"{self.offer}: {f'{self.cause}: {self.message}' if self.cause else 'made'}"


class NotMade(RunFailed):
    """A provider that gave no nodes, and the reason."""

    def __init__(self, cause: Cause, text: str) -> None:
        hints = {
            Cause.CAPACITY: "name further offers in any_of or ordered, or try again later",
            Cause.QUOTA: "ask the provider for a higher quota, or name an offer of another region"
            " or type in any_of",
            Cause.IMAGE: "name one that exists there with --image, or leave it to the cloud's rule",
            Cause.PRICE: "look at `mayfly plan`, and start the run again",
            Cause.PERMISSION: f"the keys need {missing_permission(text) or 'more rights'};"
            " `mayfly check` says whose they are",
        }
        self.cause = cause
        self.line = telling_line(text)
        super().__init__(f"the nodes were not made: {cause}: {self.line}", hints.get(cause))
