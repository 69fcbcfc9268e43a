#!/usr/bin/env python3
"""Build Horovod's wheel for one framework, with gloo and without MPI and GPUs, or find it again.

Horovod is published as source only, and what is compiled fits one version of one framework. The
wheel is built against the framework that PYTHON (a virtual environment's interpreter) has, and is
left in a directory of OUTPUT whose name is a hash of the versions of Horovod, framework, Python,
compiler and this recipe:

    OUTPUT/<key>/horovod-<version>+<framework><its version>-<python>-<python>-linux_<machine>.whl
    OUTPUT/<key>/build.json     (what it was built from; the SHA-256 of the wheel)

The directory appears when it is complete. The last line of the standard output is the wheel's
path; exit status 0: it is there, 1: the build failed, 2: something is missing before it could
begin, 3: --look found none, and prints what it looked for as JSON. Needs on Debian 12: g++, cmake,
make, and python3-dev for PyTorch.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

HOROVOD = "0.28.1"
SDIST_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
RECIPE = 2  # one more whenever flags, patches or tools change, so that older wheels are left aside
# setuptools 70 and newer cannot run Horovod's setup.py. pip checks the hashes.
BUILD_TOOLS = {
    "setuptools==69.5.1": "c636ac361bc47580504644275c9ad802c50415c7522212252c033bd15f301f32",
    "wheel==0.45.1": "708e7481cc80179af0e556bbf0cc00b8444c7321e2700b8d8580231d13017248",
}
JOB_MB = (
    1800  # what one compiler takes at most: 1.4 GB for TensorFlow and 1.7 for PyTorch, measured
)
DISK_MB = 1000
OLDEST_CMAKE = (3, 13)  # cmake_minimum_required of Horovod
MB = 1 << 20
LAST_LINES = 15
BUILT, FAILED, MISSING, NOT_THERE = 0, 1, 2, 3

# One line that stands in the file exactly once, and what replaces it.
Patch = tuple[str, str, str]
# Horovod asks for a build type with debug symbols, ten times the size of the code.
NO_SYMBOLS: Patch = (
    "CMakeLists.txt",
    "project(horovod CXX)",
    'project(horovod CXX)\nset(CMAKE_CXX_FLAGS_RELWITHDEBINFO "-O2 -DNDEBUG")',
)
# TensorFlow gets a gloo of its own with C++17: the other is built only where it is linked.
GLOO_WHEN_LINKED: Patch = (
    "CMakeLists.txt",
    "add_subdirectory(third_party/gloo)",
    "add_subdirectory(third_party/gloo EXCLUDE_FROM_ALL)",
)
# Horovod forgets HOROVOD_GLOO_IFACE in its second mesh, which then uses what the host's name means:
# ranks on different nodes abort where /etc/hosts maps it to 127.0.1.1, as Debian's does.
ONE_INTERFACE: Patch = (
    "horovod/common/gloo/gloo_context.cc",
    """  device_attr.iface = gloo_iface_;
  device_attr.ai_family = AF_UNSPEC;
  auto dev = CreateDevice(device_attr);

  global_ctx""",
    """  device_attr.iface = global_context.gloo_iface_;
  device_attr.ai_family = AF_UNSPEC;
  auto dev = CreateDevice(device_attr);

  global_ctx""",
)
ALL_NEED = (NO_SYMBOLS, GLOO_WHEN_LINKED, ONE_INTERFACE)


@dataclass(frozen=True)
class Framework:
    """What a framework's build needs beside what all need."""

    distributions: tuple[str, ...]  # names under which the framework is installed
    flag: str  # in the names of Horovod's settings
    library: str  # the module that the wheel must have
    needs_headers: bool  # Python's
    patches: tuple[Patch, ...]


FRAMEWORKS = {
    "tensorflow": Framework(
        ("tensorflow-cpu", "tensorflow"),
        "TENSORFLOW",
        "horovod/tensorflow/mpi_lib",
        False,
        ALL_NEED,
    ),
    # PyTorch's headers demand C++17 since 2.1; Horovod sets 14 in two places.
    "torch": Framework(
        ("torch",),
        "PYTORCH",
        "horovod/torch/mpi_lib_v2",
        True,
        (
            *ALL_NEED,
            ("CMakeLists.txt", "set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 17)"),
            (
                "horovod/torch/CMakeLists.txt",
                "set(CMAKE_CXX_STANDARD 14)",
                "set(CMAKE_CXX_STANDARD 17)",
            ),
        ),
    ),
}

