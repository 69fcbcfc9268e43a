"""The table of kills in docs/engines.md, of what tests/e2e/faults have seen.

Usage: kills_table.py [ROWS] [PAGE]. ROWS is build/kills.jsonl, to which each case of
tests/e2e/faults that kills a process appends a line; of several of the same kill the last one
counts. The table is written between the two marks of PAGE.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ROWS, PAGE = ROOT / "build/kills.jsonl", ROOT / "docs/engines.md"
BEGIN, END = "<!-- kills: begin -->", "<!-- kills: end -->"
HEAD = (
    "| engine | killed | then | started again | next step told | steps done twice | the run |\n"
    "|---|---|---|---|---|---|---|\n"
)
NONE_YET = "Not measured yet.\n"
WHAT = {"task": "{}", "rank": "a rank of {}"}

Row = Mapping[str, Any]


def main(words: list[str]) -> int:
    """Write the table into the page."""
    rows, page = (Path(word) for word in (words + [str(ROWS), str(PAGE)][len(words) :]))
    if not rows.exists():
        print(f"no {rows}: run pytest on tests/e2e/faults first", file=sys.stderr)
        return 2
    made = table(map(json.loads, rows.read_text(encoding="utf-8").splitlines()))
    page.write_text(between_marks(page.read_text(encoding="utf-8"), made), encoding="utf-8")
    return 0


def table(rows: Iterable[Row]) -> str:
    """Markdown of the rows, the last of each kill, in the order in which kills were first seen.

    Rows of an engine stand together.
    """
    last = {(row["engine"], row["task"], row["what"]): row for row in rows}
    engines = list(dict.fromkeys(engine for engine, _, _ in last))
    ordered = sorted(last.values(), key=lambda row: engines.index(row["engine"]))
    return HEAD + "".join(map(line, ordered)) if ordered else NONE_YET


def line(row: Row) -> str:
    """One line of the table."""
    cells = [
        f"`{row['engine']}`",
        WHAT[row["what"]].format(f"`{row['task']}`"),
        happened(row),
        seconds(row["restart_s"]),
        seconds(row["step_s"]),
        str(row.get("redone", "")),
        str(row["outcome"]).replace("|", "\\|"),
    ]
    return f"| {' | '.join(cells)} |\n"


def happened(row: Row) -> str:
    """What became of the training, and which tasks were started again."""
    restored = row["restored_step"]
    if restored is None and row.get("redone"):
        text = "all go on from the last checkpoint"  # which was told after what was followed
    elif restored is None:
        text = "the others go on" if row["step_s"] is not None else "no step was seen"
    else:
        text = f"all go on from step {restored}, of about {row['at_step']}"
    again = [task for task, starts in row.get("attempts", {}).items() if starts > 1]
    others = [f"`{task}`" for task in again if task != row["task"]]
    return f"{text}; {', '.join(others)} started again, too" if others else text


def seconds(value: float | None) -> str:
    """A time in a cell."""
    return "not seen" if value is None else f"{value:.0f} s" if value >= 10 else f"{value:.1f} s"


def between_marks(page: str, text: str) -> str:
    """The page with a text in the place of what is between its marks."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        sys.exit(f"no {BEGIN} and {END} in the page: put them where the table belongs")
    return f"{before}{begin}\n\n{text}\n{end}{after}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
