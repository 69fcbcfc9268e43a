"""To take up a failed export: on the node, and from the control side."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from tests.unit.deploy_fakes import FakeDisplay, FakeIM
from tests.unit.train_fakes import FakeBoard

from mayfly import export
from mayfly.credentials import S3Settings
from mayfly.display import Phases
from mayfly.errors import UserError
from mayfly.im import Node
from mayfly.ledger import Ledger
from mayfly.redact import Secret
from mayfly.services import Services
from mayfly.watch import NotExported, Pace, Status
from mayfly_train import markers, resume_export
from mayfly_train.errors import BadInput
from mayfly_train.lifecycle import EXPORTING, FAILED, TRAINING, RunState, dump_state, parse_state
from mayfly_train.s3 import parse_env_file

ERROR = {"message": "export failed: access denied"}
STATE = RunState(FAILED, 1.0, 2.0, step=20, trained=3.0, ended=4.0, error=ERROR)
CANARY = 'canary\\of"tests'
KEYS = S3Settings(Secret("id"), Secret(CANARY), None, "http://s3", "r", "test")


def board_with(tmp_path, state: RunState, *, done: bool) -> FakeBoard:
    board = FakeBoard(tmp_path)
    memory = {"state": dump_state(state), "events": [{"event": "state"}], "told": {"x": 1}}
    markers.write_json(board, markers.MEMORY, memory)
    if done:
        markers.write_json(board, markers.DONE, {})
    return board


def test_a_failed_export_goes_back_to_exporting_and_keeps_its_past(tmp_path):
    board = board_with(tmp_path, STATE, done=True)
    resume_export.resume(board, "r")
    memory = markers.read_json(board, markers.MEMORY)
    state = parse_state(memory["state"])
    assert state == replace(STATE, phase=EXPORTING, error=None)
    assert memory["events"] == [{"event": "state"}]


@pytest.mark.parametrize("done", [False, True])
def test_a_run_that_was_never_trained_or_goes_on_is_left_alone(tmp_path, done):
    state = replace(STATE, phase=TRAINING if done else FAILED)
    board = board_with(tmp_path, state, done=done)
    with pytest.raises(BadInput, match="run r "):
        resume_export.resume(board, "r")
    assert parse_state(markers.read_json(board, markers.MEMORY)["state"]) == state


def test_the_env_file_is_one_that_the_nodes_read():
    assert parse_env_file(export.env_file(KEYS)) == {
        "AWS_ACCESS_KEY_ID": "id",
        "AWS_SECRET_ACCESS_KEY": CANARY,
        "AWS_ENDPOINT_URL": "http://s3",
        "AWS_DEFAULT_REGION": "r",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """A run whose export failed, and what was sent to its chief."""
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ledger.add("r", "local", "s3://b/r/", {"limits": {"idle": 60}})
    ledger.set_infrastructure("r", "infra-0")
    ledger.set_state("r", "kept")
    sent: list[tuple[list[str], str]] = []
    node = Node("0", "worker", "configured", "w", None, "10.0.0.2", "root", None, Secret("k"))
    im = FakeIM()
    im.nodes = lambda infrastructure: [node]
    monkeypatch.setattr(
        export.remote,
        "run",
        lambda nodes, node, command, timeout=0, text="": sent.append((command, text)),
    )
    monkeypatch.setattr(export, "verify_model", lambda client, uri: type("M", (), MODEL)())
    return ledger, Services(im, KEYS, None, None), sent


MODEL = {"files": (), "total_bytes": 0}
FAILED_STATUS = {"state": "failed", "updated": "t1", "error": ERROR}


def resume(kept, monkeypatch, *statuses):
    ledger, services, _ = kept
    left = [FAILED_STATUS, *statuses]

    class Store:
        def __init__(self, *_):
            pass

        def status(self):
            return Status.of(left.pop(0) if len(left) > 1 else left[0])

    monkeypatch.setattr(export, "RunStore", Store)
    pace = Pace(sleep=lambda _: None)
    return export.resume(ledger.get("r"), services, Phases(FakeDisplay()), pace)


def test_the_old_failure_is_not_taken_for_the_new_end(kept, monkeypatch):
    done = {"state": "succeeded", "updated": "t3"}
    going = {"state": "exporting", "updated": "t2"}
    assert resume(kept, monkeypatch, FAILED_STATUS, going, done).state == "succeeded"
    (command, text), *others = kept[2]
    assert json.dumps(CANARY).strip('"') in text
    assert "canary" not in " ".join(command)
    assert others == []


def test_an_export_that_fails_again_says_so(kept, monkeypatch):
    again = {"state": "failed", "updated": "t2", "error": {"message": "export failed: no bucket"}}
    with pytest.raises(NotExported, match="no bucket.*mayfly export r"):
        resume(kept, monkeypatch, again)


def test_a_run_without_nodes_or_with_its_model_is_refused(kept, monkeypatch):
    kept[0].set_outcome("r", "succeeded")
    with pytest.raises(UserError, match="has its model"):
        resume(kept, monkeypatch)
    kept[0].set_outcome("r", "failed")
    kept[0].set_state("r", "destroyed")
    with pytest.raises(UserError, match="has no nodes"):
        resume(kept, monkeypatch)
