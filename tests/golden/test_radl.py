"""Specs to RADL: the text as recorded, and accepted by those who will read it.

Record again with `make goldens` (MAYFLY_UPDATE_GOLDENS=1), and read the difference.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from radl.radl_parse import parse_radl

from mayfly import inputs
from mayfly.clouds import ImageRule, load_job
from mayfly.collection import SIGNED
from mayfly.images import resolve
from mayfly.local import imservice
from mayfly.local.paths import find_paths
from mayfly.places import find_place
from mayfly.radl_lint import lint
from mayfly.radl_render import render
from mayfly.run import Run
from mayfly.spec import load_spec
from mayfly.steps import load_stages

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BIN = Path(sys.executable).parent
SECRETS = dict.fromkeys(("s3_access_key_id", "s3_secret_access_key"), "never/in+a=file")
SECRETS["store_password"] = "0123456789abcdef"
# With temporary keys; longer than a file's name may be.
SECRETS["collection_url"] = (
    "https://my-models.s3.eu-west-1.amazonaws.com/team/collection/0123/mayfly-training-0.1.0.tar.gz"
    "?X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential=AKIAX%2F20261128%2Feu-west-1%2Fs3%2Faws4_request"
    f"&X-Amz-Expires=604800&X-Amz-SignedHeaders=host&X-Amz-Security-Token={'IQo%2B%2F%3D' * 90}"
    f"&X-Amz-Signature={'0a1b' * 16}#/mayfly-training-0.1.0.tar.gz"
)

TARBALL = "http://172.30.0.1:8333/mayfly-public/0123456789abcdef/mayfly-training-0.1.0.tar.gz"
LOCAL_RUN = {
    "image": "docker://mayfly-node:0123456789ab",
    "collection": TARBALL,
    "s3_endpoint": "http://172.30.0.1:8333",
    "s3_region": "us-east-1",
}
# What runs on rented nodes have in common; their image is what a lookup would find.
RENTED_RUN = {"collection": SIGNED, "s3_endpoint": None, "s3_region": "eu-west-1"}
FOUND = {"ec2": "ami-0123456789abcdef0", "openstack": "0f3c2b1a-1111-2222-3333-444455556666"}
PLACES = {
    "OS_AUTH_URL": "https://keystone.example.org:5000/v3",
    "EGI_SITE": "CESGA",
    "EGI_VO": "vo.access.egi.eu",
    "ONE_XMLRPC": "http://frontend.example.org:2633/RPC2",
}


@dataclass(frozen=True)
class FakeFinder:
    """A provider's listing that always has the image."""

    image: str

    def find_image(self, rule: ImageRule) -> str:
        return self.image

    def check_image(self, image: str) -> str:
        return image


@dataclass(frozen=True)
class Case:
    """A job and a run, and the file that holds their RADL."""

    name: str
    overrides: dict[str, Any] = field(default_factory=dict)
    run: dict[str, Any] = field(default_factory=dict)
    cloud: str = "local"

    @property
    def golden(self) -> Path:
        return HERE / "radl" / f"{self.name}.radl"

    def render(self) -> str:
        bucket = {} if self.cloud == "local" else {"bucket": "s3://my-models/team/"}
        given = {"cloud": self.cloud, **bucket, **self.overrides}
        spec, profile = load_job(None, given, {})
        place = find_place(spec, profile, PLACES)
        common = LOCAL_RUN if self.cloud == "local" else RENTED_RUN
        if profile.image is not None:
            finder = FakeFinder(FOUND.get(profile.image.lookup or "", ""))
            common = {**common, "image": resolve(spec, profile, place, finder)}
        values = {**common, "region": place.region, **self.run}
        run = Run(id=f"{spec.name}-261128-010203-0a1b", **values)
        return render(spec, profile, run, load_stages())