# Pattern in the build's output → what most likely is wrong, and what to do.
CAUSES = (
    (
        r"Killed signal terminated program|internal compiler error: Killed|virtual memory exhausted"
        r"|cannot allocate memory|out of memory allocating",
        f"the compiler ran out of memory (one takes up to {JOB_MB / 1000} GB) — "
        "use --jobs 1, or a node with more memory",
    ),
    (r"No space left on device", f"the disk is full — free {DISK_MB / 1000:.0f} GB there"),
    (r"Python\.h: No such file", "Python's headers are missing — apt-get install python3-dev"),
    (
        r"No CMAKE_CXX_COMPILER|CMAKE_CXX_COMPILER not set|is not able to compile a simple test",
        "there is no C++ compiler that works — apt-get install g++ make",
    ),
    (
        r"C\+\+(\d\d) or later|you need C\+\+(\d\d)",
        "the framework demands a newer C++ standard than this recipe sets — use the version of "
        "the framework that role runtime installs",
    ),
    (
        r"Could NOT find (Tensorflow|Pytorch)",
        "the framework cannot be imported by the interpreter — run role runtime again",
    ),
    (
        r"No matching distribution|Could not find a version|Connection|certificate verify failed",
        "the package index was not reached — check pip's index and proxy settings",
    ),
    (r"DO NOT MATCH THE HASHES", "the package index has another file than this recipe pins"),
)


