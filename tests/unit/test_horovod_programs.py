"""Parts of the Horovod programs that need neither Horovod nor a framework."""

from __future__ import annotations

import gzip
import importlib.util
import sys
from typing import Any

import numpy as np
import pytest
from tests.unit.test_torch_programs import PROGRAMS, Files, Library, idx

ABSENT = ("fsspec", "horovod", "horovod.torch", "horovod.tensorflow", "tensorflow", "torch")


@pytest.fixture(params=["mnist_horovod_torch", "mnist_horovod_keras"])
def program(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Each of the two programs."""
    return load(request.param, monkeypatch)


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    for absent in ABSENT:
        library = Library(absent)
        library.__path__ = []
        monkeypatch.setitem(sys.modules, absent, library)
    spec = importlib.util.spec_from_file_location(name, PROGRAMS / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_ranks_share_the_batches_that_one_would_see(program, world):
    steps = range(20)
    alone = list(program.SharedBatches(100, 16, 1, 0, seed=1).parts(steps))
    ranks = [program.SharedBatches(100, 16, world, rank, seed=1) for rank in range(world)]
    parts = [list(shared.parts(steps)) for shared in ranks]
    for batch, *own in zip(alone, *parts, strict=True):
        assert sorted(batch) == sorted(index for part in own for index in part)
        assert len(set(batch.tolist())) == 16


def test_each_epoch_has_all_pictures_but_the_rest_once_in_an_order_of_its_own(program):
    shared = program.SharedBatches(100, 16, 1, 0, seed=1)
    assert shared.per_epoch == 6
    epochs = [np.concatenate(list(shared.parts(range(6 * e, 6 * e + 6)))) for e in range(2)]
    assert [len(set(epoch.tolist())) for epoch in epochs] == [96, 96]
    assert epochs[0].tolist() != epochs[1].tolist()


def test_a_run_that_goes_on_with_other_ranks_has_the_pictures_that_it_would_have_had(program):
    whole = list(program.SharedBatches(100, 16, 1, 0, seed=1).parts(range(20)))
    rest = [list(program.SharedBatches(100, 16, 2, r, seed=1).parts(range(9, 20))) for r in (0, 1)]
    for batch, *own in zip(whole[9:], *rest, strict=True):
        assert sorted(batch) == sorted(index for part in own for index in part)


def test_batches_that_cannot_be_shared_are_refused(program):
    with pytest.raises(SystemExit, match="--batch-size is 2, and 3 ranks share it"):
        program.SharedBatches(100, 2, 3, 0, seed=1)
    with pytest.raises(SystemExit, match="a step of 128 samples is more than all 100"):
        program.SharedBatches(100, 128, 2, 0, seed=1)


def test_the_rate_rises_in_a_line_and_is_scaled_as_the_samples_of_a_step_are(program):
    words = ["--data-dir", "d", "--job-dir", "j", "--learning-rate", "0.1", "--warmup", "0.1"]
    args = program.parse_args(words)
    rates = [program.rate(args, step, 100, 4) for step in (0, 4, 9, 10, 99)]
    assert rates == pytest.approx([0.01, 0.05, 0.1, 0.1, 0.1])
    args = program.parse_args([*words, "--batch-per-rank"])
    assert program.rate(args, 99, 100, 4) == pytest.approx(0.4)
    assert program.rate(program.parse_args([*words, "--warmup", "0"]), 0, 100, 4) == 0.1


def test_checkpoints_are_ordered_by_step_not_by_name(monkeypatch):
    names = ["/c/step=900.ckpt", "/c/step=1000.ckpt", "/c/step=2000.ckpt.part", "/c/other"]
    files = Files(dict.fromkeys(names, b""))
    files.invalidate_cache = lambda: None
    found = load("mnist_horovod_torch", monkeypatch).checkpoints(files, "/c")
    assert found == [(1000, "/c/step=1000.ckpt"), (900, "/c/step=900.ckpt")]


def test_idx_files_are_read_gzipped_or_not(monkeypatch, tmp_path):
    module = load("mnist_horovod_torch", monkeypatch)
    module.fsspec.open = open
    pixels = np.arange(2 * 28 * 28, dtype=np.uint8).reshape(2, 28, 28)
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(pixels)))
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx(np.array([3, 9], np.uint8)))
    assert (module.read_idx(str(tmp_path), "train-images-idx3-ubyte") == pixels).all()
    assert module.read_idx(f"{tmp_path}/", "train-labels-idx1-ubyte").tolist() == [3, 9]
    with pytest.raises(SystemExit, match=r"no t10k-images-idx3-ubyte \(or .gz\) in "):
        module.read_idx(str(tmp_path), "t10k-images-idx3-ubyte")
