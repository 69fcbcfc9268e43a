"""All cases are started with the first test; each test looks at the outcome of its own."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator

import pytest

from fake_ec2.alone import is_alone
from fake_ec2.cases import Outcome
from fake_ec2.labs import Labs
from mayfly.local import imservice
from mayfly.local.paths import find_paths

SIDE_BY_SIDE = int(os.environ.get("MAYFLY_FAKE_LABS", "3"))


@pytest.fixture(scope="session")
def labs(request, tmp_path_factory) -> Iterator[Labs]:
    assert is_alone(), "these tests want a network without a way out: make test-ec2"
    assert shutil.which("ssh"), "IM needs ssh"
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the labs are closed
    wanted = {
        str(mark.args[0]): mark.args[1]
        for item in request.session.items
        for mark in item.iter_markers("case")
    }
    imservice.install(find_paths(), print)  # nothing to do, or no way to do it
    made = Labs(tmp_path_factory.mktemp("fake_ec2"), min(SIDE_BY_SIDE, len(wanted) or 1))
    for name, case in wanted.items():
        made.submit(name, case)
    yield made
    made.close()


@pytest.fixture
def outcome(request, labs) -> Outcome:
    """The outcome of the test's own case."""
    mark = request.node.get_closest_marker("case")
    return labs.futures[str(mark.args[0])].result()


@pytest.fixture
def clean(outcome) -> Outcome:
    """Fails unless nothing of ours is left, and nothing of others is harmed."""
    assert outcome.left == {}
    assert (outcome.foreign_lost, outcome.foreign_changed) == ({}, False)
    assert (outcome.told["destroy"], outcome.destroyed, outcome.im_runs) == (0, True, False)
    return outcome
