"""What belongs to a trained model in a model_dir, and where it goes in S3."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from mayfly_train.errors import NodeError
from mayfly_train.hdfs import FileInfo

CHECKPOINT_STATE = "checkpoint"
_SAVED_MODEL = "saved_model.pb"
# Where programs without a SavedModel leave the model, and their checkpoints (docs/programs.md).
_EXPORT, _CHECKPOINTS = "export/", "checkpoints/"
_EVENTS = "events.out.tfevents."
# The Estimator exports to such a directory first, and renames it when it is complete.
# Other programs' files have this ending until they are (roles/runtime/files/mayfly_hdfs.py).
_UNFINISHED = re.compile(r"(^|/)temp-[^/]*(/|$)|\.part$")
_LATEST = re.compile(r'^model_checkpoint_path:\s*"([^"]+)"', re.MULTILINE)


class NothingThere(NodeError):
    """Training has left neither a model nor a checkpoint."""


class Reader(Protocol):
    """What an export needs of the place where the model is; see `model_dir`."""

    def walk(self, path: str) -> list[FileInfo]: ...
    def read_bytes(self, path: str) -> bytes: ...
    def read_chunks(self, path: str, web: bool = False) -> Iterator[bytes]: ...


@dataclass(frozen=True)
class ModelFile:
    """A file where training left it, and its path below the run's address."""

    source: FileInfo
    target: str


@dataclass(frozen=True)
class ModelFiles:
    """All files to copy, and the checkpoint state that names only the last checkpoint."""

    files: tuple[ModelFile, ...]
    checkpoint_state: bytes | None


def find(store: Reader, model_dir: str) -> ModelFiles:
    """The model, the last checkpoint and all event files below a model_dir.

    The model is the newest SavedModel, or else what lies in `export/`; the last checkpoint is
    TensorFlow's, here or in `checkpoints/`, or else the newest file there. A program may leave only
    one of model and checkpoint; NothingThere is raised without both.
    """
    found = store.walk(model_dir)
    names = {posixpath.relpath(info.path, model_dir): info for info in found}
    last = _last_checkpoint(store, names)
    files = [
        *(_saved_model(names) or _exported(names)),
        *(_checkpoint(names, last) or _newest_checkpoint(names)),
        *(
            ModelFile(info, f"events/{name}")
            for name, info in names.items()
            if posixpath.basename(name).startswith(_EVENTS)
        ),
    ]
    if not any(file.target.startswith(("model/", "checkpoints/")) for file in files):
        raise NothingThere(f"no model and no checkpoint in {model_dir} — see the tasks' logs")
    name = posixpath.basename(last or "")
    state = f'model_checkpoint_path: "{name}"\nall_model_checkpoint_paths: "{name}"\n'
    return ModelFiles(tuple(files), state.encode() if last else None)


def _saved_model(names: dict[str, FileInfo]) -> list[ModelFile]:
    finished = [
        (info.modified_ms, posixpath.dirname(name))
        for name, info in names.items()
        if posixpath.basename(name) == _SAVED_MODEL and not _UNFINISHED.search(name)
    ]
    if not finished:
        return []
    _, newest = max(finished)
    prefix = f"{newest}/" if newest else ""
    return [
        ModelFile(info, f"model/{name[len(prefix) :]}")
        for name, info in names.items()
        if name.startswith(prefix) and (prefix or name.startswith((_SAVED_MODEL, "variables/")))
    ]


def _exported(names: dict[str, FileInfo]) -> list[ModelFile]:
    return [
        ModelFile(info, f"model/{name.removeprefix(_EXPORT)}")
        for name, info in names.items()
        if name.startswith(_EXPORT) and not _UNFINISHED.search(name)
    ]


def _newest_checkpoint(names: dict[str, FileInfo]) -> list[ModelFile]:
    saved = [info for name, info in names.items() if _is_checkpoint(name)]
    newest = max(saved, key=lambda info: (info.modified_ms, info.path), default=None)
    if newest is None:
        return []
    return [ModelFile(newest, f"{_CHECKPOINTS}{posixpath.basename(newest.path)}")]


def _is_checkpoint(name: str) -> bool:
    return name.startswith(_CHECKPOINTS) and not _UNFINISHED.search(name)


def _last_checkpoint(store: Reader, names: dict[str, FileInfo]) -> str | None:
    """The last checkpoint that TensorFlow's state names, as in model.ckpt-1400."""
    for directory in ("", _CHECKPOINTS):
        if found := names.get(f"{directory}{CHECKPOINT_STATE}"):
            state = store.read_bytes(found.path).decode("utf-8", "replace")
            latest = _LATEST.search(state)
            return f"{directory}{posixpath.basename(latest[1])}" if latest else None
    return None


def _checkpoint(names: dict[str, FileInfo], last: str | None) -> list[ModelFile]:
    if last is None:
        return []
    files = [
        ModelFile(info, f"{_CHECKPOINTS}{name.removeprefix(_CHECKPOINTS)}")
        for name, info in names.items()
        if name == "graph.pbtxt" or name.startswith(f"{last}.")
    ]
    if not any(file.target.endswith(".index") for file in files):
        raise NodeError(f"checkpoint {last} is named, but its files are not there")
    return files
