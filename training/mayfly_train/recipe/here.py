"""An engine on this machine: a scheduler and workers as processes that end with their parent."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mayfly_train.errors import NodeError
from mayfly_train.recipe import process, tls
from mayfly_train.recipe.nursery import Child, Nursery

LOOPBACK = "127.0.0.1"
START_S = 60.0
LOOK_S = 0.2
CALM_S = 2.0  # a worker that ends sooner than this is not started again at once


@dataclass
class Machine:
    """What is started here. Every worker shares the scratch directory, as on a node."""

    directory: Path
    store: str
    workers: int
    slots: int = 1
    cpus: int = 1
    devices: tuple[str, ...] = ()
    environ: Mapping[str, str] = field(default_factory=dict, repr=False)
    """What the engine and its tasks find in their environment besides: the store's keys."""
    scheduler: str = ""
    processes: dict[int, Child] = field(default_factory=dict)
    _nursery: Nursery | None = None
    _scheduler: Child | None = None
    _since: dict[int, float] = field(default_factory=dict)
    _ended: threading.Event = field(default_factory=threading.Event)
    _keeper: threading.Thread | None = None

    @property
    def tls(self) -> Path:
        """The certificates' directory."""
        return self.directory / "tls"

    @property
    def scratch(self) -> Path:
        """Where attempts are."""
        return self.directory / "scratch"

    def start(self) -> None:
        """Raises NodeError when the scheduler does not come up. What is started ends with the
        thread that calls this."""
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.scratch.mkdir(exist_ok=True)
        process.kill_orphans(self.scratch)
        tls.make(self.tls, self.directory.name)
        self._nursery = Nursery(self.directory / "nursery.log", self.environ)
        self._start_scheduler()
        self._keeper = threading.Thread(target=self._keep, name="keeper", daemon=True)
        self._keeper.start()

    def _start_scheduler(self) -> None:
        file = self.directory / "scheduler"
        file.unlink(missing_ok=True)
        words = ["--host", LOOPBACK, "--tls", str(self.tls), "--address-file", str(file)]
        words += ["--store", self.store]
        self._scheduler = self._spawn("scheduler", words, "scheduler")
        deadline = time.monotonic() + START_S
        while not file.exists():
            if not self._scheduler.is_alive() or time.monotonic() > deadline:
                log = self.directory / "scheduler.log"
                raise NodeError(f"the engine's scheduler did not start — see {log}")
            time.sleep(0.02)
        self.scheduler = file.read_text()

    def _keep(self) -> None:
        """Start workers, and others in place of those that end."""
        while not self._ended.wait(LOOK_S if self._since else 0):
            for number in range(self.workers):
                running = self.processes.get(number)
                if running is not None and running.is_alive():
                    continue
                if time.monotonic() - self._since.get(number, -CALM_S) < CALM_S:
                    continue
                if running is not None:
                    process.kill_orphans(self.scratch)
                self._since[number] = time.monotonic()
                with contextlib.suppress(OSError, NodeError):  # no memory, say: tried again
                    self.processes[number] = self._start_worker(number)
                if self._ended.is_set():
                    return

    def _start_worker(self, number: int) -> Child:
        name = f"worker-{number}"
        words = [
            *("--scheduler", self.scheduler, "--host", LOOPBACK, "--tls", str(self.tls)),
            *("--store", self.store, "--scratch", str(self.scratch), "--name", name),
            *("--slots", str(self.slots), "--cpus", str(self.cpus)),
        ]
        if self.devices:
            words += ["--device", self.devices[number % len(self.devices)]]
        return self._spawn("worker", words, name)

    def _spawn(self, program: str, words: list[str], name: str) -> Child:
        assert self._nursery is not None, "it is started first"
        return self._nursery.start(program, words, self.directory / f"{name}.log")

    def stop(self) -> None:
        """End all of it, and whatever tasks have left."""
        self._ended.set()
        if self._keeper is not None:
            self._keeper.join()  # nothing new is started from here on
        if self._nursery is not None:
            self._nursery.close()
        process.kill_orphans(self.scratch)
