"""How Dask is set up: lost nodes are noticed soon, and nobody without the run's key gets in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dask
from distributed.security import Security

from mayfly_train.recipe import tls

TOPIC = "mayfly"
# Measured with dropped links: a silent node is given up after 10 to 20 s, and below 11 s of
# comm.timeouts.tcp every connection fails. The TTL has a floor of ten heartbeats.
SETTINGS: dict[str, Any] = {
    "distributed.scheduler.worker-ttl": "10 s",
    "distributed.scheduler.allowed-failures": 0,  # who tries again, and how often, is ours to say
    "distributed.scheduler.work-stealing": True,
    "distributed.comm.timeouts.tcp": "12 s",
    "distributed.comm.timeouts.connect": "10 s",
    "distributed.admin.low-level-log-length": 100,
    "distributed.admin.log-length": 100,
    "distributed.admin.system-monitor.log-length": 60,
    "distributed.worker.profile.enabled": False,
    # Only warnings of a blocked loop come of it; every 20 ms it is most of what idle processes do.
    "distributed.admin.tick.interval": "500 ms",
    "distributed.diagnostics.nvml": False,
}


def apply() -> None:
    """Set Dask up in this process; its own files and variables do not count."""
    dask.config.set(SETTINGS)


def security(directory: Path) -> Security:
    """Mutual TLS with the run's certificates; plain connections are refused."""
    files = {
        "tls_ca_file": str(directory / tls.CA),
        **{
            f"tls_{role}_{kind}": str(directory / name)
            for role in ("client", "scheduler", "worker")
            for kind, name in (("cert", tls.CERTIFICATE), ("key", tls.KEY))
        },
    }
    return Security(require_encryption=True, **files)
