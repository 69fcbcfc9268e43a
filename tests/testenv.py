"""Run a command in the tests' own surroundings: state directory, ports and a canary secret.

Tests get services of their own beside those of the person who runs them, and the secret of their
S3 server is a canary: tests/e2e searches for it wherever a secret must never appear.
Usage: testenv.py COMMAND [ARGUMENT...]
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STATE = ROOT / ".mayfly-test"

# Joined here so that the text of this file is not itself a hit of the search.
CANARY = "".join(("mfCanary", "7Qx2", "VdR9", "sLw4", "Tn61", "ZbKe"))

VARIABLES = {
    "MAYFLY_STATE_DIR": str(STATE),
    "MAYFLY_IM_PORT": "18800",
    "MAYFLY_S3_PORT": "18333",
    "MAYFLY_S3_ACCESS_KEY_ID": "mayflytestkey",
    "MAYFLY_S3_SECRET_ACCESS_KEY": CANARY,
    # One image for all tests, with what the engines need beside the main job's own framework.
    "MAYFLY_IMAGE_EXTRAS": "tensorflow2,horovod-tensorflow",
}


def environment() -> dict[str, str]:
    """This process's environment with the tests' variables in it."""
    path = f"{ROOT / '.venv/bin'}{os.pathsep}{os.environ.get('PATH', '')}"
    return {**os.environ, **VARIABLES, "PATH": path}


if __name__ == "__main__":
    if len(sys.argv) == 1:
        sys.exit("usage: testenv.py COMMAND [ARGUMENT...]")
    os.execvpe(sys.argv[1], sys.argv[1:], environment())
