"""Runs in a fake EC2 in which somebody is killed at a random point: is anything left afterwards?

    killpoints.py N=10 SEED=1 [LABS=3]     in a network of its own: make bench-killpoints N=… SEED=…

IM, the client, the destroying client or IM while it destroys is killed before or after a call that
changes something, then `mayfly destroy` is run. The results of all runs are kept in
build/killpoints.jsonl, one line a point; the last line printed has all of them together.
"""

from __future__ import annotations

import json
import signal
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / part) for part in ("scripts", "training", "tests", "tests/e2e")]

from fake_ec2.cases import Outcome, Point, killed, points  # noqa: E402 (the path comes first)
from fake_ec2.labs import Labs  # noqa: E402

KEPT = ROOT / "build/killpoints.jsonl"
NUMBERS = {"N": 10, "SEED": 1, "LABS": 3}


def main() -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the labs are closed
    given = {**NUMBERS, **{word.partition("=")[0]: word for word in sys.argv[1:]}}
    if set(given) - set(NUMBERS):
        sys.exit(__doc__)
    count, seed, side_by_side = (int(str(given[name]).rpartition("=")[2]) for name in NUMBERS)
    KEPT.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        labs = Labs(Path(directory), min(side_by_side, count))
        try:
            played = list(enumerate(points(count, seed)))
            for number, point in played:
                labs.submit(str(number), killed(point))
            for number, point in played:
                keep(line(point, seed, labs.futures[str(number)].result()))
            canary = [hit for lab in labs.every for hit in lab.canary_in()]
        finally:
            labs.close()
    lines = [json.loads(text) for text in KEPT.read_text().splitlines()]
    print(json.dumps({**summary(lines), "canary": canary}))
    return int(bool(canary) or any(each["leaks"] for each in lines))


def keep(found: dict[str, Any]) -> None:
    print(json.dumps(found), file=sys.stderr, flush=True)
    with KEPT.open("a") as file:
        file.write(json.dumps(found) + "\n")


def line(point: Point, seed: int, outcome: Outcome) -> dict[str, Any]:
    """What one point came to, as it is kept."""
    left = {kind: sorted(things) for kind, things in outcome.left.items()}
    lost = sum(len(things) for things in outcome.foreign_lost.values())
    return {
        "seed": seed,
        "point": str(point),
        "whom": point.whom,
        "call": outcome.told["call"],
        "happened": outcome.told["happened"],
        "leaks": outcome.leaks,
        "left": left,
        "foreign_harmed": lost + int(outcome.foreign_changed),
        "destroyed": outcome.destroyed and outcome.told["destroy"] == 0,
        "seconds": round(outcome.seconds, 1),
    }


def summary(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """All points that were ever played here; those where nobody was hit do not count as such."""
    hit = [each for each in lines if each["happened"]]
    return {
        "points": len(hit),
        "leaks": sum(each["leaks"] for each in lines),
        "foreign_harmed": sum(each["foreign_harmed"] for each in lines),
        "not_destroyed": sum(not each["destroyed"] for each in lines),
        "missed": len(lines) - len(hit),
        "by_victim": {
            whom: sum(each["whom"] == whom for each in hit) for whom in {e["whom"] for e in hit}
        },
        "median_s": round(statistics.median(each["seconds"] for each in hit), 1) if hit else None,
    }


if __name__ == "__main__":
    sys.exit(main())
