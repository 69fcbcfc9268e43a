"""What builds Horovod's wheel: what it asks for first, what it runs, and what it leaves."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import stat
import sys
import tarfile
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "roles/horovod/files/build_wheel.py"
SOURCES = {
    "CMakeLists.txt": "project(horovod CXX)\nset(CMAKE_CXX_STANDARD 14)\n"
    "    add_subdirectory(third_party/gloo)\n",
    "horovod/torch/CMakeLists.txt": "    set(CMAKE_CXX_STANDARD 14)\n",
    "horovod/common/gloo/gloo_context.cc": """
  device_attr.iface = gloo_iface_;
  auto dev = CreateDevice(device_attr);
  global_ctx = ctx;

  device_attr.iface = gloo_iface_;
  device_attr.ai_family = AF_UNSPEC;
  auto dev = CreateDevice(device_attr);

  global_ctx = global_context.ctx;
""",
}
# Stands in for Horovod's setup.py: says what it was given, and leaves a wheel or fails.
SETUP = """
import json, os, sys, zipfile
from pathlib import Path
if os.environ.get("FAIL"):
    print(os.environ["FAIL"])
    sys.exit(1)
result = Path(sys.argv[-1])
result.mkdir()
seen = {"words": sys.argv[1:-1], "lists": Path("CMakeLists.txt").read_text(),
        "settings": {n: v for n, v in os.environ.items() if n.startswith(("HOROVOD", "MAKE"))}}
with zipfile.ZipFile(result / "horovod-0.28.1+x-cp311-cp311-linux_x86_64.whl", "w") as wheel:
    wheel.writestr(os.environ["LIBRARY"], json.dumps(seen))
