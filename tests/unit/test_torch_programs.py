"""Parts of the PyTorch programs that need no PyTorch, which is not among the tools for tests.

How they train is seen in tests/e2e/test_torch.py.
"""

from __future__ import annotations

import gzip
import importlib.util
import struct
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

PROGRAMS = Path(__file__).resolve().parents[2] / "training/programs"
ABSENT = (
    "fsspec", "lightning", "lightning.pytorch", "lightning.pytorch.callbacks",
    "lightning.pytorch.cli", "torch", "torch.distributed", "torch.nn", "torch.nn.parallel",
    "torch.utils", "torch.utils.data",
)  # fmt: skip


class Anything:
    """Stands for whatever a program takes from a library while it is imported."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __class_getitem__(cls, _: Any) -> type:
        return cls

    def __call__(self, decorated: Any) -> Any:
        return decorated


class Library(ModuleType):
    """A library that is not there; its names are Anything, its modules Libraries."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return sys.modules.get(f"{self.__name__}.{name}", Anything)


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that imports a program by its name."""
    for name in ABSENT:
        library = Library(name)
        library.__path__ = []
        monkeypatch.setitem(sys.modules, name, library)

    def load(name: str) -> Any:
        spec = importlib.util.spec_from_file_location(name, PROGRAMS / f"{name}.py")
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)  # dataclasses look their module up
        spec.loader.exec_module(module)
        return module

    return load


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


def test_processes_share_the_batches_that_one_would_see(program):
    shared = program("mnist_lightning").SharedBatches
    alone = list(shared(100, 16, 1, 0, seed=1))
    parts = [list(shared(100, 16, 3, rank, seed=1)) for rank in range(3)]
    assert len(alone) == len(parts[0]) == 100 // 16
    for batch, *own in zip(alone, *parts, strict=True):
        assert sorted(batch) == sorted(index for part in own for index in part)
        assert len({index for part in own for index in part}) == 16


@pytest.mark.parametrize(("length", "size", "world"), [(100, 16, 3), (60, 7, 4)])
def test_processes_draw_from_their_own_part_of_tensors(program, length, size, world):
    own = program("mnist_lightning").OwnBatches
    processes = [own(length, size, world, rank, seed=1) for rank in range(world)]
    assert [i for batches in processes for i in batches.own] == list(range(length))
    parts = [list(batches) for batches in processes]
    assert {len(steps) for steps in parts} == {length // size}
    for step in range(length // size):
        assert sum(len(steps[step]) for steps in parts) == size
    for steps, batches in zip(parts, processes, strict=True):
        drawn = [index for part in steps for index in part]
        assert len(set(drawn)) == len(drawn) and max(drawn) < len(batches.own)


def test_each_epoch_has_an_order_of_its_own(program):
    batches = program("mnist_lightning").SharedBatches(100, 10, 1, 0, seed=1)
    first = list(batches)
    batches.set_epoch(1)
    assert list(batches) != first
    batches.set_epoch(0)
    assert list(batches) == first


def test_a_batch_must_have_a_picture_for_each_process(program):
    with pytest.raises(SystemExit, match="--batch-size is 2, and 3 processes share it"):
        program("mnist_lightning").SharedBatches(100, 2, 3, 0, seed=1)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, (1, 1)),
        ({"WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "2"}, (3, 2)),  # torchrun
        ({"WORLD_SIZE": "3"}, (3, 1)),  # one process a node, without it
    ],
)
def test_nodes_and_processes_are_told_by_the_environment(
    program, monkeypatch, environment, expected
):
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert program("mnist_lightning").processes() == expected


class Files:
    """A file system of fsspec's kind."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files

    def cat_file(self, path: str) -> bytes:
        return self.files[path]

    def exists(self, _path: str) -> bool:
        return bool(self.files)

    def ls(self, _path: str, detail: bool) -> list[str]:
        return list(self.files)


def test_idx_pictures_are_padded_to_cifars_shape(program):
    pixels = np.arange(2 * 28 * 28, dtype=np.uint8).reshape(2, 28, 28)
    files = {
        "/d/train-images-idx3-ubyte.gz": gzip.compress(idx(pixels)),
        "/d/train-labels-idx1-ubyte": idx(np.array([3, 9], np.uint8)),
    }
    made, labels = program("cifar10_torch").read_idx_pair(Files(files), list(files), "/d", "train")
    assert made.shape == (2, 3, 32, 32)
    assert labels.tolist() == [3, 9]
    assert (made[:, 0, 2:30, 2:30] == pixels).all() and (made[:, 0] == made[:, 2]).all()
    assert made[:, :, :2].max() == made[:, :, :, 30:].max() == 0


def test_missing_data_is_named(program):
    with pytest.raises(SystemExit, match="no t10k-images-idx3-ubyte .* in s3://x"):
        program("cifar10_torch").read_idx_pair(Files({}), [], "s3://x", "test")


def test_cifars_binary_records(program):
    record = bytes([7]) + bytes(range(256)) * 12
    pixels, labels = program("cifar10_torch").read_binary([record, record])
    assert pixels.shape == (2, 3, 32, 32) and labels.tolist() == [7, 7]
    assert pixels[1].tobytes() == record[1:]


def test_checkpoints_are_ordered_by_step_not_by_name(program):
    names = ["/c/step=900.ckpt", "/c/step=1000.ckpt", "/c/step=2.ckpt.part", "/c/other"]
    found = program("cifar10_torch").checkpoints(Files(dict.fromkeys(names, b"")), "/c")
    assert found == [(1000, "/c/step=1000.ckpt"), (900, "/c/step=900.ckpt")]


def test_the_rate_rises_and_falls(program):
    rate = program("cifar10_torch").learning_rate
    args = Namespace(learning_rate=0.1, warmup=0.1)
    rates = [rate(args, part) for part in (0.0, 0.1, 0.5, 1.0)]
    assert rates[0] == pytest.approx(0.005) and rates[3] == pytest.approx(0.001)
    assert max(rates) == rates[1]
