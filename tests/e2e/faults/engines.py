"""What cases of several engines share: their programs on the nodes, and what logs must say."""

from __future__ import annotations

import re

import pydantic
import yaml
from machine import ROOT

from faults.lab import Document, Lab, Training
from mayfly import spec
from mayfly.engines import COMMAND

COMMAND_JOB = ROOT / "training/jobs/command.yml"


def program_of(lab: Lab, engine: str, name: str) -> Document:
    """A built-in program as an engine runs it; engine command by the words of its default job."""
    program = lab.program(name)
    if engine == COMMAND:
        text = yaml.safe_load(COMMAND_JOB.read_text())["trainer"]["command"]
        program["command"] = command_words(f"{text} --batch-size $MAYFLY_BATCH_SIZE")
    return program


def command_words(text: str) -> list[str]:
    """The words that a job's `command` becomes on the nodes."""
    return list(pydantic.TypeAdapter(spec.Command).validate_python(text))


def all_ranks_agree(run: Training, ranks: int) -> None:
    """Horovod's launchers have proven the all-reduce, and all ranks end with the same weights."""
    log = (run.read("logs/chief-0.log") or b"").decode(errors="replace")
    found = re.findall(r"^horovod: all-reduce of .* over (\d+) ranks: ", log, re.MULTILINE)
    assert found and set(found) == {str(ranks)}, log[-3000:]
    equal = re.findall(r"^weights: equal on (\d+) ranks, sha256 \w{16}$", log, re.MULTILINE)
    assert equal == [str(ranks)], log[-3000:]
