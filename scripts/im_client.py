#!/usr/bin/env python3
"""The upstream IM client (PyPI's IM-client), run from the checkout.

Example: scripts/im_client.py -r http://127.0.0.1:8800 -a auth.dat create build/<run>.radl
"""

from __future__ import annotations

from checkout import run_module

if __name__ == "__main__":
    run_module("imclient.cli")
