"""The runtime role's installer: a real environment from a wheel made here, without an index."""

from __future__ import annotations

import importlib.util
import subprocess
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "roles/runtime/files/install_packages.py"


@pytest.fixture
def installer():
    spec = importlib.util.spec_from_file_location("install_packages", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_wheel(
    directory: Path, name: str, version: str, files: dict[str, str], needs: Sequence[str] = ()
) -> None:
    info = f"{name}-{version}.dist-info"
    required = "".join(f"Requires-Dist: {other}\n" for other in needs)
    content = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{required}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},,\n" for path in [*content, f"{info}/RECORD"])
    with zipfile.ZipFile(directory / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in {**content, f"{info}/RECORD": record}.items():
            wheel.writestr(path, text)


def test_offline_takes_the_wheels_and_leaves_nothing_else(installer, tmp_path):
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    make_wheel(wheels, "demo", "1.0", {"demo.py": "answer = 42\n"})
    requirements = tmp_path / "requirements.txt"
    requirements.write_text("demo==1.0\n")
    home = tmp_path / "venv"
    assert installer.main([str(home), str(requirements), str(wheels), "--offline"]) == 0
    program = "import demo; print(demo.answer)"
    done = subprocess.run([home / "bin/python", "-c", program], capture_output=True, text=True)
    assert done.stdout == "42\n"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["requirements.txt", "venv", "wheels"]


def test_a_package_may_be_installed_without_what_it_asks_for(installer, tmp_path):
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    make_wheel(wheels, "demo", "1.0", {"demo.py": "answer = 42\n"})
    make_wheel(wheels, "user", "2.0", {"user.py": "from demo import answer\n"}, ["other"])
    requirements = tmp_path / "requirements.txt"
    requirements.write_text("# without dependencies: user==2.0\ndemo==1.0\n")
    home = tmp_path / "venv"
    assert installer.main([str(home), str(requirements), str(wheels), "--offline"]) == 0
    program = "import user; print(user.answer)"
    done = subprocess.run([home / "bin/python", "-c", program], capture_output=True, text=True)
    assert done.stdout == "42\n"


def test_what_cannot_be_installed_is_an_error(installer, tmp_path):
    requirements = tmp_path / "requirements.txt"
    requirements.write_text("demo==1.0\n")
    words = [str(tmp_path / "venv"), str(requirements), str(tmp_path), "--offline"]
    assert installer.main(words) != 0


def test_uv_is_found_in_its_wheel(installer, tmp_path):
    assert installer.unpack_uv(tmp_path, tmp_path) is None
    script = "#!/bin/sh\necho uv\n"
    make_wheel(tmp_path, "uv", "0.1", {"uv-0.1.data/scripts/uv": script})
    uv = installer.unpack_uv(tmp_path, tmp_path / "scratch")
    assert subprocess.run([uv], capture_output=True, text=True).stdout == "uv\n"
