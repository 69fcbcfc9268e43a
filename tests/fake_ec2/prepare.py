"""Install what the tests of the fake EC2 need, while there is a network to get it from."""

from __future__ import annotations

from mayfly.local import imservice
from mayfly.local.paths import find_paths

if __name__ == "__main__":
    imservice.install(find_paths(), print)
