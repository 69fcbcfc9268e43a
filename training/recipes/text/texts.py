"""Put one part of the texts where the run keeps its data: topics of Python's own reference."""

from __future__ import annotations

import argparse
import json
import sys
from pydoc_data.topics import topics

from mayfly_train.recipe.store import open_store


def main() -> int:
    """Write a text file for each topic of this part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", type=int, required=True)
    parser.add_argument("--parts", type=int, required=True)
    parser.add_argument("--data", required=True)
    args = parser.parse_args()
    store = open_store(args.data, None)
    mine = sorted(topics)[args.part :: args.parts]
    for name in mine:
        store.write(f"texts/{name}.txt", topics[name].encode())
    print(json.dumps({"files": len(mine)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
