"""The node image: Debian as IM expects a node, and a cache of what the roles would download.

It is made in layers, each named by a hash of what it is made of and kept in the cache directory, so
that a fresh clone loads it and a changed requirement repeats only what depends on it:

    root file system (debootstrap, or a registry's image) → base (packages, Ansible) → node
                                 Hadoop set, wheels of each requirements file ↗
                                 Horovod's wheel, compiled with these wheels ↗

In a node, the wheels of TensorFlow are installed already, each list in an environment of its own,
which role `runtime` takes when a job wants the same list.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import yaml

from mayfly.errors import MayflyError, RemoteError, UserError
from mayfly.local import host
from mayfly.local.docker import OURS, Docker
from mayfly.local.host import Progress
from mayfly.local.mirrors import find_mirrors
from mayfly.local.paths import Paths
from mayfly.local.pipsettings import PipSettings, find_pip_settings

NODE = Path(__file__).with_name("node")
SUITE = "bookworm"
PIP = "/var/tmp/.mamba/envs/ansible/bin/pip"
HADOOP_SCRIPT = Path("roles/hadoop/files/assemble_hdfs.py")
HOROVOD_SCRIPT = Path("roles/horovod/files/build_wheel.py")
INSTALLER = Path("roles/runtime/files/install_packages.py")
FRAMEWORK_REQUIREMENTS = "roles/runtime/files/requirements-{}-cpu.txt"
FRAMEWORKS = Path("roles/runtime/vars/main.yml")
# What only some jobs need, and costs minutes: their jobs ask for it, MAYFLY_IMAGE_EXTRAS may, too.
EXTRAS = ("tensorflow2", "horovod-tensorflow", "horovod-torch", "juicefs")
EXTRAS_VARIABLE = "MAYFLY_IMAGE_EXTRAS"
KEEP_SECONDS = 30 * 24 * 3600
REQUIREMENTS = tuple(
    f"roles/{role}/files/requirements*.txt" for role in ("agent", "horovod", "juicefs", "runtime")
)
REPOSITORIES = ("mayfly-node:", "mayfly-base:", "mayfly-debian:")
NOT_IN_BASE = ("assemble.sh", "horovod.sh", "runtimes.sh", "requirements-tools.txt")
GPU = "gpu"  # in a requirements file's name: several GB that no node of this machine would use
# torch's CPU builds are on an index of their own; the general one has CUDA's (several GB).
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"


@dataclass(frozen=True)
class Recipe:
    """Everything that a node image is made of, as text; its hashes name the image's layers."""

    base_files: Mapping[str, str]  # what is put beside setup.sh
    source: str  # a registry's image, or where debootstrap gets its packages
    base_dockerfile: str
    node_dockerfile: str
    hadoop: Mapping[str, str]  # the scripts that assemble the HDFS-only set; empty: no such set
    requirements: tuple[str, ...]  # the text of each file
    runtimes: Mapping[str, str]  # what makes the environments: lists, proofs, scripts
    horovod: Mapping[str, str]  # a framework that Horovod is compiled for → its requirements' text
    horovod_files: Mapping[str, str]  # the scripts that compile it
    torch_index: str = TORCH_INDEX  # unless this machine has the wheel

    @property
    def base(self) -> str:
        return digest(self.base_files, self.source, self.base_dockerfile)

    @property
    def base_tag(self) -> str:
        return f"mayfly-base:{self.base}"

    @property
    def hadoop_hash(self) -> str:
        return digest(self.source, self.hadoop)

    def wheels_hash(self, requirements: str) -> str:
        return digest(self.source, requirements)

    def horovod_hash(self, framework: str) -> str:
        return digest(self.source, self.horovod_files, self.horovod[framework])

    @property
    def tag(self) -> str:
        horovod = [self.horovod_hash(framework) for framework in self.horovod]
        installed = (self.hadoop, self.requirements, self.runtimes, horovod)
        return f"mayfly-node:{digest(self.base, self.node_dockerfile, *installed)}"


