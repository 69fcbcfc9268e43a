"""The collection: built once per content, and fetched by ansible-galaxy from where it is put."""

from __future__ import annotations

import http.server
import os
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch
from urllib.parse import urlparse

import boto3
import pytest
from moto import mock_aws

from mayfly import collection
from mayfly.clouds import load_cloud, load_job
from mayfly.credentials import S3Settings
from mayfly.errors import MayflyError, RemoteError
from mayfly.redact import Secret

GALAXY = """\
namespace: mayfly
name: training
version: 0.0.1
readme: README.md
authors: [x]
license: [Apache-2.0]
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout of the smallest collection."""
    root = tmp_path / "checkout"
    (root / "roles/hadoop/tasks").mkdir(parents=True)
    (root / "roles/hadoop/tasks/main.yml").write_text("---\n")
    (root / "galaxy.yml").write_text(GALAXY)
    (root / "README.md").write_text("# x\n")
    (root / "ansible.cfg").write_text("[defaults]\n")
    return root


@pytest.fixture
def tarball(tmp_path: Path) -> Path:
    path = tmp_path / "0123456789abcdef/mayfly-training-0.0.1.tar.gz"
    path.parent.mkdir()
    path.write_bytes(b"not looked into")
    return path


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    with mock_aws():
        client = boto3.client("s3", region_name="us-east-1")
        client.create_bucket(Bucket=collection.PUBLIC_BUCKET)
        client.create_bucket(Bucket="models")
        yield client


# --- building ---------------------------------------------------------------------------------


def test_the_tarball_is_built_once_per_content(checkout: Path, tmp_path: Path):
    first = collection.build(checkout, tmp_path / "cache")
    with tarfile.open(first) as archive:
        assert "roles/hadoop/tasks/main.yml" in archive.getnames()
    made = first.stat().st_mtime_ns
    assert collection.build(checkout, tmp_path / "cache") == first
    assert first.stat().st_mtime_ns == made
    assert [path.name for path in first.parent.iterdir()] == [first.name]


def test_what_lies_beside_the_sources_is_not_walked(checkout: Path, tmp_path: Path):
    """Such as the disks of running nodes, where files go away at any time."""
    with patch.object(collection, "_run_galaxy", wraps=collection._run_galaxy) as galaxy:
        collection.build(checkout, tmp_path / "cache")
    sources = Path(galaxy.call_args.args[0][1])
    assert checkout not in (sources, *sources.parents)


def test_the_hash_follows_content_names_and_nothing_else(checkout: Path):
    task = checkout / "roles/hadoop/tasks/main.yml"
    hashes = [collection.content_hash(checkout)]
    task.write_text("--- []\n")
    hashes.append(collection.content_hash(checkout))
    task.rename(task.with_name("other.yml"))
    hashes.append(collection.content_hash(checkout))
    assert len(set(hashes)) == 3
    for name in ("roles/x/__pycache__/a.pyc", "roles/x/molecule/default/a.yml", "tests/a.py"):
        (checkout / name).parent.mkdir(parents=True)
        (checkout / name).write_text("x")
    assert collection.content_hash(checkout) == hashes[-1]


def test_a_collection_that_cannot_be_built_says_why(checkout: Path, tmp_path: Path):
    galaxy = checkout / "galaxy.yml"
    galaxy.write_text(GALAXY.replace("readme: README.md\n", ""))
    with pytest.raises(MayflyError, match="could not be built: .*readme"):
        collection.build(checkout, tmp_path / "cache")


def test_what_was_built_is_installed_once_where_nothing_else_is(checkout: Path, tmp_path: Path):
    tarball = collection.build(checkout, tmp_path / "cache")
    path = collection.install(tarball)
    root = path / "ansible_collections/mayfly"
    assert [each.name for each in root.iterdir() if each.is_dir()] == ["training"]
    assert (root / "training/roles/hadoop/tasks/main.yml").exists()
    made = root.stat().st_mtime_ns
    assert collection.install(tarball) == path
    assert root.stat().st_mtime_ns == made


def test_a_tarball_that_is_none_is_not_installed(tarball: Path):
    with pytest.raises(MayflyError, match="could not be installed"):
        collection.install(tarball)
    assert not (tarball.parent / "installed").exists()


def test_the_cache_directory_can_be_moved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("MAYFLY_CACHE_DIR", str(tmp_path))
    assert collection.cache_dir() == tmp_path


# --- publishing -------------------------------------------------------------------------------


def profile(how: str):
    return load_cloud("local").model_copy(update={"collection": how})


def test_local_nodes_fetch_it_from_the_public_bucket(s3: Any, tarball: Path):
    made = collection.publish(tarball, s3, profile("url"), "s3://models/", "http://10.0.0.1:8333/")
    key = "0123456789abcdef/mayfly-training-0.0.1.tar.gz"
    assert made == collection.Published(f"http://10.0.0.1:8333/mayfly-public/{key}")
    assert s3.get_object(Bucket="mayfly-public", Key=key)["Body"].read() == tarball.read_bytes()


