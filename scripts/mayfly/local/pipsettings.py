"""This machine's pip settings, as far as they are of use inside a node and hold no secret."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

SYSTEM_CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"  # Debian's, on nodes as on many hosts
LOCAL_CERTIFICATES = Path("/usr/local/share/ca-certificates")
PEM = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)


@dataclass(frozen=True)
class PipSettings:
    """Indexes, time limit and certificates; find-links are directories of this machine."""

    index_url: str | None
    extra_index_urls: tuple[str, ...]
    trusted_hosts: tuple[str, ...]
    timeout: str | None
    find_links: tuple[str, ...]
    certificates: tuple[str, ...]

    def node_config(self) -> str:
        """The text of a node's /etc/pip.conf."""
        lines = ["[global]", "disable-pip-version-check = true"]
        if self.certificates:
            lines.append(f"cert = {SYSTEM_CERTIFICATES}")
        if self.timeout:
            lines.append(f"timeout = {self.timeout}")
        if self.index_url:
            lines.append(f"index-url = {self.index_url}")
        for key, values in (
            ("extra-index-url", self.extra_index_urls),
            ("trusted-host", self.trusted_hosts),
        ):
            if values:
                lines.append(f"{key} = {' '.join(values)}")
        return "\n".join(lines) + "\n"


def find_pip_settings() -> PipSettings:
    """Ask pip what is set on this machine."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], check=False, capture_output=True, text=True
    )
    settings = parse(listed.stdout)
    texts = [path.read_text() for path in sorted(LOCAL_CERTIFICATES.glob("**/*.crt"))]
    bundle = settings.get("cert", SYSTEM_CERTIFICATES)
    if bundle != SYSTEM_CERTIFICATES and Path(bundle).is_file():
        texts.append(Path(bundle).read_text())
    return choose(settings, certificates(texts))


def parse(listing: str) -> dict[str, str]:
    """The settings in the output of `pip config list`; what is nearer to the user wins."""
    ranks = {"global": 0, "user": 1, "site": 2, ":env:": 3}  # pip's own order of precedence
    found: dict[str, tuple[int, str]] = {}
    for line in listing.splitlines():
        name, _, value = line.partition("=")
        section, _, key = name.rpartition(".")
        if section in ranks and ranks[section] >= found.get(key, (-1, ""))[0]:
            found[key] = (ranks[section], str(ast.literal_eval(value)))
    return {key: value for key, (_, value) in found.items()}


def choose(settings: Mapping[str, str], trusted: Iterable[str]) -> PipSettings:
    """Keep what a node can use: indexes on the network, without a user and a password in them."""
    index = settings.get("index-url")
    return PipSettings(
        index_url=index if index and _usable(index) else None,
        extra_index_urls=tuple(filter(_usable, settings.get("extra-index-url", "").split())),
        trusted_hosts=tuple(settings.get("trusted-host", "").split()),
        timeout=settings.get("timeout") or settings.get("default-timeout"),
        find_links=tuple(settings.get("find-links", "").split()),
        certificates=tuple(trusted),
    )


def certificates(texts: Iterable[str]) -> list[str]:
    """The single certificates in PEM files: update-ca-certificates wants one in each file."""
    return list(dict.fromkeys(found for text in texts for found in PEM.findall(text)))


def _usable(url: str) -> bool:
    parts = urlsplit(url)
    return parts.scheme in ("http", "https") and "@" not in parts.netloc
