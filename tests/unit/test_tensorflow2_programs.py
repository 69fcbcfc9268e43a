"""Parts of the programs for current TensorFlow that need no TensorFlow.

It is not among the tools for tests; how they train is seen in tests/e2e.
"""

from __future__ import annotations

import gzip
import importlib.util
import io
import struct
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

PROGRAMS = Path(__file__).resolve().parents[2] / "training/programs"
ABSENT = ("fsspec", "keras", "tensorflow", "tf_keras")


class Library(ModuleType):
    """A library that is not there; what the programs name while they are imported."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Library(name)


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that imports a program by its name."""
    for name in ABSENT:
        monkeypatch.setitem(sys.modules, name, Library(name))

    def load(name: str) -> Any:
        spec = importlib.util.spec_from_file_location(name, PROGRAMS / f"{name}.py")
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


# --- what is trained next ------------------------------------------------------------------------


def settings(steps: int) -> Namespace:
    return Namespace(batch_size=4, train_steps=steps, steps_per_call=3, seed=1)


def flat(calls: Any) -> list[list[int]]:
    return [batch.tolist() for call in calls for batch in call]


def test_each_epoch_of_mirrored_training_sees_every_picture_once(program):
    made = flat(program("mnist_mwms").calls(42, settings(20), 0))
    assert len(made) == 20
    first, second = (sum(made[start : start + 10], []) for start in (0, 10))
    assert len(set(first)) == len(set(second)) == 40  # the last two of 42 make no batch
    assert first != second


def test_a_resumed_run_takes_up_the_batches_where_it_was(program):
    calls = program("mnist_mwms").calls
    assert flat(calls(42, settings(20), 13)) == flat(calls(42, settings(20), 0))[13:]
    assert flat(calls(42, settings(20), 20)) == []


def test_no_call_is_longer_than_asked(program):
    sizes = [len(call) for call in program("mnist_mwms").calls(42, settings(11), 0)]
    assert sizes == [3, 3, 3, 1, 1]


class Later:
    """A result that TensorFlow's coordinator would have later."""

    def __init__(self, value: tuple[float, int]) -> None:
        self.value = value

    def fetch(self) -> tuple[float, int]:
        return self.value


def test_orders_for_workers_add_up_and_are_limited_in_number(program):
    made: list[int] = []
    taken = 0

    def order(step: int, steps: int) -> Later:
        assert step == 7 + sum(made)
        made.append(steps)
        assert len(made) - taken <= 4
        return Later((0.5, 7 + sum(made)))

    for _, reached in program("mnist_keras_ps").Orders(order, 4, 20).until(7, 100):
        taken, last = taken + 1, reached
    assert sum(made) == 100 - 7 and last == 100
    assert made == [20, 20, 20, 20, 13]


def test_nothing_is_ordered_when_the_last_step_is_made(program):
    orders = program("mnist_keras_ps").Orders(pytest.fail, 4, 20)
    assert list(orders.until(100, 100)) == []


# --- what is told --------------------------------------------------------------------------------


def test_steps_are_told_in_their_order(program, capsys):
    told = program("mnist_keras_ps").Told(0, 100)
    for reached in (60, 120, 100, 180, 240):
        told.step(reached, 0.5)
    told.step(250, 0.25, last=True)
    told.step(250, 0.25, last=True)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == ["step=120", "step=240", "step=250"]


def test_a_lost_parameter_server_is_named_in_one_line(program, capsys):
    program("mnist_keras_ps").tell_why(
        RuntimeError(
            "Graph execution error:\n\n2 root error(s) found.\n  (0) UNAVAILABLE:  Socket closed\n"
            "from remote target /job:ps/replica:0/task:1 while calling /x\n"
        )
    )
    told = capsys.readouterr().err
    assert told.startswith("coordinator: ps-1 is lost: RuntimeError: (0) UNAVAILABLE")
    assert told.count("\n") == 1


# --- files ---------------------------------------------------------------------------------------


