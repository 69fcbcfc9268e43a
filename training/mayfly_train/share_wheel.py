"""`share-wheel`: a wheel that one node has compiled, for the others of its cluster, through HDFS.

A wheel lies in a directory of its own, with a record of what it was compiled for (`build.json`: the
wheel's name, its SHA-256, and versions). In HDFS it is `<store>/<the directory's name>/`, with the
record written last.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import posixpath
import shutil
import sys
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from mayfly_train.errors import BadInput, NodeError
from mayfly_train.hdfs import Hdfs, HdfsFailure, split_url

RECORD = "build.json"
NOT_THERE = 3  # exit status of a fetch that found none yet
# A failure that was told before the waiting began is one of an earlier try. Two nodes' clocks may
# differ by less than this, in seconds.
CLOCK_S = 5


class NoWheel(NodeError):
    """There will be no wheel, or the one that is there cannot be used."""


def publish(hdfs: Hdfs, store: str, directory: Path) -> bool:
    """Put a wheel and its record into HDFS; False when they are there already."""
    record = (directory / RECORD).read_bytes()
    name = _wheel_of(_read(record), str(directory))
    target = posixpath.join(store, directory.name)
    there = posixpath.join(target, RECORD)
    if hdfs.status(there) is not None and hdfs.read_bytes(there) == record:
        return False
    hdfs.make_directory(target)
    hdfs.write_bytes(posixpath.join(target, name), (directory / name).read_bytes())
    hdfs.write_bytes(there, record)
    return True


def fetch(hdfs: Hdfs, store: str, wanted: Mapping[str, Any], output: Path) -> Path | None:
    """Get a wheel whose record has all that is wanted, verified; None when there is none yet.

    Its directory appears below `output` when it is complete; raises NoWheel for a damaged one.
    """
    for found in hdfs.list_directory(store):
        path = posixpath.join(found.path, RECORD)
        if not found.is_directory or hdfs.status(path) is None:
            continue
        record = hdfs.read_bytes(path)
        built = _read(record)
        if wanted.items() <= built.items():
            name = _wheel_of(built, found.path)
            data = hdfs.read_bytes(posixpath.join(found.path, name))
            if hashlib.sha256(data).hexdigest() != built.get("sha256"):
                raise NoWheel(f"{found.path}/{name} in HDFS is damaged — delete {found.path} there")
            final = output / posixpath.basename(found.path)
            _write_directory(final, {name: data, RECORD: record})
            return final / name
    return None


def tell_failure(hdfs: Hdfs, store: str, name: str, reason: str) -> None:
    """Leave the reason why there will be no wheel of this name."""
    hdfs.make_directory(store)
    hdfs.write_bytes(_failure(store, name), reason.strip().encode())


def failure_since(hdfs: Hdfs, store: str, name: str, since_s: float) -> str | None:
    """The reason that was left since then (seconds from 1970), None when there is none."""
    told = hdfs.status(_failure(store, name))
    if told is None or told.modified_ms / 1000 < since_s - CLOCK_S:
        return None
    return hdfs.read_bytes(told.path).decode(errors="replace")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `share-wheel`."""
    parser.add_argument("--namenode-http", required=True, help="WebHDFS: http://host:9870")
    parser.add_argument("store", help="directory in HDFS: hdfs://host:9000/path")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    publishing = actions.add_parser("publish", help="put a wheel there, unless it is")
    publishing.add_argument("directory", type=Path, help="the wheel's, with its build.json")
    fetching = actions.add_parser("fetch", help="get a wheel; exit status 3: none is there yet")
    fetching.add_argument("--match", type=json.loads, default={}, help="JSON: what it must be for")
    since = "local time in ISO form: failures that were told earlier are left aside"
    fetching.add_argument("--since", default="", help=since)
    fetching.add_argument("name", help="the name under which a failure would be told")
    fetching.add_argument("output", type=Path, help="where the wheel's directory goes")
    failing = actions.add_parser("fail", help="tell the others why, from standard input")
    failing.add_argument("name", help="what there is no wheel for")


def run(args: argparse.Namespace) -> int:
    """Do what was asked for; the last line of the output is JSON."""
    rpc, store = split_url(args.store)
    hdfs = Hdfs(rpc, args.namenode_http)
    if args.action == "publish":
        print(json.dumps({"changed": publish(hdfs, store, args.directory)}))
    elif args.action == "fail":
        tell_failure(hdfs, store, args.name, sys.stdin.read())
        print(json.dumps({"changed": True}))
    else:
        return _try_to_fetch(hdfs, store, args)
    return 0


def _try_to_fetch(hdfs: Hdfs, store: str, args: argparse.Namespace) -> int:
    """One try; NoWheel when the one who compiles has told a failure."""
    try:
        wheel = fetch(hdfs, store, args.match, args.output)
        since = datetime.fromisoformat(args.since).timestamp() if args.since else 0.0
        reason = None if wheel else failure_since(hdfs, store, args.name, since)
    except HdfsFailure as error:  # a namenode that is busy may answer the next try
        print(f"mayfly-node: {error}", file=sys.stderr)
        return NOT_THERE
    if reason is not None:
        raise NoWheel(f"the node that compiles could not: {reason}")
    if wheel is None:
        print(f"mayfly-node: no wheel in {args.store} yet", file=sys.stderr)
        return NOT_THERE
    print(json.dumps({"changed": True, "wheel": str(wheel)}))
    return 0


def _write_directory(final: Path, files: Mapping[str, bytes]) -> None:
    """Write files into a new directory and give it its name; what stood there is replaced."""
    partial = final.with_name(f".fetch-{final.name}.{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        for name, data in files.items():
            (partial / name).write_bytes(data)
        if final.exists():
            shutil.rmtree(final)
        partial.rename(final)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _read(record: bytes) -> dict[str, Any]:
    """The content of a record; empty when it is none."""
    try:
        found = json.loads(record)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _wheel_of(record: Mapping[str, Any], place: str) -> str:
    """The name of the wheel, which is no path."""
    name = str(record.get("wheel", ""))
    if not name or posixpath.basename(name) != name:
        raise BadInput(f"{place}/{RECORD} names no wheel: {name!r} — compile it again")
    return name


def _failure(store: str, name: str) -> str:
    return posixpath.join(store, f"failed-{name}.txt")