CASES = [
    Case("local"),
    Case("local_torch", {"engine": "torch"}),
    Case(
        "local_preprocess",
        {
            "engine": "horovod",
            "workers": 3,
            "data.preprocess.to": "tensors",
            "data.preprocess.mean": 0.1307,
            "data.preprocess.std": 0.3081,
        },
    ),
    Case("local_tf_server", {"engine": "tf-server"}),
    Case("local_juicefs", {"engine": "keras-ps", "store": "juicefs"}),
    Case(
        "local_command",
        {
            "engine": "command",
            "trainer.command": "set -u\necho \"it's $RANK\"  # é\n\n./train --out 'a b'\n",
        },
    ),
    Case("local_sync_two_ps", {"ps": 2, "workers": 3, "mode": "sync", "name": "two-ps"}),
    Case(
        "local_git_program",
        {
            "name": "own-program",
            "trainer.program": "git+https://example.org/team/repo.git@v1.2",
            "trainer.directory": "code",
            "trainer.entrypoint": "train.py",
            "trainer.args": {
                "batch_size": 32,
                "learning_rate": 0.05,
                "layers": [64, 64],
                "augment": True,
                "title": 'it\'s: "quoted" #1, é — @end',
            },
            "data.source": "s3://other-data/faces/",
            "limits.max_duration": "90m",
            "tensorboard": False,
        },
        {"session_token": True},
    ),
    Case("aws", cloud="aws"),
    Case(
        "aws_gpu_spot",
        {
            "region": "eu-west-1",
            "zone": "eu-west-1b",
            "nodes.ps.instance": "c6i.xlarge",
            "nodes.worker.gpu": 1,
            "nodes.worker.spot": True,
            "store": "juicefs",
        },
        cloud="aws",
    ),
    Case("aws_budget", run={"train_s": 2400, "end_s": 3000}, cloud="aws"),
    Case("gcp", cloud="gcp"),
    Case("azure", cloud="azure"),
    Case("openstack", cloud="openstack"),
    Case(
        "openstack_choices",
        {
            "nodes.ps.instance": "m1.large",
            "nodes.worker.gpu": 2,
            "network.public": "ext-net",
            "network.private": "project-net",
            "image": "CC-Ubuntu22.04",
            "image_user": "cc",
        },
        cloud="openstack",
    ),
    Case("egi", cloud="egi"),
    Case("opennebula", cloud="opennebula"),
]
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@every_case
def test_the_text_is_the_recorded_one(case: Case):
    text = case.render()
    if os.environ.get("MAYFLY_UPDATE_GOLDENS"):
        case.golden.write_text(text, encoding="utf-8")
    assert text == case.golden.read_text(encoding="utf-8"), "run make goldens, read the difference"


def test_every_recorded_file_has_its_case():
    assert {path.stem for path in (HERE / "radl").iterdir()} == {case.name for case in CASES}


@every_case
def test_the_real_parser_takes_it(case: Case):
    radl = parse_radl(case.render())
    assert radl.check()
    spec = load_spec(None, {"cloud": case.cloud, **case.overrides}, {})
    counts = {group: spec.count(group) for group in ("ps", "worker") if spec.count(group)}
    assert {d.id: d.vm_number for d in radl.deploys} == counts
    steps = {item.configure: item.num for item in radl.contextualize.items.values()}
    assert {steps[f"hdfs_{group}"] for group in counts} == {1}
    assert {steps[f"train_{group}"] for group in counts} == {len(load_stages())}


@every_case
def test_it_survives_the_upstream_client(case: Case):
    """The client sends what its parser prints, not the file; secrets land in their place."""
    filled = inputs.fill(case.render(), {**SECRETS, "s3_session_token": "to/ken=="})
    sent = str(parse_radl(filled))
    assert lint(sent) == []
    before, after = parse_radl(filled), parse_radl(sent)
    assert recipes(before) == recipes(after)
    (worker,) = recipes(after)["dataset_worker"]
    assert worker["vars"]["dataset_s3_secret_access_key"] == "never/in+a=file"


@every_case
def test_only_ssh_is_public(case: Case):
    radl = parse_radl(case.render())
    ports = {net.id: net.getOutPorts() for net in radl.networks}
    assert ports["private"] is None
    assert [(p.get_remote_port(), p.get_protocol()) for p in ports["public"]] == [(22, "tcp")]


@every_case
def test_secrets_are_placeholders(case: Case):
    text = case.render()
    roles = [] if case.cloud == "local" else ["collection_url"]
    expected = [*roles, "s3_access_key_id", "s3_secret_access_key"]
    token = ["s3_session_token"] if case.run.get("session_token") else []
    password = ["store_password"] if case.overrides.get("store") == "juicefs" else []
    assert inputs.names(text) == expected + token + password
    for name in inputs.names(text):
        assert inputs.placeholder(name) not in text.partition("network public")[0]


@every_case
def test_the_text_is_ascii_for_every_clients_transport(case: Case):
    assert case.render().isascii()


@every_case
def test_ansible_takes_every_block_as_im_runs_it(case: Case, tmp_path: Path):
    playbook = tmp_path / "all_blocks.yml"
    blocks = recipes(parse_radl(case.render())).values()
    plays = [play for block in blocks for play in with_im_header(block)]
    playbook.write_text(yaml.safe_dump(plays), encoding="utf-8")
    command = [BIN / "ansible-playbook", "--syntax-check", "-e", "IM_HOST=localhost", playbook]
    environment = {
        **os.environ,
        "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
        "ANSIBLE_COLLECTIONS_PATH": str(ROOT / ".ansible/collections"),
        "ANSIBLE_HOME": str(tmp_path / "home"),
    }
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr


