"""Optuna's TPE as a function of what is known: the same history, the same trials.

Each trial has a sampler of its own, seeded with seed + number: a sampler that goes on after a
restart would not be where it was. Trials of a generation do not know of each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.trial import TrialState

from mayfly_train.recipe.document import Experiment, Parameter
from mayfly_train.recipe.space import Value

optuna.logging.set_verbosity(optuna.logging.ERROR)


class TpeSampler:
    """Asks for trials; what it knows is told anew each time."""

    def __init__(self, experiment: Experiment) -> None:
        self._search = experiment.search
        self._space = {each.name: _distribution(each) for each in experiment.parameters}

    def ask(
        self, history: list[tuple[dict[str, Value], float | None]], numbers: range
    ) -> list[list[Value]]:
        """The values of these trials; a trial without a value has failed."""
        direction: Any = self._search.direction  # Optuna takes the same two words
        study = optuna.create_study(direction=direction)
        study.add_trials([self._told(parameters, value) for parameters, value in history])
        found = []
        for number in numbers:
            study.sampler = optuna.samplers.TPESampler(seed=self._search.seed + number)
            trial = study.ask(self._space)
            found.append([trial.params[name] for name in self._space])
        return found

    def _told(self, parameters: Mapping[str, Value], value: float | None) -> Any:
        return optuna.trial.create_trial(
            state=TrialState.FAIL if value is None else TrialState.COMPLETE,
            params=dict(parameters),
            distributions=self._space,
            value=value,
        )


def _distribution(parameter: Parameter) -> BaseDistribution:
    low, high = parameter.low, parameter.high
    if parameter.kind in ("uniform", "loguniform"):
        return FloatDistribution(low, high, log=parameter.kind == "loguniform")
    if parameter.kind in ("int", "integers"):
        return IntDistribution(int(low), int(high))
    return CategoricalDistribution(parameter.values)
