#!/usr/bin/env python3
"""Render a job file as RADL on standard output, with no service running.

Example: scripts/render_radl.py job.yml --set cloud=local --image docker://mayfly-node:0123456789ab
"""

from __future__ import annotations

from checkout import run_module

if __name__ == "__main__":
    run_module("mayfly.radl_print")