"""
LIBRARIES = {
    "tensorflow": "horovod/tensorflow/mpi_lib.cpython-311-x86_64-linux-gnu.so",
    "torch": "horovod/torch/mpi_lib_v2.cpython-311-x86_64-linux-gnu.so",
}


@pytest.fixture
def build_wheel(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_wheel", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "build_wheel", module)  # for its dataclasses
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def job(build_wheel, tmp_path, monkeypatch):
    """A build whose sources and tools need no index."""

    def make(framework: str = "tensorflow"):
        files = {**SOURCES, "setup.py": SETUP}
        source = tmp_path / "horovod-0.28.1.tar.gz"
        with tarfile.open(source, "w:gz") as archive:
            for name, text in files.items():
                path = tmp_path / "horovod-0.28.1" / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
            archive.add(tmp_path / "horovod-0.28.1", "horovod-0.28.1")
        monkeypatch.setattr(build_wheel, "SDIST_SHA256", build_wheel.sha256(source))
        monkeypatch.setattr(build_wheel, "install_tools", lambda job, work: None)
        monkeypatch.setenv("LIBRARY", LIBRARIES[framework])
        output = tmp_path / "output"
        output.mkdir(exist_ok=True)
        wanted = build_wheel.Wanted("0.28.1", 1, framework, "2.0+cpu", "3.11", "x86_64")
        tools = build_wheel.Tools("/usr/bin/c++", "gcc 12.2.0", 3)
        return build_wheel.Build(sys.executable, wanted, output, tools, source)

    return make


def test_help_tells_how_it_is_used(build_wheel, capsys):
    with pytest.raises(SystemExit):
        build_wheel.main(["--help"])
    said = capsys.readouterr().out
    assert all(word in said for word in ("PYTHON", "OUTPUT/<key>", "--look", "--sdist", "g++"))


def test_the_key_is_of_everything_that_a_wheel_depends_on(build_wheel):
    wanted = build_wheel.Wanted("0.28.1", 1, "torch", "2.13.0+cpu", "3.11", "x86_64")
    keys = {wanted.key("gcc 12.2.0"), wanted.key("gcc 13.1.0")}
    for name in ("horovod", "framework", "framework_version", "python", "machine"):
        keys.add(dataclasses.replace(wanted, **{name: "other"}).key("gcc 12.2.0"))
    keys.add(dataclasses.replace(wanted, recipe=2).key("gcc 12.2.0"))
    assert len(keys) == 8
    assert {len(key) for key in keys} == {12}


@pytest.mark.parametrize("framework", ["tensorflow", "torch"])
def test_a_build_leaves_the_wheel_its_record_and_nothing_else(build_wheel, job, framework):
    made = job(framework)
    wheel = build_wheel.build(made)
    assert wheel.parent == made.output / made.wanted.key("gcc 12.2.0")
    assert sorted(path.name for path in made.output.iterdir()) == [wheel.parent.name]
    assert stat.S_IMODE(wheel.parent.stat().st_mode) == 0o755
    record = json.loads((wheel.parent / "build.json").read_text())
    assert record["wheel"] == wheel.name
    assert record["compiler"] == "gcc 12.2.0"
    assert build_wheel.find(made.output, made.wanted) == wheel
    with zipfile.ZipFile(wheel) as archive:
        seen = json.loads(archive.read(LIBRARIES[framework]))
    # The command is no first word: see the comment in compile_wheel.
    assert seen["words"] == ["--quiet", "bdist_wheel", "--dist-dir"]
    assert "-O2 -DNDEBUG" in seen["lists"]
    assert ("CMAKE_CXX_STANDARD 17" in seen["lists"]) == (framework == "torch")
    settings = seen["settings"]
    assert settings["MAKEFLAGS"] == "-j3"
    assert settings["HOROVOD_WITH_GLOO"] == settings["HOROVOD_WITHOUT_MPI"] == "1"
    assert settings["HOROVOD_LOCAL_VERSION"] == f"{framework}2.0.cpu"
    other = "PYTORCH" if framework == "tensorflow" else "TENSORFLOW"
    assert f"HOROVOD_WITHOUT_{other}" in settings
    assert f"HOROVOD_WITH_{other}" not in settings


def test_settings_of_whoever_builds_are_left_out(build_wheel, job, tmp_path):
    given = {"HOROVOD_WITH_MPI": "1", "HOROVOD_GPU": "CUDA", "HOME": "/root"}
    environ = build_wheel.build_environment(given, job("torch"), tmp_path)
    assert environ["HOME"] == "/root"
    assert "HOROVOD_WITH_MPI" not in environ
    assert "HOROVOD_GPU" not in environ


def test_a_wheel_for_something_else_or_a_damaged_one_is_not_found(build_wheel, job, capsys):
    made = job()
    wheel = build_wheel.build(made)
    newer = dataclasses.replace(made.wanted, framework_version="2.1")
    assert build_wheel.find(made.output, newer) is None
    wheel.write_bytes(b"half")
    assert build_wheel.find(made.output, made.wanted) is None
    assert "left aside" in capsys.readouterr().err
    assert build_wheel.build(made) == wheel  # in its place
    assert build_wheel.find(made.output, made.wanted) == wheel
    (wheel.parent / "build.json").write_text("[]")
    assert build_wheel.find(made.output, made.wanted) is None


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        ("g++: fatal error: Killed signal terminated program cc1plus", "ran out of memory"),
        ("as: write error: No space left on device", "the disk is full"),
        ("fatal error: Python.h: No such file or directory", "apt-get install python3-dev"),
        ("CMake Error: CMAKE_CXX_COMPILER not set, after EnableLanguage", "apt-get install g++"),
        ("#error C++17 or later compatible compiler is required", "newer C++ standard"),
        ("Could NOT find Pytorch (missing: Pytorch_VERSION)", "run role runtime again"),
        ("ERROR: No matching distribution found for horovod", "pip's index"),
        ("error: something never seen", "read the first error"),
    ],
)
def test_a_failed_build_tells_the_likely_cause(build_wheel, job, monkeypatch, said, cause):
    made = job()
    lines = "\n".join(
        ["[ 1%] Building", said, *map(str, range(40)), "Traceback (most recent call last)"]
    )
    monkeypatch.setenv("FAIL", f"{lines}\n  File setup.py\nCalledProcessError")
    with pytest.raises(build_wheel.BuildError) as caught:
        build_wheel.build(made)
    message = str(caught.value)
    assert cause in message.splitlines()[-1]
    assert "39" in message
    assert "CalledProcessError" not in message
    assert caught.value.status == 1
    # What it printed stays, and nothing that could be taken for a wheel.
    assert [path.name for path in made.output.iterdir()] == ["failed-tensorflow.log"]
    assert said in made.log.read_text()
    monkeypatch.delenv("FAIL")
    build_wheel.build(made)
    assert not made.log.exists()


def test_the_first_error_is_shown_when_the_last_lines_are_others(build_wheel):
    said = "fine\nx.cc:1:2: fatal error: y.h: No such file\nmake: *** [x.o] Error 1\n"
    assert build_wheel.first_error(said).startswith("the first error: x.cc:1:2")
    assert build_wheel.first_error("all is well\n") == ""


def test_a_wheel_without_the_frameworks_module_is_a_failure(build_wheel, job, monkeypatch):
    made = job()
    monkeypatch.setenv("LIBRARY", "horovod/__init__.py")
    with pytest.raises(build_wheel.BuildError, match="has no horovod/tensorflow/mpi_lib"):
        build_wheel.build(made)
    assert build_wheel.find(made.output, made.wanted) is None


def test_another_source_is_refused(build_wheel, job, monkeypatch, tmp_path):
    made = job()
    monkeypatch.setattr(build_wheel, "SDIST_SHA256", "0" * 64)
    with pytest.raises(build_wheel.BuildError, match=r"not the source of Horovod 0\.28\.1"):
        build_wheel.build(made)
    lost = dataclasses.replace(made, sdist=tmp_path / "lost.tar.gz")
    with pytest.raises(build_wheel.BuildError, match="no such file"):
        build_wheel.build(lost)


def test_sources_that_the_recipe_does_not_know_are_refused(build_wheel, tmp_path):
    (tmp_path / "CMakeLists.txt").write_text("project(horovod C)\n")
    with pytest.raises(build_wheel.BuildError, match="0 times"):
        build_wheel.apply(tmp_path, build_wheel.NO_SYMBOLS)


# --- what is asked for before a build begins -----------------------------------------------------


@pytest.fixture
def toolbox(build_wheel, tmp_path, monkeypatch):
    """A PATH with tools that say what they are told to; everything is there and large enough."""
    programs = {
        "c++": "if [ $1 = --version ]; then echo 'c++ (Debian 12.2.0-14) 12.2.0'; fi",
        "cmake": "echo cmake version 3.25.1",
        "make": "true",
    }
    directory = tmp_path / "bin"
    directory.mkdir()
    for name, text in programs.items():
        write_program(directory / name, text)
    monkeypatch.setenv("PATH", f"{directory}:/bin")
    monkeypatch.delenv("CXX", raising=False)
    real = build_wheel.shutil.which
    monkeypatch.setattr(build_wheel.shutil, "which", lambda name: real(name, path=str(directory)))
    monkeypatch.setattr(build_wheel, "available_mb", lambda: 4000)
    monkeypatch.setattr(build_wheel.os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    return directory


def write_program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def check(build_wheel, output: Path, framework: str = "tensorflow", jobs: int = 0):
    return build_wheel.check_tools(output, build_wheel.FRAMEWORKS[framework], sys.executable, jobs)


def test_what_the_build_will_use(build_wheel, toolbox, tmp_path):
    tools = check(build_wheel, tmp_path)
    assert tools == build_wheel.Tools(str(toolbox / "c++"), "gcc 12.2.0", 2)  # 4000 MB // 1800
    assert check(build_wheel, tmp_path, jobs=1).jobs == 1


@pytest.mark.parametrize(
    ("tool", "message"),
    [
        (("c++", None), "no C.. compiler — apt-get install g.."),
        (("c++", "[ $1 = --version ] || { echo 'no filesystem' >&2; exit 1; }"), "no C..17"),
        (("cmake", None), "no cmake — apt-get install cmake"),
        (("cmake", "echo cmake version 3.10.2"), "cmake 3.10 is too old"),
        (("make", None), "no make — apt-get install make"),
    ],
)
def test_a_missing_tool_is_named(build_wheel, toolbox, tmp_path, tool, message):
    program, text = tool
    (toolbox / program).unlink()
    if text:
        write_program(toolbox / program, text)
    with pytest.raises(build_wheel.BuildError, match=message) as caught:
        check(build_wheel, tmp_path)
    assert caught.value.status == 2
    assert "\n" not in str(caught.value)


def test_little_memory_or_disk_is_named(build_wheel, toolbox, tmp_path, monkeypatch):
    monkeypatch.setattr(build_wheel, "DISK_MB", 1 << 40)
    with pytest.raises(build_wheel.BuildError, match="not enough disk"):
        check(build_wheel, tmp_path)
    monkeypatch.setattr(build_wheel, "available_mb", lambda: 900)
    with pytest.raises(build_wheel.BuildError, match="not enough memory: 900 MB"):
        check(build_wheel, tmp_path)


def test_pythons_headers_are_asked_for_where_pytorch_needs_them(
    build_wheel, toolbox, tmp_path, monkeypatch
):
    monkeypatch.setattr(build_wheel, "run_quietly", lambda command: "12.2.0 3.25 /nowhere")
    check(build_wheel, tmp_path, "tensorflow")
    with pytest.raises(build_wheel.BuildError, match=r"Python\.h — apt-get install python3-dev"):
        check(build_wheel, tmp_path, "torch")


@pytest.mark.parametrize(
    ("memory_mb", "cores", "jobs"), [(1800, 8, 1), (1500, 8, 1), (7200, 2, 2), (7200, 8, 4)]
)
def test_jobs_are_bounded_by_memory_and_cores(build_wheel, memory_mb, cores, jobs):
    assert build_wheel.choose_jobs(memory_mb, cores) == jobs


def test_memory_is_what_is_free_within_the_control_group(build_wheel, tmp_path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9 kB\nMemAvailable:    8388608 kB\n")
    cgroup = tmp_path / "cgroup"
    (cgroup / "memory").mkdir(parents=True)
    assert build_wheel.available_mb(meminfo, cgroup) == 8192
    (cgroup / "memory.max").write_text("max\n")
    assert build_wheel.available_mb(meminfo, cgroup) == 8192
    (cgroup / "memory.max").write_text(f"{2 << 30}\n")
    assert build_wheel.available_mb(meminfo, cgroup) == 2048
    (cgroup / "memory/memory.limit_in_bytes").write_text(f"{1 << 30}\n")
    assert build_wheel.available_mb(meminfo, cgroup) == 1024


# --- the command line ----------------------------------------------------------------------------


def test_an_interpreter_without_the_framework_is_named(build_wheel, tmp_path, capsys):
    interpreter = tmp_path / "python"
    write_program(interpreter, 'echo \'["", "3.11", "x86_64"]\'')
    assert build_wheel.main([str(interpreter), "torch", str(tmp_path), "--look"]) == 2
    assert "has no torch — install the framework first" in capsys.readouterr().err
    write_program(interpreter, "echo 'no module named encodings' >&2; exit 1")
    assert build_wheel.main([str(interpreter), "torch", str(tmp_path), "--look"]) == 2
    assert "no module named encodings" in capsys.readouterr().err
    assert build_wheel.main([str(tmp_path / "lost"), "torch", str(tmp_path)]) == 2
    assert "No such file or directory — run role runtime first" in capsys.readouterr().err


def test_looking_finds_what_was_built_and_builds_nothing(
    build_wheel, job, monkeypatch, capsys, tmp_path
):
    made = job("torch")
    monkeypatch.setattr(build_wheel, "describe", lambda python, framework: made.wanted)
    words = [sys.executable, "torch", str(made.output)]
    assert build_wheel.main([*words, "--look"]) == 3
    assert json.loads(capsys.readouterr().out) == dataclasses.asdict(made.wanted)
    monkeypatch.setattr(build_wheel, "check_tools", lambda *given: made.tools)
    # A relative interpreter and directory: setup.py runs elsewhere.
    monkeypatch.chdir(tmp_path)
    (tmp_path / "python").symlink_to(sys.executable)
    words = ["./python", "torch", "output"]
    assert build_wheel.main([*words, "--sdist", str(made.sdist)]) == 0
    built = capsys.readouterr().out.splitlines()[-1]
    assert Path(built).is_absolute()
    assert Path(built).is_file()
    assert build_wheel.main([*words, "--look"]) == 0
    assert capsys.readouterr().out.splitlines() == [built]


def test_this_interpreter_is_described(build_wheel, monkeypatch):
    known = dataclasses.replace(build_wheel.FRAMEWORKS["torch"], distributions=("lost", "pytest"))
    monkeypatch.setitem(build_wheel.FRAMEWORKS, "torch", known)
    wanted = build_wheel.describe(sys.executable, "torch")
    assert wanted.framework_version == pytest.__version__
    assert wanted.python == "{}.{}".format(*sys.version_info)
    assert wanted.machine == os.uname().machine
