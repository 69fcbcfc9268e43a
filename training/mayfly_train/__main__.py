"""The command on the nodes: `mayfly-node SUBCOMMAND …` or `python -m mayfly_train SUBCOMMAND …`."""

from __future__ import annotations

import argparse
import importlib
import logging
import sys
import traceback
from types import ModuleType

from mayfly_train.errors import NodeError

# Subcommand → (module with add_arguments(parser) and run(args) -> int, one line of help).
# Only the one that is asked for is imported: a node without some library can use the others.
COMMANDS = {
    "stage": ("mayfly_train.stage", "copy this node's share of a dataset from S3 to HDFS"),
    "export": ("mayfly_train.export", "copy a trained model to S3, manifest last"),
    "convert": ("mayfly_train.convert", "turn published archives and images into TFRecords"),
    "preprocess": (
        "mayfly_train.preprocess",
        "convert a staged dataset from HDFS to HDFS, together with the other nodes",
    ),
    "verify-manifest": (
        "mayfly_train.verify",
        "compare a directory or S3 prefix with its manifest",
    ),
    "preflight": ("mayfly_train.preflight", "test the ways to all other nodes before a run"),
    "supervise": ("mayfly_train.supervise", "run one training task and watch it"),
    "coordinate": ("mayfly_train.coordinate", "gather the tasks' status and export at the end"),
    "resume-export": (
        "mayfly_train.resume_export",
        "take up the export of a run that failed in it",
    ),
    "explain": ("mayfly_train.explain", "print what this node's training processes are given"),
    "share-wheel": (
        "mayfly_train.share_wheel",
        "give a wheel that one node has compiled to the others",
    ),
    "failed": ("mayfly_train.failed", "leave the marker of a task that failed for good"),
}


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand. Returns its exit code: 0, 2 for the user's fault, 1 for ours."""
    words = sys.argv[1:] if argv is None else argv
    name = next((word for word in words if word in COMMANDS), None)
    parser, commands = _parser()
    module = None
    if name is not None:
        module = _load(name)
        module.add_arguments(commands[name])
    args = parser.parse_args(words)
    logging.basicConfig(format="%(message)s", stream=sys.stderr)  # libraries: warnings only
    logging.getLogger("mayfly_train").setLevel(logging.INFO)
    try:
        return int(module.run(args)) if module else 2
    except NodeError as error:
        if args.debug:
            traceback.print_exc()
        print(f"mayfly-node: {error}", file=sys.stderr)
        return error.exit_code


def _load(name: str) -> ModuleType:
    try:
        return importlib.import_module(COMMANDS[name][0])
    except ModuleNotFoundError as error:
        sys.exit(f"mayfly-node: {name} needs the Python package {error.name} — install it")


def _parser() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    parser = argparse.ArgumentParser(prog="mayfly-node", description=__doc__)
    parser.add_argument("--debug", action="store_true", help="show a traceback with an error")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="SUBCOMMAND")
    commands = {
        name: subparsers.add_parser(name, help=text, description=text)
        for name, (_, text) in COMMANDS.items()
    }
    return parser, commands


if __name__ == "__main__":
    sys.exit(main())
