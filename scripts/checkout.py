"""Lets the executables beside this file run with the checkout's own Python environment."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn

PYTHON = Path(__file__).resolve().parents[1] / ".venv/bin/python"


def run_module(name: str, *words: str) -> NoReturn:
    """Become `python -m name words…` of .venv, with this process's arguments after them."""
    if not PYTHON.exists():
        sys.exit("the Python environment .venv does not exist — make it with: make setup")
    # -P: what lies in the current directory must not be imported.
    os.execv(PYTHON, [str(PYTHON), "-P", "-m", name, *words, *sys.argv[1:]])
