"""Every cloud's file: well formed, honest, free of prices and identifiers, fit for every job."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from radl.radl_parse import parse_radl

from mayfly import dry_run, inventory
from mayfly.clouds import CLOUDS, known_clouds, load_cloud, load_job, notices
from mayfly.images import unasked
from mayfly.node_types import plan_nodes
from mayfly.places import Target, find_place
from mayfly.radl_lint import lint
from mayfly.unresolved import mark, marks

ROOT = Path(__file__).resolve().parents[2]
JOBS = sorted((ROOT / "training/jobs").glob("*.yml"))
CLOUD_NAMES = known_clouds()
every_cloud = pytest.mark.parametrize("cloud", CLOUD_NAMES)
# What each setting may look like, so that the whole URL is known.
PLACES = {
    "OS_AUTH_URL": "https://keystone.example.org:5000/v3",
    "EGI_SITE": "CESGA",
    "EGI_VO": "vo.access.egi.eu",
    "ONE_XMLRPC": "http://frontend.example.org:2633/RPC2",
}


def test_the_clouds_of_the_project_are_there():
    assert {"local", "static", "aws", "gcp", "azure", "openstack", "egi", "opennebula"} <= {
        *CLOUD_NAMES
    }


@every_cloud
@pytest.mark.parametrize("job", JOBS, ids=lambda path: path.stem)
def test_every_built_in_job_goes_with_every_cloud(cloud: str, job: Path, tmp_path: Path):
    spec, profile = load_job(job, {"cloud": cloud}, {}, dry_run=True)
    place = find_place(spec, profile, {})
    made = dry_run.write(Target(spec, profile, place), tmp_path, {})
    if profile.backend == "inventory":
        assert made.variables is not None
        values = yaml.safe_load(made.variables.read_text())
        assert values == inventory.variables(spec, made.run)
        return
    assert made.radl is not None
    text = made.radl.read_text()
    assert parse_radl(text).check()
    assert lint(text, dry_run=True) == []
    assert any("is left open" in str(finding) for finding in lint(text))
    assert text.isascii()


@every_cloud
def test_only_the_image_is_open_when_place_and_bucket_are_known(cloud: str, tmp_path: Path):
    spec, profile = load_job(None, {"cloud": cloud, "bucket": "my-models"}, {})
    made = dry_run.write(Target(spec, profile, find_place(spec, profile, PLACES)), tmp_path, {})
    if made.radl is None:
        return
    rule = profile.image
    looked_up = rule is None or rule.lookup is not None
    expected = {"image"} if looked_up else set()
    if cloud == "local":
        expected |= {"collection", "s3_endpoint"}
    assert {*marks(made.radl.read_text())} == expected


@every_cloud
def test_a_checkouts_roles_need_no_release(cloud: str, tmp_path: Path):
    """Until there is one on Galaxy, nodes get them from where deploy can put them."""
    spec, profile = load_job(None, {"cloud": cloud, "bucket": "my-models"}, {})
    made = dry_run.write(Target(spec, profile, find_place(spec, profile, PLACES)), tmp_path, {})
    if made.radl is None:
        assert profile.collection == "none"
        return
    expected = mark("collection") if cloud == "local" else "@input.collection_url@"
    assert f"'ansible.collections.{expected}'" in made.radl.read_text()


@every_cloud
def test_a_job_can_name_the_release_of_the_roles(cloud: str, tmp_path: Path):
    job = {"cloud": cloud, "bucket": "my-models", "collection": "git+https://host/a/b@v1"}
    spec, profile = load_job(None, job, {})
    made = dry_run.write(Target(spec, profile, find_place(spec, profile, PLACES)), tmp_path, {})
    if made.radl is None:
        assert any(notice.startswith("collection is ignored") for notice in notices(spec, profile))
        return
    assert "'ansible.collections.git+https://host/a/b,v1'" in made.radl.read_text()


@every_cloud
def test_it_says_how_far_it_was_exercised(cloud: str):
    said = load_cloud(cloud).exercised
    assert len(said) > 10
    if cloud != "local":
        assert "never deployed" in said or "planned only" in said


@every_cloud
def test_it_holds_no_price_and_no_identifier_of_an_image(cloud: str):
    text = (CLOUDS / f"{cloud}.yml").read_text()
    assert not re.search(r"\bami-[0-9a-f]{8}|[0-9a-f]{8}-[0-9a-f]{4}-", text)
    assert not re.search(r"\d\s*(USD|EUR|\$|€)|\$\s*\d", text)


@every_cloud
def test_its_defaults_are_ones_of_its_own(cloud: str):
    profile = load_cloud(cloud)
    for name, setting in profile.settings.items():
        if setting.default:
            assert re.fullmatch(setting.pattern or ".*", setting.default), name
    spec, _ = load_job(None, {"cloud": cloud}, {}, dry_run=True)
    for nodes in plan_nodes(spec, profile) if profile.backend == "im" else ():
        least = profile.sizes[nodes.group]
        assert nodes.size is not None
        assert nodes.size.cpu >= least.cpu
        assert nodes.size.memory_mb >= least.memory_mb
        assert nodes.size.gpu == 0


@every_cloud
def test_its_types_go_from_small_to_large(cloud: str):
    """The first that fits is taken, so a larger one before it would never be."""
    sizes = [(size.gpu, size.cpu, size.memory_mb) for size in load_cloud(cloud).types.values()]
    assert sizes == sorted(sizes)


@every_cloud
def test_its_image_is_written_as_ims_connector_reads_it(cloud: str):
    spec, profile = load_job(None, {"cloud": cloud}, {}, dry_run=True)
    url = unasked(spec, profile, find_place(spec, profile, PLACES))
    forms = {
        "aws": r"aws://[a-z0-9-]+/@at-deploy\.image@",
        "gcp": r"gce://[a-z0-9-]+/https://www\.googleapis\.com/compute/v1/projects/.+",
        "azure": r"azr://[a-z0-9]+/[^/]+/[^/]+/[^/]+/latest",
        "openstack": r"ost://[^/]+/@at-deploy\.image@",
        "egi": r"egi://[^/]+/[^/]+/[^/?]+\?[^/?]+",
        "opennebula": r"one://[^/]+/[^/]+",
    }
    if cloud in forms:
        assert re.fullmatch(forms[cloud], url), url


def test_a_cloud_is_one_file(tmp_path: Path):
    """Another region of the world, with nothing but its data."""
    content = yaml.safe_load((CLOUDS / "gcp.yml").read_text())
    content["title"] = "a cloud that was added"
    (tmp_path / "added.yml").write_text(yaml.safe_dump(content))
    assert load_cloud("added", tmp_path).title == "a cloud that was added"
