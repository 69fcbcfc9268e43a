"""OpenStack's images and flavors, by a connection of openstacksdk that is passed in."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from mayfly.clouds import ImageRule
from mayfly.errors import RemoteError, UserError, unknown


@dataclass(frozen=True)
class OpenStack:
    """One project's view of the image and the compute service."""

    connection: Any

    def find_image(self, rule: ImageRule) -> str:
        """Return the identifier of the newest active image whose name matches.

        Raises UserError, naming a few images that are there, when none does.
        """
        images = [image for image in self._images() if image.status == "active"]
        fitting = [image for image in images if fnmatchcase(image.name or "", rule.name)]
        if not fitting:
            raise UserError(f"no image {rule.name!r} in this project", _some([*images]))
        return str(max(fitting, key=lambda image: str(image.created_at)).id)

    def check_image(self, image: str) -> str:
        """Return the identifier of the image with this name or identifier; raises UserError."""
        try:
            found = self.connection.image.find_image(image, ignore_missing=True)
        except Exception as error:  # keystoneauth and the SDK each have their own; so have doubles
            raise RemoteError(f"OpenStack did not say which image {image!r} is: {error}") from error
        if found is None:
            raise UserError(f"image {image!r} does not exist", _some(self._images()))
        return str(found.id)

    def check_flavors(self, names: Iterable[str]) -> None:
        """Raise UserError for the first name that no flavor of the project has.

        By name, as IM looks for it; how many GPUs a flavor has, OpenStack does not say.
        """
        wanted = list(names)
        if not wanted:
            return
        try:
            there = {str(flavor.name) for flavor in self.connection.compute.flavors()}
        except Exception as error:  # keystoneauth and the SDK each have their own
            raise RemoteError(f"OpenStack did not list its flavors: {error}") from error
        for name in wanted:
            if name not in there:
                raise unknown("flavor", name, there, "see `openstack flavor list`")

    def _images(self) -> list[Any]:
        try:
            return list(self.connection.image.images())
        except Exception as error:  # keystoneauth and the SDK each have their own
            raise RemoteError(f"OpenStack did not list its images: {error}") from error


def _some(images: list[Any]) -> str:
    names = ", ".join(sorted(image.name for image in images if image.name)[:6])
    return f"give one with --image, such as {names}" if names else "the project has no images"
