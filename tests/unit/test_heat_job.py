from __future__ import annotations

from ipaddress import IPv4Network
from typing import Any

import pytest

from mayfly.errors import UserError
from mayfly.heat import subnet
from mayfly.heat.job import job_file_values, make_job
from mayfly.heat.template import build, dump, notices

BASE = {"repository": "https://example.org/team/repo.git", "entrypoint": "train.py"}


def job(**values: Any):
    return make_job({**BASE, **values})


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"repository": "git@example.org:team/repo.git"}, "ssh needs a key"),
        ({"repository": "ssh://example.org/repo.git"}, "ssh needs a key"),
        ({"repository": "http://example.org/repo.git"}, "https://"),
        ({"repository": "https://example.org"}, "https://"),
        ({"repository": "https://example.org/a b.git"}, "%20"),
        ({"repository": "https://example.org/a\nb.git"}, "blanks"),
        ({"ref": "--upload-pack=evil"}, "branch"),
        ({"ref": "a b"}, "branch"),
        ({"directory": "../outside"}, "without .."),
        ({"directory": "/absolute"}, "inside the repository"),
        ({"directory": "-x"}, "inside the repository"),
        ({"directory": ""}, "directory of requirements.txt"),
        ({"directory": "a\nb"}, "control character"),
        ({"entrypoint": "train"}, ".py"),
        ({"entrypoint": "../train.py"}, "without .."),
        ({"entrypoint": "a\tb.py"}, "control character"),
        ({"arguments": "--x 'open"}, "quote"),
        ({"arguments": "a\nb"}, "one line"),
        ({"accelerator": "gpus"}, "did you mean 'gpu'"),
        ({"accelerator": "quantum"}, "auto, cpu, gpu"),
        ({"launcher": "mpirun"}, "torchrun"),
        ({"processes": 0}, "processes"),
        ({"workers": -1}, "0 to 250 workers"),
        ({"workers": 251}, "0 to 250 workers"),
        ({"workers": 3, "cidr": "10.0.0.0/29"}, "0 to 2 workers"),
        ({"cidr": "10.0.0.0/30"}, "too small"),
        ({"cidr": "10.0.0.1/24"}, "IPv4 network"),
        ({"cidr": "everything"}, "IPv4 network"),
        ({"main_address": "10.0.0.5"}, "not in the subnet 192.168.100.0/24"),
        ({"main_address": "192.168.100.1"}, "gateway"),
        ({"main_address": "192.168.100.255"}, "broadcast"),
        ({"main_address": "here"}, "not an IPv4 address"),
        ({"dns": ["resolver"]}, "IP address"),
        ({"max_duration": "soon"}, "duration"),
        ({"max_duration": "5s"}, "a minute or more"),
        ({"s3_endpoint": "https://objects.example.org"}, "without results"),
        ({"results": "my-bucket", "s3_endpoint": "objects"}, "S3 service"),
        ({"results": "gs://bucket/"}, "s3://"),
        ({"image": "two\nlines"}, "openstack"),
    ],
)
def test_what_is_wrong_is_said_in_one_line_with_what_to_do(values, says):
    with pytest.raises(UserError) as error:
        job(**values)
    assert says in str(error.value)
    assert "\n" not in str(error.value)
    assert error.value.exit_code == 2


def test_credentials_in_a_url_are_refused_and_not_repeated():
    with pytest.raises(UserError) as error:
        job(repository="https://me:hunter2@example.org/repo.git")
    assert "credentials" in str(error.value)
    assert "hunter2" not in str(error.value)


@pytest.mark.parametrize("missing", ["repository", "entrypoint"])
def test_what_has_no_default_is_named_by_its_flag(missing):
    with pytest.raises(UserError, match={"repository": "--repo", "entrypoint": "--entry"}[missing]):
        make_job({key: value for key, value in BASE.items() if key != missing})


def test_every_printable_path_is_taken():
    wanted = 'it\'s $HOME "quoted" é'
    assert job(directory=wanted).directory == wanted


def test_the_main_node_has_the_last_address():
    assert job().main_address == "192.168.100.254"
    assert job(cidr="10.1.0.0/16").main_address == "10.1.255.254"


def test_the_largest_number_of_workers_leaves_room_for_all_others():
    network = IPv4Network("192.168.100.0/24")
    most = subnet.max_workers(network)
    gateway, main, dhcp = 1, 1, subnet.DHCP_PORTS
    assert most + gateway + main + dhcp == len(list(network.hosts()))
    assert job(workers=most).workers == most


def test_a_full_subnet_fits_into_heats_default_limits():
    wanted = job(workers=250, results="my-bucket")
    assert notices(wanted, dump(build(wanted))) == []


def test_what_passes_heats_default_limits_is_told():
    wanted = job(workers=600, cidr="10.0.0.0/16")
    found = notices(wanted, dump(build(wanted)))
    assert "resources" in found[0]
    assert "bytes" in found[1]


@pytest.mark.parametrize(("duration", "waits"), [("50m", "trained"), ("51m", "started")])
def test_what_the_stack_waits_for_depends_on_the_time(duration, waits):
    wanted = job(max_duration=duration)
    assert wanted.waits_for == waits
    conditions = [
        r for r in build(wanted)["resources"].values() if r["type"] == "OS::Heat::WaitCondition"
    ]
    assert all(c["properties"]["timeout"] <= 3600 for c in conditions)
    assert f"main_{waits}" in build(wanted)["resources"]


def job_file(tmp_path, trainer: str) -> Any:
    path = tmp_path / "job.yml"
    path.write_text(f"name: digits\nnodes: {{worker: {{count: 3}}}}\ntrainer:\n{trainer}")
    return path


def test_a_job_file_gives_what_heat_needs(tmp_path):
    file = job_file(
        tmp_path,
        "  engine: torch\n"
        "  program: git+https://example.org/team/repo.git@v1.2\n"
        "  directory: code\n"
        "  entrypoint: train.py\n"
        '  args: {hidden_size: 32, title: "it\'s", verbose: true, quiet: false, layer: [1, 2]}\n',
    )
    wanted = make_job(job_file_values(file, {}))
    assert (wanted.repository, wanted.ref) == ("https://example.org/team/repo.git", "v1.2")
    assert (wanted.directory, wanted.entrypoint) == ("code", "train.py")
    assert wanted.workers == 2, "the main node is the job's chief"
    words = """--hidden-size 32 --title 'it'"'"'s' --verbose --layer 1 --layer 2"""
    assert wanted.arguments == words


@pytest.mark.parametrize(
    ("trainer", "says"),
    [
        ("  engine: torch\n  program: builtin:mnist_lightning\n", "Git repository"),
        (
            "  engine: estimator\n  program: git+https://h/x.git\n  entrypoint: t.py\n",
            "engine: torch",
        ),
        ("  engine: command\n  command: ls\n  program: git+https://h/x.git\n", "engine: torch"),
        (
            "  engine: torch\n  program: git+https://h/x.git\n  entrypoint: t.py\n"
            "  environment: {LEVEL: 1}\n",
            "has LEVEL, which Heat's nodes do not get",
        ),
    ],
)
def test_a_job_that_heat_cannot_run_is_refused(tmp_path, trainer, says):
    with pytest.raises(UserError, match=says):
        job_file_values(job_file(tmp_path, trainer), {})
