#!/usr/bin/env python3
"""Write a file to HDFS through libhdfs, read it back, and record that it worked.

TensorFlow opens libhdfs.so in the same way: with CLASSPATH, LD_LIBRARY_PATH and HADOOP_HDFS_HOME of
/etc/mayfly/hadoop.env. Exit status 0 when the content came back; otherwise a line on stderr.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import sys
from pathlib import Path

ENVIRONMENT = Path("/etc/mayfly/hadoop.env")
# A Java that starts quickly: this one lives for a second.
QUICK = {"LIBHDFS_OPTS": "-Xmx64m -XX:+UseSerialGC -XX:TieredStopAtLevel=1"}


class ProbeError(Exception):
    """A call of libhdfs failed; the message names it."""


def main(proof: Path) -> int:
    """Probe with the node's environment; writes `proof` when it worked."""
    if "CLASSPATH" not in os.environ:
        restart_with_environment()
    content = f"written by {os.uname().nodename}".encode()
    try:
        returned = write_and_read(f"/.libhdfs-probe-{os.uname().nodename}", content)
    except (OSError, ProbeError) as error:
        print(f"libhdfs does not work: {error} — see the lines above", file=sys.stderr)
        return 1
    if returned != content:
        print(f"libhdfs returned {returned!r} for {content!r}", file=sys.stderr)
        return 1
    proof.write_text(f"{content.decode()}\n")
    return 0


def restart_with_environment() -> None:
    """Start again with the variables: the loader reads LD_LIBRARY_PATH only at start."""
    pairs = (line.split("=", 1) for line in shlex.split(ENVIRONMENT.read_text(), comments=True))
    environment = {**os.environ, **dict(pairs), **QUICK}
    os.execve(sys.executable, [sys.executable, *sys.argv], environment)


def write_and_read(path: str, content: bytes) -> bytes:
    """What comes back of `content` from the file `path` of the default file system."""
    hdfs = load_libhdfs()
    filesystem = check(hdfs.hdfsConnect(b"default", 0), "hdfsConnect")
    name = path.encode()
    handle = check(hdfs.hdfsOpenFile(filesystem, name, os.O_WRONLY, 0, 0, 0), "open for writing")
    if hdfs.hdfsWrite(filesystem, handle, content, len(content)) != len(content):
        raise ProbeError("hdfsWrite wrote less than it was given")
    if hdfs.hdfsCloseFile(filesystem, handle) != 0:
        raise ProbeError("hdfsCloseFile failed after writing")
    handle = check(hdfs.hdfsOpenFile(filesystem, name, os.O_RDONLY, 0, 0, 0), "open for reading")
    buffer = ctypes.create_string_buffer(len(content) + 1)
    count = hdfs.hdfsRead(filesystem, handle, buffer, len(buffer))
    hdfs.hdfsCloseFile(filesystem, handle)
    hdfs.hdfsDelete(filesystem, name, 0)
    return buffer.raw[: max(count, 0)]


def load_libhdfs() -> ctypes.CDLL:
    """The library with the argument types of the calls used here (hdfs.h of Hadoop 3)."""
    hdfs = ctypes.CDLL(os.environ["HADOOP_HDFS_HOME"] + "/lib/native/libhdfs.so")
    pointer, text, integer = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int
    options = [integer, integer, ctypes.c_short, ctypes.c_int32]
    signatures = {
        "hdfsConnect": (pointer, [text, ctypes.c_uint16]),
        "hdfsOpenFile": (pointer, [pointer, text, *options]),
        "hdfsWrite": (ctypes.c_int32, [pointer, pointer, text, ctypes.c_int32]),
        "hdfsRead": (ctypes.c_int32, [pointer, pointer, pointer, ctypes.c_int32]),
        "hdfsCloseFile": (integer, [pointer, pointer]),
        "hdfsDelete": (integer, [pointer, text, integer]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(hdfs, name)
        function.restype, function.argtypes = result, arguments
    return hdfs


def check(handle: int | None, call: str) -> int:
    """The handle; ProbeError when libhdfs returned a null pointer."""
    if not handle:
        raise ProbeError(f"{call} failed")
    return handle


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
