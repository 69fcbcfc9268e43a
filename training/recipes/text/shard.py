"""List the text files in shards of a fixed number of them: a task each for what comes next."""

from __future__ import annotations

import argparse
import json
import sys

from mayfly_train.recipe.store import open_store


def main() -> int:
    """Write one list of names for each shard; nothing is read but names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True)
    parser.add_argument("--texts", required=True, help="prefix of the files")
    parser.add_argument("--files", type=int, required=True, help="files in a shard")
    args = parser.parse_args()
    store = open_store(args.data, None)
    names = [name for name in store.names(args.texts) if name.endswith(".txt")]
    if not names:
        sys.exit(f"no .txt file below {store.address}/{args.texts} — check --data and --texts")
    starts = range(0, len(names), args.files)
    for number, start in enumerate(starts):
        lines = "".join(f"{name}\n" for name in names[start : start + args.files])
        store.write(f"shards/{number:06d}.txt", lines.encode())
    print(json.dumps({"files": len(names), "shards": len(starts)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
