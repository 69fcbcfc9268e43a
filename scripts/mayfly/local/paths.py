"""Where the local platform keeps what it makes."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class Paths:
    """The directories of one local platform; a checkout, or a MAYFLY_STATE_DIR, has one.

    `state` holds what belongs to this platform and goes at `down`; `cache` holds what any platform
    of this user may use again (images, wheels, programs), named by content hash; `run` holds
    sockets, which must have short names.
    """

    checkout: Path
    state: Path
    cache: Path

    @property
    def id(self) -> str:
        """Eight hex digits that tell this platform's things from another's."""
        return hashlib.sha256(str(self.state).encode()).hexdigest()[:8]

    @property
    def run(self) -> Path:
        """Where sockets go: a Unix socket's path may have 107 bytes, a checkout's may be longer."""
        if os.geteuid() == 0:
            return Path(f"/run/mayfly-{self.id}")
        return Path(os.environ.get("XDG_RUNTIME_DIR") or self.state) / f"mayfly-{self.id}"

    def of(self, part: str) -> Path:
        """The state directory of one part; made, readable by the owner only."""
        path = self.state / part
        for directory in (self.state.parent, self.state, path):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        return path

    def cached(self, part: str) -> Path:
        """The cache directory of one part; made when it is missing."""
        path = self.cache / part
        path.mkdir(parents=True, exist_ok=True)
        return path

    @contextlib.contextmanager
    def locked(self, name: str) -> Iterator[None]:
        """Let one process at a time into the block, among all that share the cache."""
        with (self.cached("locks") / name).open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def find_paths(environ: Mapping[str, str] = os.environ, checkout: Path = CHECKOUT) -> Paths:
    """The paths that MAYFLY_STATE_DIR and MAYFLY_CACHE_DIR name, or their defaults."""
    state = Path(environ.get("MAYFLY_STATE_DIR") or checkout / ".mayfly")
    cache = Path(environ.get("MAYFLY_CACHE_DIR") or Path.home() / ".cache" / "mayfly")
    return Paths(checkout, state.expanduser().absolute() / "local", cache.expanduser().absolute())