def test_it_is_uploaded_once(s3: Any, tarball: Path):
    s3.put_bucket_versioning(Bucket="mayfly-public", VersioningConfiguration={"Status": "Enabled"})
    for _ in range(2):
        collection.publish(tarball, s3, profile("url"), "s3://models/", "http://x")
    versions = s3.list_object_versions(Bucket="mayfly-public")["Versions"]
    assert len(versions) == 1


def test_on_a_cloud_it_lies_in_the_runs_bucket_behind_an_expiring_url(s3: Any, tarball: Path):
    made = collection.publish(tarball, s3, profile("bucket"), "s3://models/team/")
    key = "team/collection/0123456789abcdef/mayfly-training-0.0.1.tar.gz"
    assert s3.head_object(Bucket="models", Key=key)["ContentLength"] == tarball.stat().st_size
    assert made.name == "@input.collection_url@"
    url = made.secrets["collection_url"].reveal()
    assert "Expires" in url
    # IM splits an application's name at commas, and RADL quotes it.
    assert not set(url) & set(",'\" ")


def test_a_signed_url_names_the_buckets_region():
    """A bucket of the last days is redirected there by S3, which no signature allows."""
    for region, host in (("eu-west-1", "s3.eu-west-1"), ("us-east-1", "s3")):
        keys = S3Settings(Secret("id"), Secret("key"), None, None, region, "test")
        url = collection.signed_url(keys.client(), "models", "x.tar.gz")
        assert urlparse(url).hostname == f"models.{host}.amazonaws.com"


def test_machines_of_ones_own_need_no_bucket(tarball: Path):
    made = collection.publish(tarball, None, profile("none"), "s3://models/")
    assert made.name.startswith("mayfly.training,")


def test_a_checkout_is_no_release(checkout: Path):
    job, _ = load_job(None, {"cloud": "aws", "bucket": "models"}, {})
    assert collection.elsewhere(job, checkout) is None


def test_a_release_is_fetched_from_galaxy(checkout: Path):
    released(checkout, "0.0.1")
    job, _ = load_job(None, {"cloud": "aws", "bucket": "models"}, {})
    assert collection.elsewhere(job, checkout) == "mayfly.training,0.0.1"


@pytest.mark.parametrize("since", [".git", "changelogs/fragments/new.yml"])
def test_what_came_after_a_release_is_none(checkout: Path, since: str):
    released(checkout, "0.0.1")
    (checkout / since).parent.mkdir(exist_ok=True)
    (checkout / since).touch()
    assert not collection.is_release(checkout)


def test_the_next_version_is_no_release_yet(checkout: Path):
    released(checkout, "0.0.0")
    assert not collection.is_release(checkout)


def test_a_job_can_name_other_roles(checkout: Path):
    job, _ = load_job(None, {"cloud": "aws", "bucket": "models", "collection": "1.2.0"}, {})
    assert collection.elsewhere(job, checkout) == "mayfly.training,1.2.0"


def released(checkout: Path, version: str) -> None:
    """Leave a checkout as the release `version` would be."""
    changes = checkout / "changelogs"
    changes.mkdir(exist_ok=True)
    (changes / "changelog.yaml").write_text(f"releases: {{{version}: {{}}}}\n")


def test_a_bucket_that_does_not_exist(s3: Any, tarball: Path):
    with pytest.raises(RemoteError, match="s3://nowhere/collection/"):
        collection.publish(tarball, s3, profile("bucket"), "s3://nowhere/")


# --- fetching ---------------------------------------------------------------------------------


@dataclass
class Server:
    """Serves one file, whatever query is asked for it, and keeps what was asked."""

    url: str
    asked: list[str]


@pytest.fixture
def served(checkout: Path, tmp_path: Path) -> Iterator[Server]:
    body = collection.build(checkout, tmp_path / "cache").read_bytes()
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield Server(f"http://127.0.0.1:{server.server_port}", asked)
        server.shutdown()


def test_ansible_galaxy_installs_from_a_presigned_url(
    served: Server, s3: Any, tarball: Path, tmp_path: Path
):
    """Signatures are longer than file names may be, which is what ansible-galaxy would make."""
    made = collection.publish(tarball, s3, profile("bucket"), "s3://models/")
    signed = urlparse(made.secrets["collection_url"].reveal())
    token = "x" * 900  # temporary keys add a session token
    url = f"{served.url}{signed.path}?{signed.query}&X-Amz-Security-Token={token}#{signed.fragment}"
    requirements = tmp_path / "requirements.yml"
    requirements.write_text(f"{{collections: [{{name: '{url}'}}]}}\n")
    command = [Path(sys.executable).parent / "ansible-galaxy", "collection", "install", "-c"]
    environment = {
        **{k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")},
        "ANSIBLE_HOME": str(tmp_path / "home"),
        "ANSIBLE_CONFIG": str(tmp_path / "checkout/ansible.cfg"),
    }
    done = subprocess.run(
        [*command, "-r", requirements, "-p", tmp_path / "installed"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "installed/ansible_collections/mayfly/training/MANIFEST.json").exists()
    assert len(served.asked[0]) > 900
    assert "#" not in served.asked[0]
