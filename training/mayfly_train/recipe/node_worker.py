"""A worker of a run on nodes: `python -m mayfly_train.recipe.node_worker`.

It waits for the head's address in the run's store, and becomes a worker of that engine. It is
started again when it has ended, until the run has.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
from pathlib import Path

import psutil

from mayfly_train.errors import NodeError
from mayfly_train.recipe import dask_worker, names, shape, signs
from mayfly_train.recipe.store import Store, open_store, read_json

LOOK_S = 2.0
OVER = 10  # exit code that says that the run has ended: not to be started again


def main(argv: list[str] | None = None) -> int:
    """Wait for a head and work for it; OVER once the run has ended."""
    args = _parser().parse_args(argv)
    args.host = socket.gethostbyname(args.host)  # a name may also lead to loopback elsewhere
    store = open_store(args.store, None)
    while True:
        try:
            if store.read(names.ENDED) is not None:
                signs.leave(args.signs, signs.ENDED)
                return OVER
            if address := reachable(store):
                break
        except NodeError as error:  # the store may be back the next time
            print(f"mayfly: {error}", file=sys.stderr)
        time.sleep(LOOK_S)
    cores, memory = os.cpu_count() or 1, psutil.virtual_memory().total
    return dask_worker.main(words(args, address, cores, memory))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", required=True, help="the run's address")
    parser.add_argument("--host", required=True, help="address to listen at, and no other")
    parser.add_argument("--tls", type=Path, required=True, help="directory of the certificates")
    parser.add_argument("--scratch", type=Path, required=True, help="directory for attempts")
    parser.add_argument("--node", required=True, help="the node's name")
    parser.add_argument("--number", type=int, default=0, help="of this worker on its node")
    parser.add_argument("--processes", type=int, default=1, help="workers of this node")
    parser.add_argument("--slots", type=int, default=1, help="tasks at a time")
    parser.add_argument("--devices", action="store_true", help="each worker has one GPU")
    signs.add_option(parser)
    return parser


def reachable(store: Store) -> str:
    """The address of a scheduler that takes connections; empty while there is none."""
    found = read_json(store, names.SCHEDULER)
    if found is None:
        return ""
    address = str(found["address"])
    host, _, port = address.rpartition("/")[2].rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=LOOK_S):
            return address
    except OSError:
        return ""


def words(args: argparse.Namespace, address: str, cores: int, memory: int) -> list[str]:
    """The command line of the worker process proper: it has its share of the node's cores and
    memory (bytes). Without GPUs, cores are as many as tasks, whatever the machine has."""
    given = {
        "--scheduler": address,
        "--host": args.host,
        "--tls": args.tls,
        "--store": args.store,
        "--scratch": args.scratch,
        "--name": shape.worker_name(args.node, args.number),
        "--slots": args.slots,
        "--cpus": cores / args.processes if args.devices else args.slots,
        "--memory": memory // args.processes,
        "--together": 1,  # a task on several nodes is never twice on one, but for its GPUs
        "--device": args.number if args.devices else None,
    }
    return [str(word) for pair in given.items() if pair[1] is not None for word in pair]


if __name__ == "__main__":
    sys.exit(main())
