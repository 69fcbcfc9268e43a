"""Where the node image takes Debian packages from: settings, or what this machine itself uses."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from mayfly.errors import UserError

APT = Path("/etc/apt")
ADDRESS = re.compile(r"https?://[^\s\]]+")


def find_mirrors(environ: Mapping[str, str], apt: Path = APT) -> tuple[str, str]:
    """The addresses of Debian's archive and of its security archive.

    Raises UserError where neither a setting nor this machine's apt names an archive of Debian.
    """
    known = _addresses(apt)
    main = environ.get("MAYFLY_DEBIAN_MIRROR") or _ending(known, "/debian")
    if not main:
        raise UserError(
            f"no archive of Debian is named in {apt}",
            "set MAYFLY_DEBIAN_MIRROR to a mirror, or MAYFLY_BASE_IMAGE to a Debian 12 image",
        )
    security = environ.get("MAYFLY_DEBIAN_SECURITY_MIRROR") or _ending(known, "/debian-security")
    return main, security or f"{main}-security"


def _addresses(apt: Path) -> list[str]:
    """The addresses in apt's lists of sources, of either format, comments left out."""
    paths = [apt / "sources.list", *sorted((apt / "sources.list.d").glob("*"))]
    texts = [path.read_text(errors="replace") for path in paths if path.is_file()]
    lines = [line for text in texts for line in text.splitlines() if not line.startswith("#")]
    return [address.rstrip("/") for line in lines for address in ADDRESS.findall(line)]


def _ending(addresses: list[str], end: str) -> str | None:
    return next((address for address in addresses if address.endswith(end)), None)
