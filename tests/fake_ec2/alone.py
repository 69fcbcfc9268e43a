"""Run a command in a network of its own that has loopback and nothing else. Needs root.

The addresses that the fake EC2 hands out look real: nothing here may ever reach for them. The
network goes with the last process in it. Usage: alone.py COMMAND [ARGUMENT...]
"""

from __future__ import annotations

import os
import socket
import sys


def is_alone() -> bool:
    """Whether this process sees loopback only."""
    return [name for _, name in socket.if_nameindex()] == ["lo"]


def main() -> None:
    if len(sys.argv) == 1:
        sys.exit("usage: alone.py COMMAND [ARGUMENT...]")
    script = 'ip link set lo up && exec "$@"'
    os.execvp("unshare", ["unshare", "--net", "sh", "-c", script, "alone", *sys.argv[1:]])


if __name__ == "__main__":
    main()