def test_the_header_names_the_inputs_in_the_order_in_which_the_client_asks():
    header = next(case for case in CASES if case.name == "aws").render().partition("network")[0]
    assert "inputs collection_url and s3_access_key_id and s3_secret_access_key on" in header


@pytest.fixture(scope="module")
def im_python() -> Path:
    """The Python of IM's own environment, which CLOUD=local needs anyway and keeps in the cache."""
    environment = imservice.install(find_paths(os.environ), print)
    return environment / "bin/python"


@every_case
def test_im_merges_every_block_as_we_think(case: Case, im_python: Path):
    """By IM's own merge_recipes."""
    radl = parse_radl(case.render())
    played = recipes(radl)
    texts = {c.name: c.recipes for c in radl.configures if c.name in played}
    program = (
        "import json, sys; from IM.ansible_utils import merge_recipes; "
        "header, texts = json.load(sys.stdin); "
        "print(json.dumps({k: merge_recipes(header, v) for k, v in texts.items()}))"
    )
    done = subprocess.run(
        [im_python, "-c", program],
        input=json.dumps([yaml.safe_dump([IM_HEADER]), texts]),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    merged = {name: yaml.safe_load(text) for name, text in json.loads(done.stdout).items()}
    assert merged == {name: with_im_header(plays) for name, plays in played.items()}


def test_im_gives_nodes_a_timer_at_their_first_boot(im_python: Path):
    """By IM's own function, for the system that a connector is asked to launch."""
    program = (
        "import json, sys; from radl.radl_parse import parse_radl; "
        "from IM.connectors.CloudConnector import CloudConnector as C; "
        "found = {}\n"
        "for name, text in json.load(sys.stdin).items():\n"
        "    radl = parse_radl(text)\n"
        "    for system in list(radl.systems):\n"
        "        one = radl.clone()\n"
        "        one.systems = [s for s in one.systems if s.name == system.name]\n"
        "        made = C(None, None).get_cloud_init_data(one, None, 'ssh-rsa KEY', 'admin')\n"
        "        found[f'{name} {system.name}'] = made\n"
        "print(json.dumps(found))"
    )
    done = subprocess.run(
        [im_python, "-c", program],
        input=json.dumps({c.name: c.render() for c in CASES if "_" not in c.name}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    timer = "systemd-run --unit=mayfly-boot-deadman --on-active=3600 --timer-property"
    for cloud in ("aws", "azure", "openstack", "egi"):
        for group in ("ps", "worker"):
            made = found[f"{cloud} {group}"]
            assert made.startswith("#cloud-config\n")
            content = yaml.safe_load(made)
            ((shell, option, command),) = content["bootcmd"]
            assert (shell, option, timer in command) == ("sh", "-c", True)
            assert content["users"][0]["ssh-authorized-keys"] == ["ssh-rsa KEY"]
    assert found["gcp worker"].startswith("#!/bin/sh\ntest -e ") and timer in found["gcp worker"]
    for cloud in ("local", "opennebula"):
        assert timer not in (found[f"{cloud} worker"] or "")


def test_a_signed_url_reaches_ansible_galaxy_whole(im_python: Path, tmp_path: Path):
    """By IM's own functions, and with its tasks run by its own Ansible."""
    case = next(case for case in CASES if case.name == "aws")
    program = (
        "import logging, pathlib, sys, yaml; from radl.radl_parse import parse_radl\n"
        "from IM.ConfManager import ConfManager as M\n"
        "from IM.CtxtAgentBase import CtxtAgentBase as A\n"
        "roles, (name,) = M.get_ansible_roles_and_collections(None, parse_radl(sys.stdin.read()))\n"
        # As ConfManager.configure_ansible writes it.
        "gone = {'name': f'Delete the {name} collection', 'file': 'state=absent path='\n"
        "        + A.ANSIBLE_DIR + '/ansible_collections/' + name.replace('.', '/')}\n"
        "play = {'hosts': 'localhost', 'connection': 'local', 'gather_facts': False}\n"
        "book = pathlib.Path('book.yml')\n"
        "book.write_text(yaml.safe_dump([{**play, 'tasks': [gone]}]))\n"
        "agent = A.__new__(A); agent.logger = logging.getLogger()\n"
        "made = agent.install_ansible_roles({'ansible_collections': [name]}, str(book.resolve()))\n"
        "(played,) = yaml.safe_load(pathlib.Path(made).read_text())\n"
        "gone, copy, install = played['tasks']\n"
        "copy['copy'] = copy['copy'].replace(install['command'].split()[-1], 'requirements.yml')\n"
        "played['tasks'] = [gone, copy]; book.write_text(yaml.safe_dump([played]))\n"
    )
    where = {"cwd": tmp_path, "capture_output": True, "text": True, "check": False}
    radl = inputs.fill(case.render(), SECRETS)
    done = subprocess.run([im_python, "-c", program], input=radl, **where)
    assert done.returncode == 0, done.stderr
    (tmp_path / "ansible.cfg").touch()
    environment = {
        **os.environ,
        "PATH": f"{im_python.parent}:{os.environ['PATH']}",
        "ANSIBLE_CONFIG": str(tmp_path / "ansible.cfg"),
        "ANSIBLE_HOME": str(tmp_path / "home"),
    }
    words = ["-i", "localhost,", "-e", f"ansible_python_interpreter={im_python}", "book.yml"]
    play = [im_python.parent / "ansible-playbook", *words]
    done = subprocess.run(play, env=environment, **where)
    assert done.returncode == 0, done.stdout
    requirements = yaml.safe_load((tmp_path / "requirements.yml").read_text())
    assert requirements == {"collections": [{"name": SECRETS["collection_url"]}]}


def test_our_im_logs_no_signature(im_python: Path):
    """IM names a task after the URL, and logs at level INFO what Ansible has printed."""
    connectors = ROOT / "scripts/im_connectors"
    program = (
        "import logging, sys; sys.path.insert(0, sys.argv[1]); import im_local_service\n"
        "logging.basicConfig(stream=sys.stdout); im_local_service.mask_signatures()\n"
        "logging.getLogger('ConfManager').warning('TASK [Delete the %s collection]', sys.argv[2])\n"
    )
    command = [im_python, "-c", program, connectors, SECRETS["collection_url"]]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "mayfly-training-0.1.0.tar.gz?X-Amz-" in done.stdout
    assert "0a1b0a1b" not in done.stdout and "IQo" not in done.stdout


IMAGES = {
    "aws": ["eu-west-1", "ami-0123456789abcdef0"],
    "gcp": [
        "us-central1-a",
        "https://www.googleapis.com/compute/v1/projects/debian-cloud/global/images/family/debian-12",
    ],
    "openstack": [FOUND["openstack"]],
}


def test_ims_connectors_read_images_and_sizes_as_we_think(im_python: Path):
    """By the connectors' own functions, which ask nobody."""
    cases = [case for case in CASES if case.name in ("aws_gpu_spot", "gcp", "openstack")]
    program = (
        "import json, sys; from radl.radl_parse import parse_radl; "
        "from IM.connectors.EC2 import EC2CloudConnector as E; "
        "from IM.connectors.GCE import GCECloudConnector as G; "
        "from IM.connectors.OpenStack import OpenStackCloudConnector as O; "
        "read = {'aws': E.getAMIData, 'gcp': lambda u: G.get_image_data(None, u), "
        "'openstack': lambda u: [O.get_image_id(u)]}; found = {}\n"
        "for cloud, text in json.load(sys.stdin).items():\n"
        "    worker = parse_radl(text).get_system_by_name('worker')\n"
        "    cpu, _, memory, _, disk, _ = E.get_instance_selectors(worker, disk_unit='G')\n"
        "    image = read[cloud](worker.getValue('disk.0.image.url'))\n"
        "    tags = E.get_instance_tags(worker)\n"
        "    found[cloud] = [list(image), cpu, memory, disk, tags]\n"
        "print(json.dumps(found))"
    )
    done = subprocess.run(
        [im_python, "-c", program],
        input=json.dumps({case.cloud: case.render() for case in cases}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert {cloud: values[0] for cloud, values in found.items()} == IMAGES
    # With a type, IM asks for nothing else; without one, for at least this much (MB, GB).
    assert found["aws"][1:4] == [1, 0, 0]
    assert found["openstack"][1:4] == [4, 8192, 20]
    assert all("mayfly-run" in values[4] for values in found.values())


# --- helpers ----------------------------------------------------------------------------------

# What IM 2.0.0 puts before each block (ConfManager.add_ansible_header).
IM_HEADER = {"hosts": "{{IM_HOST}}", "gather_facts": False, "become": True}


def with_im_header(plays: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The plays as IM runs them: it makes lists of keys that both sides have, so none may be."""
    assert not any(set(play) & set(IM_HEADER) for play in plays)
    return [{**IM_HEADER, **play} for play in plays]


def recipes(radl: Any) -> dict[str, list[dict[str, Any]]]:
    """The plays of each configure block that Ansible gets."""
    played = {c.configure for c in radl.contextualize.items.values() if not c.ctxt_tool}
    return {c.name: yaml.safe_load(c.recipes) for c in radl.configures if c.name in played}
