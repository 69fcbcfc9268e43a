"""The scheduler process: `python -m mayfly_train.recipe.dask_scheduler`."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import sys
from pathlib import Path

from distributed import Scheduler

from mayfly_train.recipe import dask_settings, process, versions
from mayfly_train.recipe.store import open_store

CLOSE_S = 2.0  # for goodbyes: a silent worker would hold it up, and the next one wants the port


def main(argv: list[str] | None = None) -> int:
    """Run until TERM."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", required=True, help="address to listen at, and no other")
    parser.add_argument("--port", type=int, default=0, help="port; any when absent")
    parser.add_argument("--tls", type=Path, required=True, help="directory of the certificates")
    parser.add_argument("--address-file", type=Path, required=True, help="file for the address")
    parser.add_argument("--with-parent", type=int, metavar="PID", help="end when this parent ends")
    parser.add_argument("--store", required=True, help="the run's address")
    args = parser.parse_args(argv)
    if args.with_parent:
        process.end_with_parent(args.with_parent)
    dask_settings.apply()
    versions.publish(open_store(args.store, None))
    asyncio.run(_serve(args))
    return 0


async def _serve(args: argparse.Namespace) -> None:
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    scheduler = Scheduler(
        protocol="tls",
        host=args.host,
        port=args.port,
        security=dask_settings.security(args.tls),
        dashboard=False,
        # Without the dashboard there is an HTTP server still, which would listen everywhere.
        dashboard_address="127.0.0.1:0",
    )
    await scheduler
    new = args.address_file.with_suffix(".new")
    new.write_text(scheduler.address)
    new.replace(args.address_file)
    await ended.wait()
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(scheduler.close(), CLOSE_S)


if __name__ == "__main__":
    sys.exit(main())
