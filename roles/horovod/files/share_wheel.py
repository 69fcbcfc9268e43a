#!/usr/bin/env python3
"""Share the wheel that one node has built with the others of its cluster, through HDFS.

Runs beside build_wheel.py, with the agent's Python (it uses mayfly_train). In HDFS a wheel lies as
in build_wheel.py's output, STORE/<key>/, with build.json written last.

    publish WHEEL                    put it there, unless it is
    fail FRAMEWORK                   tell the others why there is none (from standard input)
    fetch PYTHON FRAMEWORK OUTPUT    get the one that fits the interpreter, and print its path

Exit status 0: done, 1: failed, 3: fetch found none yet. The last line of publish and fail says
`changed` or `unchanged`.
"""

from __future__ import annotations

import argparse
import os
import posixpath
import shutil
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from build_wheel import (
    FAILED,
    NOT_THERE,
    BuildError,
    Wanted,
    describe,
    matches,
    put_in_place,
    read_record,
    sha256,
)

from mayfly_train.errors import NodeError
from mayfly_train.hdfs import Hdfs

RECORD = "build.json"
# A failure that was told before the role began on this node is one of an earlier try; clocks of
# two nodes may differ by less than this.
CLOCK_S = 30


def main(words: Sequence[str] | None = None) -> int:
    """Do what was asked for and return the exit status."""
    options = parse(words)
    try:
        hdfs = Hdfs(options.namenode, options.namenode_http)
        if options.action == "publish":
            print("changed" if publish(hdfs, options.store, options.wheel) else "unchanged")
            return 0
        if options.action == "fail":
            tell_failure(hdfs, options.store, options.framework, sys.stdin.read())
            print("changed")
            return 0
        wanted = describe(options.python, options.framework)
        found = fetch(hdfs, options.store, wanted, options.output)
        if found is None:
            since = datetime.fromisoformat(options.since).timestamp() if options.since else 0.0
            raise_failure(hdfs, options.store, options.framework, since)
    except (BuildError, NodeError) as error:
        print(f"share_wheel: {error}", file=sys.stderr)
        # A namenode that is busy may answer the next try.
        is_waiting = options.action == "fetch" and isinstance(error, NodeError)
        return NOT_THERE if is_waiting else FAILED
    if found is None:
        print(f"share_wheel: no wheel in {options.store} yet", file=sys.stderr)
        return NOT_THERE
    print(found)
    return 0


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--namenode", required=True, metavar="URL", help="hdfs://HOST:PORT")
    parser.add_argument("--namenode-http", required=True, metavar="URL", help="http://HOST:PORT")
    parser.add_argument("--store", required=True, help="directory of wheels in HDFS")
    actions = parser.add_subparsers(dest="action", required=True)
    publishing = actions.add_parser("publish")
    publishing.add_argument("wheel", type=Path)
    failing = actions.add_parser("fail")
    failing.add_argument("framework")
    fetching = actions.add_parser("fetch")
    fetching.add_argument("python")
    fetching.add_argument("framework")
    fetching.add_argument("output", type=Path)
    since = "local time in ISO form; failures told earlier are left aside"
    fetching.add_argument("--since", default="", help=since)
    return parser.parse_args(words)


def publish(hdfs: Hdfs, store: str, wheel: Path) -> bool:
    """Put a wheel and its record into HDFS; False when they are there already."""
    target = posixpath.join(store, wheel.parent.name)
    record = (wheel.parent / RECORD).read_bytes()
    there = posixpath.join(target, RECORD)
    if hdfs.status(there) is not None and hdfs.read_bytes(there) == record:
        return False
    hdfs.make_directory(target)
    hdfs.write_bytes(posixpath.join(target, wheel.name), wheel.read_bytes())
    hdfs.write_bytes(there, record)
    return True


def tell_failure(hdfs: Hdfs, store: str, framework: str, reason: str) -> None:
    """Leave the reason why there will be no wheel."""
    hdfs.make_directory(store)
    hdfs.write_bytes(_failure(store, framework), reason.strip().encode())


def raise_failure(hdfs: Hdfs, store: str, framework: str, since: float) -> None:
    """BuildError with the builder's reason, when it has told one since then (seconds from 1970)."""
    told = hdfs.status(_failure(store, framework))
    if told is not None and told.modified_ms / 1000 >= since - CLOCK_S:
        reason = hdfs.read_bytes(told.path).decode(errors="replace")
        raise BuildError(f"the first worker could not build the wheel: {reason}", FAILED)


def fetch(hdfs: Hdfs, store: str, wanted: Wanted, output: Path) -> Path | None:
    """Get the wheel for what is wanted from HDFS, verified; None when there is none yet."""
    for directory in hdfs.list_directory(store):
        path = posixpath.join(directory.path, RECORD)
        if not directory.is_directory or hdfs.status(path) is None:
            continue
        record = hdfs.read_bytes(path)
        built = read_record(record.decode(errors="replace"))
        if matches(built, wanted):
            name = str(built["wheel"])
            data = hdfs.read_bytes(posixpath.join(directory.path, name))
            return _keep(output / posixpath.basename(directory.path), name, data, record)
    return None


def _keep(final: Path, name: str, data: bytes, record: bytes) -> Path:
    """Write a wheel and its record in place of the directory `final`; the wheel's path."""
    partial = final.with_name(f".fetch-{final.name}.{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        wheel = partial / Path(name).name
        wheel.write_bytes(data)
        (partial / RECORD).write_bytes(record)
        if sha256(wheel) != read_record(record.decode()).get("sha256"):
            raise BuildError(f"{name} in HDFS is damaged — delete its directory there", FAILED)
        put_in_place(partial, final)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return final / wheel.name


def _failure(store: str, framework: str) -> str:
    return posixpath.join(store, f"failed-{framework}.txt")


if __name__ == "__main__":
    sys.exit(main())
