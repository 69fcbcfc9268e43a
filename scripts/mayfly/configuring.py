"""Wait for contextualization, show the staging inside it, and keep what was said."""

from __future__ import annotations

from typing import Any

from mayfly.display import DONE, FAILED, Phases
from mayfly.errors import MayflyError
from mayfly.job import Ready, Tools
from mayfly.meter import Meter
from mayfly.run_store import preprocess_progress, staging_progress
from mayfly.watch import Pace, wait_until_configured
from mayfly_train.errors import NodeError


def configure(
    ready: Ready, infrastructure: str, tools: Tools, phases: Phases, meter: Meter
) -> None:
    """Wait for contextualization; the staging inside it is shown, and counted, as its own phase."""
    im, display = ready.services.im, tools.display

    def show_staging() -> None:
        text, fraction = staging_progress(ready.store.staging())
        if text:
            display.update("staging", text, fraction)
        if ready.job.spec.data.preprocess:
            text, fraction = preprocess_progress(ready.store.preprocessing())
            if text:
                display.update("preprocessing", text, fraction)

    try:
        with phases.phase("contextualization") as report:
            pace = meter.before_training(Pace())
            wait_until_configured(im, infrastructure, pace, report, show_staging)
    finally:
        _keep_messages(ready, infrastructure, tools)
        if reports := ready.store.staging():
            _split_staging(phases, staging_seconds(reports))
        if ready.job.spec.data.preprocess and (reports := ready.store.preprocessing()):
            text, _ = preprocess_progress(reports)
            how = FAILED if any(report.get("error") for report in reports) else DONE
            display.finish("preprocessing", staging_seconds(reports), how=how, text=text)


def _split_staging(phases: Phases, seconds: float) -> None:
    """Count `seconds` of contextualization as staging, replacing what was counted before."""
    whole = phases.seconds["contextualization"] + phases.seconds.get("staging", 0.0)
    staging = min(seconds, whole)
    phases.seconds["contextualization"] = whole - staging
    phases.record("staging", staging, "within contextualization")


def staging_seconds(reports: list[Any]) -> float:
    """Return how long the slowest node took to copy its share, or to convert."""
    return max((float(report.get("seconds") or 0.0) for report in reports), default=0.0)


def _keep_messages(ready: Ready, infrastructure: str, tools: Tools) -> None:
    """Put IM's messages beside the run's logs: they are gone with the infrastructure."""
    try:
        text = tools.display.redact(ready.services.im.messages(infrastructure))
        ready.store.write_log("contextualization.log", text)
    except (MayflyError, NodeError) as error:
        tools.display.say(f"IM's messages could not be kept: {error}")
