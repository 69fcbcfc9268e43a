"""What a deployment is given, what it works with, and what it is before anything of it exists."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path

from mayfly import images
from mayfly.choices import label
from mayfly.clouds import CloudProfile
from mayfly.display import Display
from mayfly.failover import Attempt, Cause
from mayfly.ledger import Ledger
from mayfly.places import Place, Target
from mayfly.radl_render import render
from mayfly.redact import Secret
from mayfly.run import Run
from mayfly.run_store import RunStore
from mayfly.services import Services
from mayfly.spec import CHECKOUT, ClusterSpec
from mayfly.spending import Basis
from mayfly.steps import load_stages


def render_training(spec: ClusterSpec, profile: CloudProfile, run: Run) -> str:
    """The RADL of a training job."""
    return render(spec, profile, run, load_stages())


@dataclass(frozen=True)
class Job:
    """What to run and where; complete and valid."""

    spec: ClusterSpec
    profile: CloudProfile
    keep: bool = False
    place: Place = Place()
    finder: images.Finder | None = None
    """Who looks up images at the provider, where somebody has to."""
    basis: Basis | None = None
    """What its cost is computed from; None where no price is known."""
    inventory: Path | None = None
    """The user's own machines, where no nodes are made."""
    others: tuple[Job, ...] = ()
    """What to try, in this order, when the provider has no such nodes."""
    render: Callable[[ClusterSpec, CloudProfile, Run], str] = render_training
    """Makes the RADL of its nodes."""
    trains: bool = True
    """It is a training job, with data that is staged; else its nodes find all in the bucket."""
    extras: tuple[str, ...] = ()
    """Parts of CLOUD=local's node image that it needs, when it does not train."""
    secrets: Mapping[str, Secret] = field(default_factory=dict)
    """Values of inputs that only its RADL asks for, by name."""

    @property
    def target(self) -> Target:
        """What is made, and where."""
        return Target(self.spec, self.profile, self.place)

    def tried(self, cause: Cause | None = None, message: str | None = None) -> Attempt:
        """An attempt at its nodes; without a cause they were made."""
        price, currency = (self.basis.per_hour, self.basis.currency) if self.basis else (None, None)
        return Attempt(label(self.target), price, currency, cause, message)


@dataclass(frozen=True)
class Tools:
    """What a deployment works with."""

    ledger: Ledger
    display: Display
    environ: MutableMapping[str, str]
    cache: Path
    build: Path = CHECKOUT / "build"
    price_now: Callable[[Job], Basis | None] | None = None
    """Looks the price of an offer up again; raises OverBudget."""
    ask: Callable[[str], bool] | None = None
    """Asks the user; None where nobody can answer."""


@dataclass(frozen=True)
class Ready:
    """A run that was checked, and of which nothing exists yet but its record."""

    job: Job
    run: Run
    uri: str
    services: Services
    store: RunStore
    radl: str
    path: Path  # where the RADL was written
    passed: tuple[Attempt, ...] = ()
    """Offers of before this one that cannot be made, with the reason."""
    secrets: Mapping[str, Secret] = field(default_factory=dict)
    """Values of inputs that the RADL asks for, and that were made for it."""