def digest(*parts: object) -> str:
    """Twelve hex digits of a hash over strings, sequences and mappings of them."""
    text = json.dumps([_plain(part) for part in parts], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def read_recipe(
    checkout: Path, pip: PipSettings, environ: Mapping[str, str] = os.environ
) -> Recipe:
    """The recipe that this checkout, this machine and the settings ask for."""
    registry_image = environ.get("MAYFLY_BASE_IMAGE", "")
    files = {path.name: path.read_text() for path in NODE.iterdir() if _is_base_file(path)}
    files["pip.conf"] = pip.node_config()
    source = registry_image
    if environ.get("MAYFLY_DEBIAN_MIRROR") or not registry_image:
        mirror, security = find_mirrors(environ)
        files["sources.list"] = sources_list(mirror, security)
        source = registry_image or f"debootstrap {SUITE} {mirror}"
    for number, certificate in enumerate(pip.certificates):
        files[f"certificates/mayfly-{number:02}.crt"] = certificate + "\n"
    script = checkout / HADOOP_SCRIPT
    hadoop = [NODE / "assemble.sh", script] if script.exists() else []
    wanted = extras(environ)
    horovod = {
        framework: (checkout / FRAMEWORK_REQUIREMENTS.format(framework)).read_text()
        for framework in ("tensorflow", "torch")
        if f"horovod-{framework}" in wanted
    }
    horovod_files = [NODE / "horovod.sh", checkout / HOROVOD_SCRIPT, checkout / INSTALLER]
    return Recipe(
        base_files=files,
        source=source,
        base_dockerfile=(NODE / "base.Dockerfile").read_text(),
        node_dockerfile=node_dockerfile(wanted),
        hadoop={path.name: path.read_text() for path in hadoop},
        requirements=tuple(requirement_texts(checkout, wanted)),
        runtimes=runtime_files(checkout, wanted),
        horovod=horovod,
        horovod_files={path.name: path.read_text() for path in horovod_files if horovod},
        torch_index=environ.get("MAYFLY_TORCH_INDEX") or TORCH_INDEX,
    )


def node_dockerfile(wanted: Collection[str]) -> str:
    """The text that makes a node of the base image; some extras bring lines of their own."""
    own = [NODE / f"{extra}.Dockerfile" for extra in wanted]
    paths = [NODE / "node.Dockerfile", *(path for path in own if path.exists())]
    return "".join(path.read_text() for path in paths)


def requirement_texts(checkout: Path, wanted: Collection[str] = ()) -> list[str]:
    """The requirements files of the roles, without unwanted extras, and our own for tools."""
    left_out = [GPU, *(extra for extra in EXTRAS if extra not in wanted)]
    paths = [NODE / "requirements-tools.txt"]
    for pattern in REQUIREMENTS:
        paths += sorted(checkout.glob(pattern))
    return [path.read_text() for path in paths if not any(part in path.name for part in left_out)]


def runtime_files(checkout: Path, wanted: Collection[str] = ()) -> dict[str, str]:
    """What makes the environments of TensorFlow that a node finds, as file names and texts.

    Each list of packages has the role's own proof beside it, whose imports leave their bytecode.
    """
    frameworks = ["tensorflow", *({"tensorflow2"} & set(wanted))]
    known = yaml.safe_load((checkout / FRAMEWORKS).read_text())["__runtime_frameworks"]
    scripts = (NODE / "runtimes.sh", checkout / INSTALLER)
    files = {path.name: path.read_text() for path in scripts}
    for name in frameworks:
        files[f"{name}.txt"] = (checkout / FRAMEWORK_REQUIREMENTS.format(name)).read_text()
        files[f"{name}.proof.py"] = known[name]["proof"]
    return files


def without_dependencies(requirements: str) -> list[str]:
    """Packages that a list names in a comment of this form, as role runtime's installer reads it.

    What they say that they need is met otherwise.
    """
    return re.findall(r"^# without dependencies: (\S+)$", requirements, re.MULTILINE)


def extras(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The extras that MAYFLY_IMAGE_EXTRAS names. Raises UserError for one that is unknown."""
    words = [word.strip() for word in environ.get(EXTRAS_VARIABLE, "").split(",")]
    unknown = sorted(set(words) - {*EXTRAS, ""})
    if unknown:
        raise UserError(
            f"unknown part of a node image in {EXTRAS_VARIABLE}: {unknown[0]!r}",
            f"known: {', '.join(EXTRAS)}; several with commas",
        )
    return tuple(name for name in EXTRAS if name in words)


def with_extras(environ: Mapping[str, str], more: Collection[str]) -> dict[str, str]:
    """The environment with further extras asked for."""
    wanted = {*extras(environ), *more}
    return {**environ, EXTRAS_VARIABLE: ",".join(name for name in EXTRAS if name in wanted)}


def torch_wheels(find_links: Sequence[str]) -> list[Path]:
    """CPU builds of torch in this machine's directories of wheels (pip's setting find-links)."""
    directories = [Path(link.removeprefix("file://")) for link in find_links]
    return [wheel for path in directories for wheel in sorted(path.glob("torch-*cpu*.whl"))]


def sources_list(mirror: str, security: str) -> str:
    """The text of a node's /etc/apt/sources.list."""
    return (
        f"deb {mirror} {SUITE} main\n"
        f"deb {mirror} {SUITE}-updates main\n"
        f"deb {security} {SUITE}-security main\n"
    )


def up(
    paths: Paths, docker: Docker, progress: Progress, environ: Mapping[str, str] = os.environ
) -> tuple[str, bool]:
    """Return the tag of the node image for this checkout, and whether it was there already."""
    pip = find_pip_settings()
    recipe = read_recipe(paths.checkout, pip, environ)
    if docker.has_image(recipe.tag):
        return recipe.tag, True
    with paths.locked("image"):  # a second one finds the layers that the first has made
        Builder(paths, docker, recipe, pip, progress).build()
    return recipe.tag, False


def remove(docker: Docker) -> list[str]:
    """Remove our images from an engine; one that somebody's container uses stays."""
    tags = docker.lines("images", "--format", "{{.Repository}}:{{.Tag}}")
    removed = []
    for tag in (tag for tag in tags if tag.startswith(REPOSITORIES)):
        with contextlib.suppress(RemoteError):
            docker("rmi", tag)
            removed.append(f"image {tag}")
    return removed


@dataclass(frozen=True)
class Builder:
    """Makes the layers of a recipe that are missing."""

    paths: Paths
    docker: Docker
    recipe: Recipe
    pip: PipSettings
    progress: Progress

    def build(self) -> None:
        """Make the image `recipe.tag`, and leave its layers in the cache."""
        if not self.docker.has_image(self.recipe.base_tag):
            self._base()
        with ThreadPoolExecutor() as pool:
            saved = pool.submit(self._save_base)
            hadoop = pool.submit(self._hadoop)
            wheels = [pool.submit(self._wheels, text) for text in self.recipe.requirements]
            for part in wheels:
                part.result()
            for framework in self.recipe.horovod:  # one at a time: each takes all cores
                self._horovod(framework)
            hadoop.result()
            self._node()
            saved.result()
        self._prune()

    def _node(self) -> None:
        """Add to the base image what the cache has for nodes."""
        with self._workspace() as context:
            (context / "wheels").mkdir()
            (context / "hadoop").mkdir()
            (context / "horovod").mkdir()
            if self.recipe.hadoop:
                _link_tree(self._hadoop_made / "hadoop", context / "hadoop")
            for framework in self.recipe.horovod:
                _link_tree(self._horovod_made(framework), context / "horovod")
            for wheel in self._all_wheels():
                _link(wheel, context / "wheels" / wheel.name)
            _write_files(self.recipe.runtimes, context / "runtimes")
            self.progress("adding the Hadoop set, the wheels and TensorFlow to the node image")
            base = f"BASE={self.recipe.base_tag}"
            self._docker_build(context, "node", self.recipe.tag, base)

    @property
    def _base_saved(self) -> Path:
        return self.paths.cached("images") / f"mayfly-base-{self.recipe.base}.tar.gz"

    @property
    def _hadoop_made(self) -> Path:
        return self.paths.cached("hadoop") / self.recipe.hadoop_hash

    def _horovod_made(self, framework: str) -> Path:
        return self.paths.cached("horovod") / self.recipe.horovod_hash(framework)

    def _wheels_made(self, requirements: str) -> Path:
        return self.paths.cached("wheels") / self.recipe.wheels_hash(requirements)

    def _all_wheels(self) -> list[Path]:
        made = [self._wheels_made(text).glob("*.whl") for text in self.recipe.requirements]
        return list(itertools.chain(*made))

    def _base(self) -> None:
        """Load the base image from the cache, or make it."""
        if self._base_saved.exists():
            self.progress("loading the node image from the cache")
            self.docker("load", "-q", "-i", str(self._base_saved))
            return
        source = self._source()
        with self._workspace() as context:
            _write_files(self.recipe.base_files, context)
            self.progress("installing packages and Ansible in the node image (about 2 minutes)")
            argument = f"SOURCE={source}"
            self._docker_build(context, "base", self.recipe.base_tag, argument)

    def _save_base(self) -> None:
        if self._base_saved.exists():
            return
        self.progress("saving the node image in the cache")
        with _written(self._base_saved) as partial:
            save = self.docker.command("save", self.recipe.base_tag)
            _pipe(save, ["gzip", "-1"], partial)

    def _source(self) -> str:
        """The image that the base is made from: a registry's, or one of debootstrap's."""
        if not self.recipe.source.startswith("debootstrap "):
            if not self.docker.has_image(self.recipe.source):
                self.progress(f"pulling {self.recipe.source}")
                self.docker("pull", "-q", self.recipe.source)
            return self.recipe.source
        name = digest(self.recipe.source)
        saved = self.paths.cached("images") / f"debian-{name}.tar.gz"
        if not saved.exists():
            self._debootstrap(saved)
        tag = f"mayfly-debian:{name}"
        if not self.docker.has_image(tag):
            self.docker("import", str(saved), tag)
        return tag

    def _debootstrap(self, saved: Path) -> None:
        if os.geteuid() != 0:
            raise UserError(
                "making the node image from Debian packages needs root",
                "run as root, or set MAYFLY_BASE_IMAGE to a registry's Debian 12 image",
            )
        if not shutil.which("debootstrap"):
            host.install_packages(["debootstrap"], "making the node image", self.progress)
        self.progress(f"debootstrap of Debian {SUITE} (about 1 minute)")
        mirror = self.recipe.source.split()[2]
        with self._workspace() as root:
            host.run(["debootstrap", "--variant=minbase", SUITE, str(root), mirror])
            (root / "etc/apt/apt.conf.d/01mayfly").write_text('APT::Install-Recommends "false";\n')
            with _written(saved) as partial:
                skip = [
                    "--exclude=./var/cache/apt/archives/*.deb",
                    "--exclude=./proc/*",
                    "--exclude=./sys/*",
                ]
                _pipe(["tar", "-C", str(root), *skip, "-c", "."], ["gzip", "-1"], partial)

    def _hadoop(self) -> None:
        """Assemble the HDFS-only set in a node, unless the cache has it."""
        made = self._hadoop_made
        if made.exists() or not self.recipe.hadoop:
            return
        self.progress("assembling the HDFS-only set of Hadoop (about 1 minute)")
        with self._workspace() as context, _written(made) as partial:
            for name, text in self.recipe.hadoop.items():
                (context / name).write_text(text)
            partial.mkdir()
            self._in_base(context, partial, "sh", "/in/assemble.sh", f"/in/{HADOOP_SCRIPT.name}")

    def _wheels(self, requirements: str) -> None:
        """Collect the wheels of one requirements file for the nodes' Python, unless cached."""
        made = self._wheels_made(requirements)
        if made.exists():
            return
        names = [line.split("=")[0] for line in requirements.splitlines() if line[:1].isalpha()]
        self.progress(f"downloading wheels: {', '.join(names)[:60]} …")
        with self._workspace() as context, _written(made) as partial:
            (context / "requirements.txt").write_text(requirements)
            partial.mkdir()
            # The environment has no setuptools: a source distribution gets its own to build.
            options = ["-q", "--no-cache-dir", "--use-pep517", "-w", "/out"]
            options += self._torch_source(requirements, context)
            self._in_base(context, partial, PIP, "wheel", *options, "-r", "/in/requirements.txt")
            if alone := without_dependencies(requirements):
                self._in_base(context, partial, PIP, "wheel", *options, "--no-deps", *alone)

    def _horovod(self, framework: str) -> None:
        """Compile Horovod's wheel for one framework in a node, unless the cache has it.

        What compiles it stays in that container: nodes have no compiler.
        """
        made = self._horovod_made(framework)
        if made.exists():
            return
        self.progress(f"compiling Horovod for {framework} (5 to 10 minutes of one core)")
        with self._workspace() as context, _written(made) as partial:
            for name, text in self.recipe.horovod_files.items():
                (context / name).write_text(text)
            (context / "requirements.txt").write_text(self.recipe.horovod[framework])
            (context / "wheels").mkdir()
            for wheel in self._all_wheels():
                _link(wheel, context / "wheels" / wheel.name)
            partial.mkdir()
            try:
                self._in_base(context, partial, "sh", "/in/horovod.sh", framework)
            except RemoteError as error:
                hint = f"{error.hint}; role horovod compiles it on a node of any other cloud"
                raise RemoteError(error.message, hint) from error

    def _torch_source(self, requirements: str, context: Path) -> list[str]:
        """pip's options for a list that has torch: this machine's wheel, or the index for it."""
        if not re.search(r"^torch==", requirements, re.MULTILINE):
            return []
        wheels = torch_wheels(self.pip.find_links)
        for wheel in wheels:
            _link(wheel, context / wheel.name)
        return ["--find-links", "/in"] if wheels else ["--extra-index-url", self.recipe.torch_index]

    def _in_base(self, given: Path, result: Path, *command: str) -> None:
        """Run a command in a container of the base image: /in is what it reads, /out its result."""
        mounts = ("-v", f"{given}:/in:ro", "-v", f"{result}:/out")
        # The host's network: nothing listens, and any network of the engine may lack a way out.
        options = ("--rm", "--label", OURS, "--network", "host", *mounts)
        log = self.paths.of("image") / f"{result.name.strip('.')}.log"
        self.docker.logged(log, "run", *options, self.recipe.base_tag, *command)

    def _docker_build(self, context: Path, layer: str, tag: str, argument: str) -> None:
        texts = {"base": self.recipe.base_dockerfile, "node": self.recipe.node_dockerfile}
        (context / "Dockerfile").write_text(texts[layer])
        options = ("--network", "host", "--force-rm", "-t", tag, "--build-arg", argument)
        log = self.paths.of("image") / f"{layer}.Dockerfile.log"
        self.docker.logged(log, "build", *options, str(context))

    def _prune(self) -> None:
        """Remove from the cache what no build has used for a month."""
        used = [
            self._base_saved,
            self._hadoop_made,
            *map(self._wheels_made, self.recipe.requirements),
            *map(self._horovod_made, self.recipe.horovod),
        ]
        for path in used:
            if path.exists():
                os.utime(path)
        for part in ("images", "hadoop", "horovod", "wheels", "work"):
            remove_unfinished(self.paths.cached(part))
            for path in self.paths.cached(part).iterdir():
                if path.stat().st_mtime < time.time() - KEEP_SECONDS:
                    _remove(path)

    @contextlib.contextmanager
    def _workspace(self) -> Iterator[Path]:
        """A directory in the cache (so that links work), gone afterwards."""
        work = self.paths.cached("work")
        remove_unfinished(work)
        path = Path(tempfile.mkdtemp(prefix="build-", suffix=f".{os.getpid()}", dir=work))
        path.chmod(0o755)
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)


