"""The image of a run's nodes as IM's URL: found by the cloud's rule, or the job's own."""

from __future__ import annotations

from typing import Protocol

from mayfly.clouds import CloudProfile, ImageRule
from mayfly.errors import MayflyError, UserError
from mayfly.places import Place, filled, require
from mayfly.spec import ClusterSpec
from mayfly.unresolved import mark


class NoImage(UserError):
    """There is no such image, or none that the place can take: another place may have one."""


class Finder(Protocol):
    """A provider's listing of images, asked with the user's keys."""

    def find_image(self, rule: ImageRule) -> str:
        """The identifier of the newest image by the rule; raises UserError when there is none."""
        ...

    def check_image(self, image: str) -> str:
        """The identifier of the image that the user named; raises UserError when there is none."""
        ...


def resolve(
    spec: ClusterSpec, profile: CloudProfile, place: Place, finder: Finder | None = None
) -> str:
    """IM's URL of the nodes' image, asking the provider where the rule needs that.

    Raises UserError for an image that does not exist, for one of another cloud, and when the place
    or the way to ask is missing.
    """
    rule = _rule(profile)
    if spec.image and "://" in spec.image:
        return _own_url(spec.image, rule, place, finder)
    require(place, profile)
    if rule.lookup is None:
        return _url(rule, place, spec.image or rule.name)
    if finder is None:
        raise UserError(
            f"image {spec.image or rule.name!r} cannot be looked up: no keys of {profile.title}",
            f"give its full URL, such as --image {_url(rule, place, 'IDENTIFIER')}",
        )
    found = finder.check_image(spec.image) if spec.image else finder.find_image(rule)
    return _url(rule, place, found)


def unasked(spec: ClusterSpec, profile: CloudProfile, place: Place) -> str:
    """The same without asking anybody: what is not known is marked, for a dry run."""
    if profile.image is None:
        return f"docker://{mark('image')}"
    if spec.image and "://" in spec.image:
        return _own_url(spec.image, profile.image, place, None)
    unknown = profile.image.lookup is not None and not spec.image
    return _url(profile.image, place, mark("image") if unknown else spec.image or None)


def describe(spec: ClusterSpec, profile: CloudProfile) -> str:
    """The rule in words, for a plan that asked nobody."""
    rule = profile.image
    if rule is None:
        return "made by the platform" if profile.backend == "im" else "none: the machines are there"
    if spec.image:
        return spec.image
    owner = f"owner {rule.owner} ({rule.publisher})" if rule.owner else f"owner: {rule.publisher}"
    return f"resolved at deploy: {owner}, name {rule.name}"


def _rule(profile: CloudProfile) -> ImageRule:
    if profile.image is None:
        raise MayflyError(f"cloud {profile.name!r} has no image rule", "its platform makes it")
    return profile.image


def _url(rule: ImageRule, place: Place, image: str | None) -> str:
    values = {"owner": rule.owner or "", **filled(place), "image": image or rule.name}
    return rule.url.format(**values)


def _own_url(url: str, rule: ImageRule, place: Place, finder: Finder | None) -> str:
    """The user's own URL, where it is one that this cloud's connector takes."""
    if not url.startswith(f"{rule.scheme}://"):
        raise UserError(f"image {url!r} is of another cloud", f"write {rule.url}, or only the name")
    region = url.partition("://")[2].partition("/")[0]
    # IM makes nodes where their image is, whatever the plan and its prices say.
    if rule.in_region and place.region and region != place.region:
        raise UserError(
            f"image {url!r} is in {region}, and the job in {place.region}",
            f"give an image of {place.region}, or --region {region}",
        )
    if finder is not None and rule.lookup is not None:
        finder.check_image(url.rpartition("/")[2])
    return url