class Files:
    """A file system of fsspec's kind."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files

    def __getattr__(self, _name: str) -> Any:
        return lambda *_, **__: None

    def exists(self, path: str) -> bool:
        return any(name.startswith(path) for name in self.files)

    def ls(self, _path: str, detail: bool) -> list[str]:
        return list(self.files)

    def pipe_file(self, path: str, content: bytes) -> None:
        self.files[path] = content

    def rm_file(self, path: str) -> None:
        del self.files[path]

    def mv(self, old: str, new: str) -> None:
        assert new not in self.files
        self.files[new] = self.files.pop(old)


@pytest.mark.parametrize("name", ["mnist_keras_ps", "mnist_mwms"])
def test_checkpoints_are_ordered_by_step_and_parts_are_none(program, name):
    names = ["/c/step=900.tar", "/c/step=1000.tar", "/c/step=2.tar.ab.part", "/c/other"]
    found = program(name).checkpoints(Files(dict.fromkeys(names, b"")), "/c")
    assert found == [(900, "/c/step=900.tar"), (1000, "/c/step=1000.tar")]
    assert program(name).checkpoints(Files({}), "/c") == []


def test_a_chief_knows_that_all_is_trained(program, monkeypatch):
    module, directory = program("mnist_mwms"), "/m/checkpoints"
    files = Files(dict.fromkeys([f"{directory}/step=900.tar", f"{directory}/step=1000.tar"], b""))
    monkeypatch.setattr(module, "fsspec", Namespace(url_to_fs=lambda url: (files, url)))
    assert module.newest_step("/m/") == 1000
    assert module.newest_step("/other") == 0


def test_the_chief_goes_on_when_the_others_have_left_and_they_fail_when_it_has(
    program, monkeypatch
):
    module = program("mnist_mwms")
    broken = type("OpError", (Exception,), {})
    names = Namespace(function=lambda body: body, errors=Namespace(OpError=broken))
    monkeypatch.setattr(module, "tf", names)

    def run(_body: Any) -> None:
        raise broken

    module.take_leave(Namespace(run=run), chief=True)
    with pytest.raises(broken):
        module.take_leave(Namespace(run=run), chief=False)


@pytest.mark.parametrize("name", ["mnist_keras_ps", "mnist_mwms"])
def test_a_file_is_replaced_as_a_whole(program, name):
    files = Files({"/e/model": b"old"})
    program(name).put(files, "/e/model", b"new")
    assert files.files == {"/e/model": b"new"}


def test_workers_copy_pictures_once_and_inflate_them(program, tmp_path):
    pixels = np.arange(2 * 28 * 28, dtype=np.uint8).reshape(2, 28, 28)
    module = program("mnist_keras_ps")
    opened = []

    def open_file(path: str, _mode: str) -> io.BytesIO:
        opened.append(path)
        if not path.endswith(".gz"):
            raise FileNotFoundError(path)
        return io.BytesIO(gzip.compress(idx(pixels)))

    module.fsspec.open = open_file
    module.fetch_pictures("hdfs://n/data/", tmp_path)
    module.fetch_pictures("hdfs://n/data/", tmp_path)
    assert opened[:2] == [
        "hdfs://n/data/train-images-idx3-ubyte",
        "hdfs://n/data/train-images-idx3-ubyte.gz",
    ]
    assert len(opened) == 8
    assert len(list(tmp_path.iterdir())) == 4
    assert (module.read_idx(tmp_path / "train-images-idx3-ubyte") == pixels).all()


@pytest.mark.parametrize(
    ("name", "read"), [("mnist_keras_ps", "read_file"), ("mnist_mwms", "read_idx")]
)
def test_missing_data_is_named(program, name, read):
    module = program(name)

    def open_file(path: str, _mode: str) -> io.BytesIO:
        raise FileNotFoundError(path)

    module.fsspec.open = open_file
    with pytest.raises(SystemExit, match=r"no t10k-labels \(or .gz\) in hdfs://n/d"):
        getattr(module, read)("hdfs://n/d", "t10k-labels")