def _is_base_file(path: Path) -> bool:
    return path.suffix != ".Dockerfile" and path.name not in NOT_IN_BASE


@contextlib.contextmanager
def _written(final: Path) -> Iterator[Path]:
    """A name to write to, which becomes `final` only when the block ends well."""
    partial = final.with_name(f".{final.name}.{os.getpid()}")
    try:
        yield partial
        if final.exists():  # another process was faster
            _remove(partial)
        else:
            partial.rename(final)
    except BaseException:
        _remove(partial)
        raise


def remove_unfinished(directory: Path, mounts: Path = Path("/proc/self/mounts")) -> None:
    """Remove what builds that were killed have left: their names end in their process' number.

    What cannot be unmounted is still used by a child of such a build, and left for the next time.
    """
    for path in [*directory.glob("build-*.*"), *directory.glob(".*.*")]:
        number = path.name.rpartition(".")[2]
        if not number.isdigit() or Path("/proc", number).exists():
            continue
        below = [line.split()[1] for line in mounts.read_text().splitlines()]
        own = [place for place in below if place.startswith(f"{path}/")]
        commands = [["umount", place] for place in reversed(own)]
        if all(
            subprocess.run(c, capture_output=True, check=False).returncode == 0 for c in commands
        ):
            _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _link(source: str | Path, target: str | Path) -> None:
    """A hard link, or a copy where the file system has no such thing."""
    if Path(target).exists():
        return
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _link_tree(source: Path, target: Path) -> None:
    shutil.copytree(source, target, dirs_exist_ok=True, copy_function=_link)


def _write_files(texts: Mapping[str, str], directory: Path) -> None:
    for name, text in texts.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(text)


def _pipe(producer: Sequence[str], consumer: Sequence[str], target: Path) -> None:
    """`producer | consumer > target`; raises MayflyError when either fails."""
    with target.open("wb") as out, subprocess.Popen(producer, stdout=subprocess.PIPE) as first:
        second = subprocess.run(consumer, stdin=first.stdout, stdout=out, check=False)
    if first.returncode or second.returncode:
        raise MayflyError(f"{producer[0]} | {consumer[0]} failed, writing {target}")


def _plain(part: object) -> object:
    if isinstance(part, Mapping):
        return dict(part)
    return list(part) if isinstance(part, tuple) else part
