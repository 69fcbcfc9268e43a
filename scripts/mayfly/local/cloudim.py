"""Our own IM for clouds: started when a command needs it, and stopped when it has nothing left.

It survives the command that started it, for nodes are made and configured by it. The keys to the
cloud come with each call, so it cannot do anything by itself to what it made.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager

from mayfly.local import imservice
from mayfly.local.host import Progress
from mayfly.local.imservice import CLOUDS, ImService
from mayfly.local.paths import Paths, find_paths

# IM's own connectors make things that cannot be found again; scripts/im_connectors has ours.
CONNECTORS = {"EC2": "MayflyEC2", "OpenStack": "MayflyOpenStack"}


def up(progress: Progress, environ: Mapping[str, str] = os.environ) -> ImService:
    """Start the service unless it runs.

    Raises UserError for a taken port or a machine that lacks something, MayflyError when IM cannot
    be installed or does not start.
    """
    paths = find_paths(environ)
    with _alone(paths):
        imservice.check(CLOUDS, paths, environ)
        return imservice.up(CLOUDS, paths, progress, environ)


def check(environ: Mapping[str, str] = os.environ) -> str:
    """Say in words how it stands, starting nothing; raises UserError for a taken port."""
    paths = find_paths(environ)
    imservice.check(CLOUDS, paths, environ)
    running = imservice.running(CLOUDS, paths)
    return f"our own runs at {running}" if running else "our own is started when it is needed"


def wipe(infrastructures: Collection[str], environ: Mapping[str, str] = os.environ) -> None:
    """Wipe what is remembered of destroyed infrastructures; with no other left the service ends.

    Who starts a run meanwhile finds the service gone and starts it again: see `IM.revive`.
    """
    paths = find_paths(environ)
    with _alone(paths):
        for infrastructure in infrastructures:
            imservice.wipe(CLOUDS, paths, infrastructure)
        if not imservice.known_infrastructures(CLOUDS, paths):
            imservice.stop(CLOUDS, paths)


def down(paths: Paths, progress: Progress) -> list[str]:
    """Remove the service and its files, unless it knows nodes that may still cost money."""
    with _alone(paths):
        known = imservice.known_infrastructures(CLOUDS, paths)
        if not known:
            return imservice.down(CLOUDS, paths)
    things = "infrastructure" if known == 1 else "infrastructures"
    progress(f"the {CLOUDS.title} stays: it knows {known} {things}; `mayfly ls` shows the runs")
    return []


def _alone(paths: Paths) -> AbstractContextManager[None]:
    """One process at a time, among all of this state directory."""
    return paths.locked(f"{paths.id}-{CLOUDS.part}")
