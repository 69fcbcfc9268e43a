"""The main job's seconds by phase: medians over several whole runs, as JSON on standard output.

Usage: main_job.py [RUNS]. The machine and its load are part of the document, since seconds mean
nothing without them. Needs the environment of tests/testenv.py.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from typing import Any

from kept import ROOT, machine

COMMAND = ("deploy", "--cloud", "local", "--workers", "2", "--json")


def main() -> int:
    """Run the job so many times; 1 when a run failed."""
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    before = machine()
    documents = []
    for number in range(1, runs + 1):
        print(f"run {number} of {runs}", file=sys.stderr, flush=True)
        command = [str(ROOT / ".venv/bin/mayfly"), *COMMAND]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        documents.append(json.loads(done.stdout))
        if done.returncode:
            print(json.dumps(documents[-1]))
            return 1
    print(json.dumps({**summary(documents), "machine": before}))
    return 0


def summary(documents: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the runs: seconds by phase, their sum, accuracy, and samples per second."""
    phases = {
        name: round(statistics.median(d["phases"][name] for d in documents), 2)
        for name in documents[0]["phases"]
    }
    return {
        "runs": len(documents),
        "phases_s": phases,
        "whole_s": round(statistics.median(sum(d["phases"].values()) for d in documents), 2),
        "accuracy": statistics.median(d["accuracy"] for d in documents),
        "examples_per_s": round(
            statistics.median(d["samples_processed"] / d["phases"]["training"] for d in documents)
        ),
    }


if __name__ == "__main__":
    sys.exit(main())
