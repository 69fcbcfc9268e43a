"""What the end-to-end cases of the engines take for granted, without nodes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from faults import engines

LOG = """\
horovod: all-reduce of 4.2 MB over 2 ranks: 3.1 ms, 1353 MB/s through each rank
progress: step=900 loss=0.4012 steps_per_second=120.00
samples: 28800 in this start, by 2 ranks
weights: equal on 2 ranks, sha256 0123456789abcdef
"""


class FakeRun:
    """A run that has left this log of its chief."""

    def __init__(self, log: str) -> None:
        self.files = {"logs/chief-0.log": log.encode()}

    def read(self, name: str) -> bytes | None:
        return self.files.get(name)


def test_a_log_says_that_all_ranks_agree():
    engines.all_ranks_agree(FakeRun(LOG), 2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "log", ["", LOG.replace("over 2", "over 1"), LOG.replace("equal on 2", "equal on 1")]
)
def test_a_log_that_does_not_say_so_fails_the_case(log):
    with pytest.raises(AssertionError):
        engines.all_ranks_agree(FakeRun(log), 2)  # type: ignore[arg-type]


def test_engine_command_runs_the_default_jobs_words_with_the_cases_batch():
    made: Any = SimpleNamespace(program=lambda name: {"path": f"/opt/{name}.py", "args": {}})
    program = engines.program_of(made, "command", "mnist_lightning")
    *shell, text = program["command"]
    assert shell == ["bash", "-e", "-o", "pipefail", "-c"]
    assert text.startswith("torchrun --nnodes $MAYFLY_NUM_NODES ")
    assert "\n" not in text
    assert text.endswith("--train-steps $MAYFLY_TRAIN_STEPS --batch-size $MAYFLY_BATCH_SIZE")
    assert "command" not in engines.program_of(made, "torch", "mnist_lightning")
