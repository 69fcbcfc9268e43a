"""What the run of the roles' scenarios tells of one that failed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[1] / "molecule/run.py"
DONE = "default > destroy: Executed: Successful\n"
AFTER = "INFO     [default > destroy] Executing\n" + DONE * 60


def load():
    # By its file: tests/molecule would hide the package of that name.
    spec = importlib.util.spec_from_file_location("molecule_run", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def test_a_task_that_failed_is_told_after_its_name():
    said = 'TASK [Wait for it] ****\nok: [one]\nfatal: [two]: FAILED! => {"msg": "no"}\n' + AFTER
    assert load().why(said) == ["TASK [Wait for it]", 'fatal: [two]: FAILED! => {"msg": "no"}']


def test_where_ansible_was_killed_what_came_before_is_told():
    killed = "CRITICAL Ansible return code was -9, command was: ansible-playbook verify.yml"
    said = "".join(f"ok: [{n}]\n" for n in range(90)) + "TASK [Read] ****\n" + killed + "\n" + AFTER
    told = load().why(said)
    assert told[-2:] == ["TASK [Read] ****", killed]
    assert told[0] == "ok: [52]"


def test_a_dead_worker_of_ansible_is_told():
    said = "TASK [Read] ****\n[ERROR]: A worker was found in a dead state\nCRITICAL rc 1\n" + AFTER
    assert "[ERROR]: A worker was found in a dead state" in load().why(said)


def test_output_without_a_status_is_told_by_its_end():
    assert load().why("one\ntwo\n") == ["one", "two"]
