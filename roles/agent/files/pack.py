"""Print a Python package as a base64 tar archive; the same sources give the same text.

Usage: pack.py DIRECTORY. Runs where Ansible runs, so that a node gets one file instead of many.
"""

import base64
import gzip
import io
import pathlib
import sys
import tarfile


def main(directory: pathlib.Path) -> None:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for path in sorted(directory.rglob("*.py")):
            member = tarfile.TarInfo(path.relative_to(directory.parent).as_posix())
            member.size = path.stat().st_size
            member.mode = 0o644
            with path.open("rb") as stream:
                tar.addfile(member, stream)
    print(base64.b64encode(gzip.compress(archive.getvalue(), mtime=0)).decode())


main(pathlib.Path(sys.argv[1]).resolve())
