"""A run on this machine: scheduler, workers and head, from start to the end of all of them."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mayfly.display import duration
from mayfly.errors import UserError
from mayfly.recipe.outlook import Outlook
from mayfly.recipe.runs import Place, worked_on
from mayfly_train.recipe import lock, names, shape
from mayfly_train.recipe.document import Experiment, Recipe
from mayfly_train.recipe.engine import Member, why_no_room
from mayfly_train.recipe.head import Head, Run
from mayfly_train.recipe.ledger import Ledger

STATES = ("done", "stopped", "failed", "running")


@dataclass
class Ticker:
    """Says on standard error how far a run is, when that has changed."""

    last: dict[str, str] = field(default_factory=dict)
    outlook: Outlook = field(default_factory=Outlook)

    def show(self, experiments: list[dict[str, Any]]) -> None:
        eta_s = self.outlook.eta_s(experiments)
        for each in experiments:
            line = progress(each)
            if self.last.get(each["name"]) != line and each["state"] != "waiting":
                self.last[each["name"]] = line
                known = each["state"] == "running" and eta_s is not None
                sys.stderr.write(line + (f" · ETA {duration(eta_s or 0)}\n" if known else "\n"))


def progress(experiment: Mapping[str, Any]) -> str:
    """One experiment's state on one line."""
    states, tasks = experiment["states"], experiment["tasks"]
    counts = ", ".join(f"{states[name]} {name}" for name in STATES if states.get(name))
    of = f" of {tasks}" if tasks is not None else ""
    message = f" ({experiment['message']})" if experiment["message"] else ""
    return f"{experiment['name']}: {experiment['state']}{message}: {counts or '0 done'}{of}"


def execute(run: Run, place: Place, workers: int | None, again: bool = False) -> str:
    """Run to the end and return how it ended; `again`: what has failed, too. Raises UserError
    without the engine's packages and while another process here works on the run, BadInput while
    a head elsewhere does, NodeError for what fails; KeyboardInterrupt leaves a run that can go
    on."""
    _require("distributed")
    here = _module("here")
    lock.require_free(place.store)  # before anything of the other's is touched
    with worked_on(place) as ledger:
        place.store.delete(names.CANCEL)
        if again:
            sys.stderr.write(f"{ledger.forgive()} tasks run again\n")
        layout = _shape(run.recipe, workers)
        done = {each["name"] for each in ledger.experiments() if each["state"] == "done"}
        require_room([each for each in run.recipe.experiments if each.name not in done], layout)
        where, address = place.state / "machine", place.store.address
        machine = here.Machine(where, address, environ=place.environ, **layout)
        return _work(run, ledger, machine)


def _work(run: Run, ledger: Ledger, machine: Any) -> str:
    """Run to the end on a machine, which is started and stopped."""
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        # The engine's client is as long in coming up as its scheduler: both at a time.
        threading.Thread(target=_module, args=("dask_engine",), daemon=True).start()
        machine.start()
        engine = _module("dask_engine").DaskEngine(
            machine.scheduler, machine.tls, alike=shape.alike(run.recipe)
        )
        try:
            return Head(run, ledger, engine, Ticker().show).work()
        finally:
            engine.close()
    finally:
        machine.stop()


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _require(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise _missing(package)


def _module(name: str) -> Any:
    try:
        return importlib.import_module(f"mayfly_train.recipe.{name}")
    except ModuleNotFoundError as error:
        raise _missing(error.name) from None


def _missing(package: str | None) -> UserError:
    return UserError(
        f"recipes need the Python package {package}",
        f"install it with: {sys.executable} -m pip install 'mayfly-training[recipe]'",
    )


def _shape(recipe: Recipe, workers: int | None) -> dict[str, Any]:
    """The worker processes on this machine."""
    gpus = _gpus() if shape.wants_gpus(recipe) else 0
    found = shape.layout(recipe, workers or os.cpu_count() or 1, gpus)
    devices = tuple(str(number) for number in range(found.processes)) if found.devices else ()
    cpus = max(found.slots, (os.cpu_count() or 1) // found.processes)
    return {"workers": found.processes, "slots": found.slots, "cpus": cpus, "devices": devices}


def require_room(experiments: Sequence[Experiment], layout: Mapping[str, Any]) -> None:
    """Raise UserError for an experiment whose tasks would wait for ever: this machine does not
    grow."""
    slots, cpus, gpus = layout["slots"], layout["cpus"], int(bool(layout["devices"]))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    members = [Member("here", slots, cpus, memory, gpus, together=slots)] * layout["workers"]
    for each in experiments:
        if why := why_no_room(members, each.hardware):
            raise UserError(
                f"experiment {each.name!r} {why}",
                "take less in its hardware, more with --workers, or nodes with --cloud",
            )


def _gpus() -> int:
    """How many GPUs the driver lists; 0 without one."""
    if not shutil.which("nvidia-smi"):
        return 0
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
