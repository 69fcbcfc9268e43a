"""The local platform as one thing: up, down, and what an infrastructure left on it."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from mayfly.errors import UserError
from mayfly.local import cloudim, engine, image, imservice, s3server
from mayfly.local.docker import INFRASTRUCTURE, Docker
from mayfly.local.host import Progress
from mayfly.local.paths import Paths, find_paths
from mayfly.redact import Secret

TITLES = {"engine": "Docker Engine", "image": "node image", "s3": "S3 server", "im": "IM service"}


@dataclass(frozen=True)
class LocalPlatform:
    """What a deployment on this machine needs to know of its platform.

    `phases` has the seconds that each part took, `reused` whether it was there already; their keys
    are engine, image, s3 and im.
    """

    im_url: str
    im_auth_file: Path
    docker_host: str
    network: str
    bridge_address: str
    s3_endpoint: str
    s3_access_key_id: str
    s3_secret_access_key: Secret
    image: str
    phases: Mapping[str, float] = field(default_factory=dict)
    reused: Mapping[str, bool] = field(default_factory=dict)


def up(
    progress: Progress, *, need_image: bool = True, environ: Mapping[str, str] = os.environ
) -> LocalPlatform:
    """Start what does not run yet. Raises UserError that says what this machine lacks.

    Without `need_image` none is made, and `image` is empty.
    """
    paths = find_paths(environ)
    phases = _Phases(progress)
    with paths.locked(paths.id), ThreadPoolExecutor(max_workers=1) as pool:
        s3server.check(paths, environ)
        imservice.check(imservice.LOCAL, paths, environ)
        with phases.part("engine") as reused:
            found = engine.up(paths, progress, environ)
            network, address = engine.bridge_address(found.docker, paths)
            reused(found.reused)
        programs = pool.submit(_install_programs, paths, progress)  # while the image is made
        tag = ""
        if need_image:
            with phases.part("image") as reused:
                tag, present = image.up(paths, found.docker, progress, environ)
                reused(present)
        with phases.part("s3") as reused:
            programs.result()
            s3 = s3server.up(paths, address, progress, environ)
            reused(s3.reused)
        with phases.part("im") as reused:
            made_on = (found.docker.host, network)
            im = imservice.up(imservice.LOCAL, paths, progress, environ, made_on)
            reused(im.reused)
    return LocalPlatform(
        im_url=im.url,
        im_auth_file=im.auth_file,
        docker_host=found.docker.host,
        network=network,
        bridge_address=address,
        s3_endpoint=s3.endpoint,
        s3_access_key_id=s3.access_key_id,
        s3_secret_access_key=s3.secret_access_key,
        image=tag,
        phases=phases.seconds,
        reused=phases.reused,
    )


def down(progress: Progress, environ: Mapping[str, str] = os.environ) -> list[str]:
    """Remove every trace of the platform of this state directory; the cache stays.

    Returns what was removed, in words; nothing of others is touched.
    """
    paths = find_paths(environ)
    if not paths.state.exists():
        return []
    own = engine.OwnEngine(paths)
    with paths.locked(paths.id):
        foreign = None if own.config.exists() else engine.find_running(environ)
        progress("stopping the IM service and the S3 server")
        removed = imservice.down(imservice.LOCAL, paths) + s3server.down(paths)
        removed += cloudim.down(paths, progress)
        progress("removing nodes and networks")
        removed += _clear(foreign, paths) if foreign else own.stop()
        for part in paths.state.iterdir():
            if part.name != imservice.CLOUDS.part:  # it is there because it is in use
                shutil.rmtree(part, ignore_errors=True)
        shutil.rmtree(paths.run, ignore_errors=True)
        with contextlib.suppress(OSError):  # the ledger may be in it
            paths.state.rmdir()
            paths.state.parent.rmdir()
    return removed


def status(environ: Mapping[str, str] = os.environ) -> dict[str, str | None]:
    """Address or name of each part that runs, None for what does not."""
    paths = find_paths(environ)
    docker = None
    with contextlib.suppress(UserError):  # what is wrong with the engine is told by `up`
        docker = _engine_in_use(paths, environ)
    return {
        "engine": docker.host if docker else None,
        "s3": s3server.running(paths),
        "im": imservice.running(imservice.LOCAL, paths),
        "im_clouds": imservice.running(imservice.CLOUDS, paths),
        "nodes": str(len(docker.containers(INFRASTRUCTURE))) if docker else None,
    }


def leftovers(infrastructure_id: str, environ: Mapping[str, str] = os.environ) -> list[str]:
    """What an infrastructure has on the engine: `container ID`, `network ID`, `volume NAME`."""
    docker = _engine_in_use(find_paths(environ), environ)
    if docker is None:
        return []
    label = f"{INFRASTRUCTURE}={infrastructure_id}"
    found = {
        "container": docker.containers(label),
        "network": docker.networks(label),
        "volume": docker.volumes(label),
    }
    return [f"{kind} {name}" for kind, names in found.items() for name in names]


def remove(infrastructure_id: str, environ: Mapping[str, str] = os.environ) -> None:
    """Remove what an infrastructure that IM no longer knows left on the engine."""
    docker = _engine_in_use(find_paths(environ), environ)
    if docker is not None:
        _remove(docker, f"{INFRASTRUCTURE}={infrastructure_id}")


def wipe(infrastructure_id: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Make IM forget a destroyed infrastructure with all secrets. Returns whether it knew it."""
    return imservice.wipe(imservice.LOCAL, find_paths(environ), infrastructure_id)


def _install_programs(paths: Paths, progress: Progress) -> None:
    s3server.install(paths, progress)
    imservice.install(paths, progress)


def _clear(docker: Docker, paths: Paths) -> list[str]:
    """Remove what we made in an engine that is not ours, and nothing else of it."""
    removed = _remove(docker, engine.label(paths))
    return removed + image.remove(docker)


def _remove(docker: Docker, label: str) -> list[str]:
    """Remove what carries a label; returns what that was, in words."""
    removed = []
    for kind, names, remove_all in (
        ("nodes", docker.containers(label), docker.remove),
        ("networks", docker.networks(label), lambda names: docker("network", "rm", *names)),
        ("volumes", docker.volumes(label), lambda names: docker("volume", "rm", *names)),
    ):
        if names:
            remove_all(names)
            removed.append(f"{len(names)} {kind}")
    return removed


def _engine_in_use(paths: Paths, environ: Mapping[str, str]) -> Docker | None:
    own = engine.OwnEngine(paths)
    if own.config.exists():
        return own.docker if own.answers() else None
    return engine.find_running(environ)


class _Phases:
    """Times the parts, and says of each whether it was there or is new."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.seconds: dict[str, float] = {}
        self.reused: dict[str, bool] = {}

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[Callable[[bool], None]]:
        """Time a block; it receives the function that it tells whether the part was there."""
        started = time.monotonic()
        yield lambda reused: self.reused.update({name: reused})
        self.seconds[name] = round(time.monotonic() - started, 2)
        made = "reused" if self.reused[name] else f"ready after {self.seconds[name]:.0f} s"
        self.progress(f"{TITLES[name]}: {made}")