class BuildError(Exception):
    """Why there is no wheel, in one line, and what to do; `status` is the exit status."""

    def __init__(self, message: str, status: int = MISSING) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Wanted:
    """What a wheel must have been built for to be of use to an interpreter."""

    horovod: str
    recipe: int
    framework: str
    framework_version: str
    python: str
    machine: str

    def key(self, compiler: str) -> str:
        """The name of the wheel's directory: twelve hex digits."""
        text = json.dumps({**asdict(self), "compiler": compiler}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Tools:
    """What compiles: the compiler and its version (`gcc 12.2.0`), and jobs at a time."""

    compiler: str
    version: str
    jobs: int


@dataclass(frozen=True)
class Build:
    """One build: the interpreter, what its wheel is for, where it goes, and what it is made of."""

    python: str
    wanted: Wanted
    output: Path
    tools: Tools
    sdist: Path | None = None  # else the package index's
    find_links: str | None = None  # where pip finds the build tools, beside the index

    @property
    def framework(self) -> Framework:
        return FRAMEWORKS[self.wanted.framework]

    @property
    def log(self) -> Path:
        """What the build prints; it stays when the build fails."""
        return self.output / f"failed-{self.wanted.framework}.log"

    @property
    def final(self) -> Path:
        """The wheel's directory."""
        return self.output / self.wanted.key(self.tools.version)


def main(words: Sequence[str] | None = None) -> int:
    """Find or build the wheel that was asked for, print its path, and return the exit status."""
    options = parse(words)
    # Not resolved: an environment's interpreter is a link, and is what it is by its place.
    python = os.path.abspath(shutil.which(options.python) or options.python)  # noqa: PTH100
    output = options.output.absolute()
    try:
        wanted = describe(python, options.framework)
        wheel = find(output, wanted)
        if wheel is None and options.look:
            print(json.dumps(asdict(wanted)))
            return NOT_THERE
        if wheel is None:
            tools = check_tools(output, FRAMEWORKS[options.framework], python, options.jobs)
            source = (options.sdist, options.find_links)
            wheel = build(Build(python, wanted, output, tools, *source))
    except BuildError as error:
        print(f"build_wheel: {error}", file=sys.stderr)
        return error.status
    print(wheel)
    return BUILT


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("python", metavar="PYTHON", help="interpreter that has the framework")
    add("framework", metavar="FRAMEWORK", choices=sorted(FRAMEWORKS), help="tensorflow or torch")
    add("output", metavar="OUTPUT", type=Path, help="directory of wheels")
    add("--look", action="store_true", help="only look for one in OUTPUT")
    jobs = "compilers at a time (default: one a core, as far as memory allows)"
    add("--jobs", type=int, default=0, metavar="N", help=jobs)
    sdist = f"horovod-{HOROVOD}.tar.gz, instead of the package index's"
    add("--sdist", type=Path, metavar="FILE", help=sdist)
    links = "where pip looks for the build tools beside the index"
    add("--find-links", metavar="PLACE", help=links)
    return parser.parse_args(words)


def describe(python: str, framework: str) -> Wanted:
    """What a wheel for this interpreter must be; BuildError when it lacks the framework."""
    names = FRAMEWORKS[framework].distributions
    program = (
        "import importlib.metadata as m, json, platform, sys\n"
        "found = {d.metadata['Name'].lower(): d.version for d in m.distributions()}\n"
        "version = next((found[n] for n in sys.argv[1:] if n in found), '')\n"
        "print(json.dumps([version, '%d.%d' % sys.version_info[:2], platform.machine()]))"
    )
    try:
        done = subprocess.run(
            [python, "-c", program, *names], capture_output=True, text=True, check=False
        )
    except OSError as error:
        reason = error.strerror or error
        raise BuildError(f"no interpreter {python!r}: {reason} — run role runtime first") from None
    if done.returncode:
        last = last_lines(done.stderr, 1)
        raise BuildError(f"interpreter {python!r} fails: {last} — run role runtime again")
    version, own, machine = json.loads(done.stdout)
    if not version:
        raise BuildError(f"{python!r} has no {' or '.join(names)} — install the framework first")
    return Wanted(HOROVOD, RECIPE, framework, version, own, machine)


def find(output: Path, wanted: Wanted) -> Path | None:
    """A whole wheel in OUTPUT that was built for what is wanted, whatever the compiler was."""
    for record in sorted(output.glob("*/build.json")):
        built = read_record(record.read_text())
        wheel = record.parent / str(built.get("wheel"))
        if matches(built, wanted) and wheel.is_file():
            if sha256(wheel) == built.get("sha256"):
                return wheel
            tell(f"{wheel} is not what was built: left aside")
    return None


def matches(built: Mapping[str, Any], wanted: Wanted) -> bool:
    """Whether a build's record is that of a wheel for what is wanted."""
    return {name: built.get(name) for name in asdict(wanted)} == asdict(wanted)


def read_record(text: str) -> dict[str, Any]:
    """The content of a build.json; empty when it is none."""
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def check_tools(output: Path, framework: Framework, python: str, jobs: int = 0) -> Tools:
    """What the build will use; BuildError names the first thing that is missing."""
    compiler, version = find_compiler()
    check_cmake()
    if not shutil.which("make"):
        raise BuildError("no make — apt-get install make")
    if framework.needs_headers:
        check_headers(python)
    memory = available_mb()
    if memory < JOB_MB:
        raise BuildError(
            f"not enough memory: {memory} MB are available, and the compiler takes up to {JOB_MB} "
            "— build on a larger node, or copy the wheel from one"
        )
    output.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(output).free // MB
    if free < DISK_MB:
        raise BuildError(
            f"not enough disk: {free} MB are free in {output}, the build takes {DISK_MB} — "
            "free some, or name another directory"
        )
    return Tools(compiler, version, jobs or choose_jobs(memory, len(os.sched_getaffinity(0))))


def find_compiler(environ: Mapping[str, str] = os.environ) -> tuple[str, str]:
    """Path and version of the C++ compiler that cmake will take; it has to compile C++17."""
    compiler = shutil.which(environ.get("CXX") or "c++") or shutil.which("g++")
    if compiler is None:
        raise BuildError("no C++ compiler — apt-get install g++")
    said = run_quietly([compiler, "--version"])
    numbers = re.findall(r"\d+\.\d+\.\d+", said.partition("\n")[0])
    version = f"{'clang' if 'clang' in said else 'gcc'} {numbers[-1] if numbers else 'unknown'}"
    program = "#include <filesystem>\nint main() { return std::filesystem::path().empty(); }\n"
    command = [compiler, "-std=c++17", "-fsyntax-only", "-x", "c++", "-"]
    done = subprocess.run(command, input=program, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(
            f"{compiler} ({version}) compiles no C++17: {last_lines(done.stderr, 1)} — "
            "apt-get install g++"
        )
    return compiler, version


def check_cmake() -> None:
    """BuildError when cmake is missing or too old for Horovod."""
    oldest = ".".join(map(str, OLDEST_CMAKE))
    if not shutil.which("cmake"):
        raise BuildError(f"no cmake — apt-get install cmake ({oldest} or newer)")
    found = re.search(r"(\d+)\.(\d+)", run_quietly(["cmake", "--version"]))
    if found and tuple(map(int, found.groups())) < OLDEST_CMAKE:
        raise BuildError(f"cmake {found[0]} is too old — install {oldest} or newer")


def check_headers(python: str) -> None:
    """BuildError when the interpreter has no headers to compile against."""
    program = "import sysconfig; print(sysconfig.get_path('include'))"
    header = Path(run_quietly([python, "-c", program]).strip()) / "Python.h"
    if not header.is_file():
        raise BuildError(f"no {header} — apt-get install python3-dev")


def available_mb(
    meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")
) -> int:
    """Memory that a build may take: what the machine has free, bounded by the control group."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo.read_text(), re.MULTILINE)
    bounds = [int(found[1]) * 1024] if found else []
    for limit in (cgroup / "memory.max", cgroup / "memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # no such file, or `max`
            bounds.append(int(limit.read_text()))
    return min(bounds, default=0) // MB


def choose_jobs(memory_mb: int, cores: int) -> int:
    """Compilers at a time: one a core, as far as each finds the memory that it may take."""
    return max(1, min(cores, memory_mb // JOB_MB))


def build(job: Build) -> Path:
    """Build the wheel and return its path; BuildError with the last lines when that fails."""
    began = time.monotonic()
    wanted, tools = job.wanted, job.tools
    with tempfile.TemporaryDirectory(prefix=".build-", dir=job.output) as name:
        work = Path(name)
        install_tools(job, work)
        source = unpack(checked(job.sdist or download(job, work)), work)
        for patch in job.framework.patches:
            apply(source, patch)
        tell(
            f"building Horovod {HOROVOD} for {wanted.framework} {wanted.framework_version} with "
            f"{tools.version}, {tools.jobs} at a time (5 to 10 minutes of one core)"
        )
        compile_wheel(job, source, work)
        made = only_wheel(work / "result", job.framework)
        record = {
            **asdict(wanted),
            "compiler": tools.version,
            "wheel": made.name,
            "sha256": sha256(made),
            "seconds": round(time.monotonic() - began),
            "jobs": tools.jobs,
            "largest_process_mb": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024,
        }
        (made.parent / "build.json").write_text(json.dumps(record, indent=1) + "\n")
        put_in_place(made.parent, job.final)
    job.log.unlink(missing_ok=True)
    return job.final / made.name


def put_in_place(made: Path, final: Path) -> None:
    """Give a complete directory its name; what stood there is replaced."""
    made.chmod(0o755)
    if final.exists():
        shutil.rmtree(final)
    made.rename(final)


def install_tools(job: Build, work: Path) -> None:
    """Put the build tools into a directory of their own: the environment keeps its setuptools."""
    lines = [f"{pin} --hash=sha256:{digest}\n" for pin, digest in BUILD_TOOLS.items()]
    (work / "tools.txt").write_text("".join(lines))
    options = ["--no-deps", "--require-hashes", "--only-binary", ":all:", "--no-compile"]
    options += ["--find-links", job.find_links] if job.find_links else []
    target = ["--target", str(work / "tools"), "-r", str(work / "tools.txt")]
    pip(job.python, "install", *options, *target)


def download(job: Build, work: Path) -> Path:
    """Horovod's source distribution from the package index."""
    tell(f"downloading the source of Horovod {HOROVOD}")
    # pip runs setup.py to read a source distribution's name, with the tools that are there.
    options = ["--no-deps", "--no-binary", "horovod", "--no-build-isolation", "-d", str(work)]
    pip(job.python, "download", *options, f"horovod=={HOROVOD}", tools=work / "tools")
    return work / f"horovod-{HOROVOD}.tar.gz"


def checked(sdist: Path) -> Path:
    """The source distribution, when it is the one that this recipe is written for."""
    if not sdist.is_file():
        raise BuildError(f"no such file: {sdist} — name the source of Horovod {HOROVOD}")
    found = sha256(sdist)
    if found != SDIST_SHA256:
        raise BuildError(
            f"{sdist.name} is not the source of Horovod {HOROVOD}: SHA-256 {found[:12]}… instead "
            f"of {SDIST_SHA256[:12]}… — download it again"
        )
    return sdist


def unpack(sdist: Path, work: Path) -> Path:
    """Unpack a source distribution, whose checksum was verified; its top directory."""
    with tarfile.open(sdist) as content:
        content.extractall(work)
        return work / content.getnames()[0].split("/")[0]


def apply(source: Path, patch: Patch) -> None:
    """Replace one line in the sources; BuildError when it is not there exactly once."""
    name, old, new = patch
    text = (source / name).read_text()
    if text.count(old) != 1:
        raise BuildError(f"{name} has {text.count(old)} times {old!r} — the recipe expects it once")
    (source / name).write_text(text.replace(old, new))


def compile_wheel(job: Build, source: Path, work: Path) -> None:
    """Run Horovod's setup.py; BuildError with the likely cause when it fails."""
    # An option in the first place: with the command there, Horovod's setup.py would fetch what its
    # users need at run time before it compiles.
    result = str(work / "result")
    command = [job.python, "setup.py", "--quiet", "bdist_wheel", "--dist-dir", result]
    environ = build_environment(os.environ, job, work / "tools")
    with job.log.open("w") as file:
        done = subprocess.run(
            command,
            cwd=source,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            check=False,
        )
    if done.returncode:
        said = job.log.read_text(errors="replace")
        raise BuildError(
            f"the last lines of {job.log}:\n{last_lines(said)}\n{first_error(said)}"
            f"the build of Horovod for {job.wanted.framework} failed: {likely_cause(said)}",
            FAILED,
        )


def build_environment(environ: Mapping[str, str], job: Build, tools: Path) -> dict[str, str]:
    """The environment of the build: gloo alone, one framework alone, and our tools first.

    See docs/install.rst of Horovod for its variables.
    """
    wanted, own = job.wanted, job.framework.flag
    others = sorted({"TENSORFLOW", "PYTORCH", "MXNET"} - {own})
    kept = {name: value for name, value in environ.items() if not name.startswith("HOROVOD_")}
    return kept | {
        "PYTHONPATH": str(tools),
        "CXX": job.tools.compiler,
        "MAKEFLAGS": f"-j{job.tools.jobs}",
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_WITHOUT_MPI": "1",
        "HOROVOD_CPU_OPERATIONS": "GLOO",
        f"HOROVOD_WITH_{own}": "1",
        **{f"HOROVOD_WITHOUT_{other}": "1" for other in others},
        # The wheel's name tells what it is for: two frameworks' wheels may lie side by side.
        "HOROVOD_LOCAL_VERSION": f"{wanted.framework}{wanted.framework_version}".replace("+", "."),
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }


def only_wheel(result: Path, framework: Framework) -> Path:
    """The wheel that was made; BuildError when it lacks the framework's module."""
    for wheel in result.glob("horovod-*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            if any(name.startswith(f"{framework.library}.") for name in archive.namelist()):
                return wheel
        raise BuildError(f"{wheel.name} has no {framework.library} — see the output", FAILED)
    raise BuildError(f"setup.py left no wheel in {result} — see its output", FAILED)


def likely_cause(said: str) -> str:
    """What is most likely wrong, from what a failed build has printed."""
    for pattern, cause in CAUSES:
        if re.search(pattern, said, re.IGNORECASE):
            return cause
    return "no known cause — read the first error"


def first_error(said: str) -> str:
    """The first line that names an error, with a line break; empty when there is none."""
    for line in said.splitlines():
        if re.search(r"\b(fatal )?error\b:|CMake Error|Killed", line, re.IGNORECASE):
            return f"the first error: {line.strip()[:300]}\n"
    return ""


def last_lines(said: str, count: int = LAST_LINES) -> str:
    """The last lines that say something, without setup.py's own traceback."""
    before, mark, _ = said.rpartition("Traceback (most recent call last)")
    lines = [line.rstrip() for line in (before if mark and before.strip() else said).splitlines()]
    return "\n".join([line[:300] for line in lines if line.strip()][-count:])


def pip(python: str, *words: str, tools: Path | None = None) -> None:
    """Run the environment's pip; BuildError with its last line when it fails."""
    command = [python, "-m", "pip", "--disable-pip-version-check", "--quiet", *words]
    environ = {**os.environ, "PYTHONPATH": str(tools)} if tools else None
    done = subprocess.run(
        command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        cause, said = likely_cause(done.stdout), last_lines(done.stdout, 3)
        raise BuildError(f"{said}\npip {words[0]} failed: {cause}", FAILED)


def run_quietly(command: Sequence[str]) -> str:
    """What a command prints, whether it succeeds or not."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def sha256(path: Path) -> str:
    """The SHA-256 of a file in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for block in iter(lambda: file.read(MB), b""):
            digest.update(block)
    return digest.hexdigest()


def tell(message: str) -> None:
    """A line of progress."""
    print(f"build_wheel: {message}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
