"""`preprocess`: a staged dataset in HDFS → normalised tensors or TFRecords, by all nodes together.

Each node runs the same command at about the same time. Needs the extra `convert` (google-crc32c,
numpy, Pillow), which role agent installs where a job asks for it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from mayfly_train import hdfs, s3
from mayfly_train.errors import BadInput
from mayfly_train.preprocess.options import IMAGE_SIDE, SUFFIXES, Options
from mayfly_train.preprocess.worker import Work, preprocess
from mayfly_train.staging_progress import StagingProgress

__all__ = ["Options", "Work", "add_arguments", "preprocess", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `preprocess`."""
    parser.add_argument("source", help="hdfs://host:port/directory of a staged dataset")
    parser.add_argument("destination", help="hdfs://host:port/directory for the result")
    parser.add_argument("--namenode-http", required=True, help="WebHDFS: http://host:9870")
    parser.add_argument("--user", default="mayfly", help="HDFS user (default: mayfly)")
    parser.add_argument("--worker", required=True, help="this node's name, another on each node")
    parser.add_argument("--to", required=True, choices=tuple(SUFFIXES))
    parser.add_argument("--shards", type=int, default=8, help="files of the training split")
    parser.add_argument(
        "--normalise", nargs=2, type=float, metavar=("MEAN", "STD"), help="of pixels from 0 to 1"
    )
    parser.add_argument(
        "--image-size", type=int, default=IMAGE_SIDE, help=f"images: side ({IMAGE_SIDE})"
    )
    parser.add_argument("--run-uri", help="where to write status/preprocess-<worker>.json")
    s3.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Preprocess, and print what this node did as one line of JSON. Returns 0."""
    normalise = (args.normalise[0], args.normalise[1]) if args.normalise else None
    options = Options(args.to, args.shards, normalise, args.image_size)
    rpc_url, source = hdfs.split_url(args.source)
    other_url, destination = hdfs.split_url(args.destination)
    if other_url != rpc_url or f"{destination}/".startswith(f"{source}/"):
        raise BadInput(
            f"cannot write {args.destination} from {args.source} — name a directory beside it"
        )
    with StagingProgress(_status_writer(args), {"worker": args.worker}) as progress:
        store = hdfs.Hdfs(rpc_url, args.namenode_http, args.user)
        result = preprocess(Work(store, source, destination, options, args.worker), progress)
    print(json.dumps(asdict(result)))
    return 0


def _status_writer(args: argparse.Namespace) -> Callable[[dict[str, Any]], None]:
    if not args.run_uri:
        return lambda _document: None
    client = s3.connect(s3.settings_from(args))
    where = s3.parse_uri(args.run_uri).join("status", f"preprocess-{args.worker}.json")
    return lambda document: s3.write_json(client, where, document)
