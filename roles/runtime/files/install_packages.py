"""Make a virtual environment and install a requirements file into it.

Usage: install_packages.py VENV REQUIREMENTS [WHEEL_DIRECTORY] [--offline | --extra-index-url=URL]

A line `# without dependencies: NAME==VERSION` of the file names a package whose requirements are
met otherwise than it says; it is installed after the others.

With a wheel directory, its wheels are preferred; offline, nothing else is used, and uv installs
them when its wheel is among them: on two cores it takes a quarter of pip's time. pip reads the
machine's settings (index, proxy, certificates); uv would not, so it is never used online.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path


def main(words: list[str]) -> int:
    """Install, and return the installer's exit code."""
    offline = "--offline" in words
    home, requirements, *wheels = (word for word in words if not word.startswith("--"))
    venv.EnvBuilder(clear=True, with_pip=True, symlinks=True).create(home)
    source = ["--find-links", wheels[0]] if wheels else []
    source += [word for word in words if word.startswith("--extra-index-url=")]
    if offline:
        source.append("--no-index")
    # Beside the environment, so that uv can link files instead of copying them.
    with tempfile.TemporaryDirectory(dir=Path(home).parent, prefix=".install-") as scratch:
        uv = unpack_uv(Path(wheels[0]), Path(scratch)) if offline else None
        command = uv_install(uv, home, scratch) if uv else pip_install(home)
        done = subprocess.run([*command, *source, "-r", requirements], check=False)
        alone = without_dependencies(Path(requirements).read_text(encoding="utf-8"))
        if alone and done.returncode == 0:
            done = subprocess.run([*command, *source, "--no-deps", *alone], check=False)
    return done.returncode


def without_dependencies(requirements: str) -> list[str]:
    """The packages that a requirements file names in comments of that form."""
    return re.findall(r"^# without dependencies: (\S+)$", requirements, re.MULTILINE)


def unpack_uv(wheels: Path, scratch: Path) -> Path | None:
    """The uv executable out of its wheel, None when there is no such wheel."""
    for wheel in sorted(wheels.glob("uv-*.whl"), reverse=True):
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if name.endswith(".data/scripts/uv"):
                    uv = Path(archive.extract(name, scratch))
                    uv.chmod(0o755)
                    return uv
    return None


def uv_install(uv: Path, home: str, scratch: str) -> list[str]:
    return [
        str(uv), "pip", "install", "--quiet", "--offline", "--link-mode", "hardlink",
        "--cache-dir", f"{scratch}/cache", "--python", f"{home}/bin/python",
    ]  # fmt: skip


def pip_install(home: str) -> list[str]:
    return [
        f"{home}/bin/python", "-m", "pip", "install", "--quiet", "--no-compile", "--no-cache-dir",
        "--disable-pip-version-check", "--progress-bar", "off",
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
