"""Where the template's text goes: a file that is whole or not there, or standard output."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from mayfly.errors import UserError

STANDARD_OUTPUT = "-"


def check_free(path: Path, *, force: bool) -> None:
    """Raise UserError when the file exists and is not to be overwritten, or cannot be made."""
    if path.is_dir():
        raise UserError(f"{path} is a directory", "give -o a file's name, or - to print")
    if path.exists() and not force:
        raise UserError(f"{path} exists", "give --force to overwrite it, or -o another file")
    if not path.parent.is_dir():
        raise UserError(f"there is no directory {path.parent}", "make it, or give -o another file")


def write_template(text: str, path: Path, *, force: bool) -> None:
    """Write the file at once: a reader sees the old text or the whole new one."""
    check_free(path, force=force)
    try:
        with tempfile.NamedTemporaryFile(
            "w", encoding="ascii", dir=path.parent, prefix=f".{path.name}.", delete=False
        ) as partial:
            partial.write(text)
        temporary = Path(partial.name)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}", "give -o another file") from None
    temporary.chmod(0o666 & ~_umask())
    try:
        if force:
            temporary.replace(path)
        else:
            # Unlike a rename, a link never replaces what somebody made in the meantime.
            os.link(temporary, path)
    except FileExistsError:
        raise UserError(f"{path} exists", "give --force to overwrite it") from None
    finally:
        temporary.unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
