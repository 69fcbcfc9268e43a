#!/usr/bin/env python3
"""Write a job as an OpenStack Heat template; the same as `mayfly heat`.

Example: scripts/render_heat.py --repo https://example.org/team/repo.git --entrypoint train.py -o -
"""

from __future__ import annotations

from checkout import run_module

if __name__ == "__main__":
    run_module("mayfly.cli", "heat", "template")
