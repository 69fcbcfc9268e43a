"""Machines of the user's own: the inventory decides how many, and no secret is written."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from tests.unit.cloud_fakes import TODAY

from mayfly import dry_run, inventory
from mayfly.clouds import load_job
from mayfly.errors import UserError
from mayfly.inventory import Hosts
from mayfly.offer import Around, Options, make_offer
from mayfly.places import Place, Target
from mayfly.providers.ask import Clients

EXAMPLE = Path(__file__).resolve().parents[2] / "inventory/example/hosts.yml"


def job(**given):
    return load_job(None, {"cloud": "static", "bucket": "my-models", **given}, {})


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "hosts.ini"
    path.write_text(text)
    return path


def test_the_example_is_read():
    assert inventory.read(EXAMPLE) == Hosts(("ps-0",), ("worker-0", "worker-1"))


def test_any_form_that_ansible_reads_will_do(tmp_path: Path):
    text = "[ps]\na\n[rack1]\nc\n[rack2]\nb\n[worker:children]\nrack1\nrack2\n"
    assert inventory.read(written(tmp_path, text)) == Hosts(("a",), ("b", "c"))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[ps]\na\n", "group 'worker' of .* is empty"),
        ("[ps]\na\n[worker]\na\n", "'a' is in both groups"),
    ],
)
def test_what_cannot_train_is_refused(tmp_path: Path, text, says):
    with pytest.raises(UserError, match=says):
        inventory.read(written(tmp_path, text))


def test_a_file_that_is_not_there():
    with pytest.raises(UserError, match="there is no inventory"):
        inventory.read(Path("/nowhere/hosts.yml"))


def test_the_inventory_decides_how_many():
    spec, _ = job(workers=4)
    changed, said = inventory.with_hosts(spec, Hosts(("p",), ("a", "b")))
    assert (changed.count("ps"), changed.count("worker")) == (1, 2)
    assert said == ["nodes.worker.count is 4, the inventory has 2: it decides"]


def test_an_engine_without_parameter_servers_wants_none():
    spec, _ = job(engine="torch")
    with pytest.raises(UserError, match="has 1 machines in group 'ps'.*torch wants none"):
        inventory.with_hosts(spec, Hosts(("p",), ("a",)))


def test_the_variables_hold_lookups_instead_of_keys(tmp_path: Path):
    spec, profile = job()
    environ = {"AWS_ACCESS_KEY_ID": "the-id", "AWS_SECRET_ACCESS_KEY": "canary-of-the-tests"}
    made = dry_run.write(Target(spec, profile, Place()), tmp_path, environ, EXAMPLE)
    assert made.variables is not None
    text = made.variables.read_text()
    assert "canary" not in text
    assert "@input." not in text
    values = yaml.safe_load(text)
    assert values["dataset_s3_secret_access_key"] == (
        "{{ lookup('ansible.builtin.env', 'AWS_SECRET_ACCESS_KEY') }}"
    )
    assert values["trainer_run"] == made.run.id
    deadman = {name: value for name, value in values.items() if name.startswith("deadman_")}
    assert deadman == {"deadman_enabled": False}, "nobody powers off machines of the user's own"
    assert str(EXAMPLE) in str(made.command)


def test_an_inventory_is_wanted_and_goes_with_static_only(tmp_path: Path):
    around = Around({}, Clients(), tmp_path, TODAY)
    with pytest.raises(UserError, match="cloud 'static' needs an inventory"):
        make_offer(*job(), Options(), around)
    assert make_offer(*job(), Options(inventory=EXAMPLE), around).plan.free
    aws = load_job(None, {"cloud": "aws", "bucket": "my-models"}, {})
    with pytest.raises(UserError, match="goes with machines of your own"):
        make_offer(*aws, Options(inventory=EXAMPLE, dry_run=True), around)
