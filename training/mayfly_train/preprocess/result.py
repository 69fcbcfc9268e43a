"""The documents of a preprocessed dataset, from the records of its shards: pure functions."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mayfly_train import manifest
from mayfly_train.convert.dataset import METADATA
from mayfly_train.errors import NodeError
from mayfly_train.manifest import Entry, Manifest
from mayfly_train.preprocess.idx import class_names
from mayfly_train.preprocess.options import Options
from mayfly_train.preprocess.shards import Shard
from mayfly_train.preprocess.source import Source

Records = Mapping[str, Mapping[str, Any]]  # by the shard's name


@dataclass(frozen=True)
class Documents:
    """What is written at the end: metadata.json, and the manifest that lists it too."""

    metadata: bytes
    manifest: Manifest


def documents(
    source: Source, dataset: Manifest, shards: Sequence[Shard], records: Records, options: Options
) -> Documents:
    """The documents of the whole. Raises NodeError when the shards are not all examples once."""
    _require_all_examples(source, shards, records)
    name = str(dataset.extra.get("name") or "")
    files = {split: [shard for shard in shards if shard.split == split] for split in source.counts}
    about = {
        "name": name,
        "format": options.to,
        "image": "float32" if options.floats else "uint8",
        "normalised": _normalised(options),
    }
    highest = max(int(record["label_max"]) for record in records.values())
    names = source.class_names or class_names(highest + 1)
    metadata = {
        **about,
        "shape": list(source.shape),
        "classes": len(names),
        "counts": dict(source.counts),
        "class_names": list(names),
        "files": {
            split: [[shard.name + options.suffix, shard.examples] for shard in of_split]
            for split, of_split in files.items()
        },
    }
    text = (json.dumps(metadata, indent=1) + "\n").encode()
    entries = [
        Entry(shard.name + options.suffix, records[shard.name]["size"], _digest(records, shard))
        for shard in shards
    ]
    entries.append(Entry(METADATA, len(text), hashlib.sha256(text).hexdigest()))
    made = manifest.build(
        "dataset",
        entries,
        **about,
        source=str(dataset.extra.get("source") or name),
        splits={split: [s.name + options.suffix for s in of] for split, of in files.items()},
        shards={
            shard.name: {
                key: records[shard.name][key] for key in ("examples", "node", "attempts", "seconds")
            }
            for shard in shards
        },
    )
    return Documents(text, made)


def _normalised(options: Options) -> dict[str, float] | None:
    """Mean and deviation that pixels from 0 to 1 were scaled by; None when they were not."""
    if not options.floats:
        return None
    mean, std = options.normalise or (0.0, 1.0)
    return {"mean": mean, "std": std}


def _digest(records: Records, shard: Shard) -> str:
    return str(records[shard.name]["sha256"])


def _require_all_examples(source: Source, shards: Sequence[Shard], records: Records) -> None:
    for split, count in source.counts.items():
        made = sum(records[s.name]["examples"] for s in shards if s.split == split)
        if made != count:
            raise NodeError(f"{made} of {count} examples of {split} were made — this is our bug")
