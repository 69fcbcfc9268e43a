"""Check what every shard has left, and add it up: one list of files with their records."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from mayfly_train.convert import tfrecord


def main() -> int:
    """Read every record of every shard, which checks its checksums."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    files = sorted(args.parts.glob("*/*.tfrecord"), key=lambda path: path.name)
    records = {path.name: sum(1 for _ in tfrecord.read(path)) for path in files}
    (args.out / "shards.json").write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({"shards": len(records), "records": sum(records.values())}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
