"""A worker process without a nanny: `python -m mayfly_train.recipe.dask_worker`.

It ends when it loses its scheduler, with everything it runs; whoever started it starts another,
under a new name.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import signal
import socket
import sys
import time
from pathlib import Path

import psutil
from distributed import Status, Worker

from mayfly_train.errors import BadInput
from mayfly_train.recipe import dask_settings, dask_task, process, versions
from mayfly_train.recipe.attempt import Node
from mayfly_train.recipe.store import open_store

END_S = process.GRACE_S + 5
LOOK_S = 0.2


def main(argv: list[str] | None = None) -> int:
    """Run until TERM, or until the scheduler is gone."""
    args = _parser().parse_args(argv)
    if args.with_parent:
        process.end_with_parent(args.with_parent)
    process.adopt_orphans()
    if args.device:
        os.environ["CUDA_VISIBLE_DEVICES"] = args.device
    dask_settings.apply()
    args.scratch = args.scratch.absolute()
    store = open_store(args.store, None, connections=args.slots + 4)
    try:
        versions.require_same(store, args.name)
    except BadInput as error:
        print(f"mayfly: {error}", file=sys.stderr)
        return error.exit_code
    node = Node(f"{args.name}-{secrets.token_hex(3)}", args.scratch, store, args.host)
    process.kill_orphans(args.scratch)
    asyncio.run(_serve(args, node))
    # Threads of tasks that would not end are left behind; their processes are not.
    os._exit(0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scheduler", required=True, help="tls://host:port")
    parser.add_argument("--host", required=True, help="address to listen at, and no other")
    parser.add_argument("--tls", type=Path, required=True, help="directory of the certificates")
    parser.add_argument("--store", required=True, help="the run's address")
    parser.add_argument("--scratch", type=Path, required=True, help="directory for attempts")
    parser.add_argument("--name", default=socket.gethostname(), help="the node's name")
    parser.add_argument("--slots", type=int, default=os.cpu_count(), help="tasks at a time")
    parser.add_argument("--cpus", type=float, help="cores; as many as slots when absent")
    parser.add_argument("--memory", type=int, help="bytes; all of the machine's when absent")
    parser.add_argument(
        "--together", type=int, help="members of tasks on several nodes; as many as slots if absent"
    )
    parser.add_argument("--device", help="the one GPU that tasks see")
    parser.add_argument("--with-parent", type=int, metavar="PID", help="end when this parent ends")
    return parser


async def _serve(args: argparse.Namespace, node: Node) -> None:
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    resources = {
        "cpus": args.cpus or args.slots,
        "memory": args.memory or psutil.virtual_memory().total,
        "gpus": 1 if args.device else 0,
        "together": args.together or args.slots,
    }
    worker = Worker(
        args.scheduler,
        nthreads=args.slots,
        name=node.name,
        host=args.host,
        security=dask_settings.security(args.tls),
        resources=resources,
        memory_limit=0,  # Dask's own limits are for data that it holds; there is none
        local_directory=str(args.scratch / "dask"),
        dashboard=False,
        dashboard_address="127.0.0.1:0",
        death_timeout=60,
    )
    dask_task.start(node, lambda news: worker.log_event(dask_settings.TOPIC, news))
    async with worker:
        waits = [asyncio.ensure_future(each) for each in (ended.wait(), _closes(worker))]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if worker.status == Status.running:
            worker.status = Status.paused  # what has not begun is for others
        node.closing.set()
        deadline = time.monotonic() + END_S
        while dask_task.Here.running and time.monotonic() < deadline:
            await asyncio.sleep(0.05)


async def _closes(worker: Worker) -> None:
    """Wait until a worker begins to close, as it does when its scheduler is gone. It has closed
    only when what it runs has ended, half a minute later at most."""
    while worker.status in (Status.running, Status.paused):
        await asyncio.sleep(LOOK_S)


if __name__ == "__main__":
    sys.exit(main())
