"""Parts of the Horovod programs that need neither Horovod nor a framework."""

from __future__ import annotations

import gzip
import importlib.util
import json
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.unit.preprocess_fakes import DESTINATION, Progress, stage, staged_idx, work
from tests.unit.test_torch_programs import PROGRAMS, Files, Library, idx

from mayfly_train.preprocess import Options, preprocess

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


# --- preprocessed tensors -------------------------------------------------------------------------


def test_ranks_have_all_pictures_once_and_make_as_many_steps_for_any_numbers(program):
    chance = random.Random(9)
    cases = [(60_000, 64, 3), (60_000, 64, 2), (10, 7, 4), (7, 7, 7), (8, 1, 1)]
    for _ in range(200):
        world = chance.randrange(1, 9)
        size = chance.randrange(world, 200)
        cases.append((chance.randrange(size, 5000), size, world))
    for length, size, world in cases:
        ranks = [program.OwnBatches(length, size, world, rank, seed=1) for rank in range(world)]
        own = [index for batches in ranks for index in batches.own]
        assert own == list(range(length))
        steps = range(ranks[0].per_epoch)
        per_rank = [list(batches.parts(steps)) for batches in ranks]
        for parts, batches in zip(per_rank, ranks, strict=True):
            indices = np.concatenate(parts)
            assert len(set(indices.tolist())) == len(indices)  # none twice in an epoch
            assert indices.max() < len(batches.own)
        sizes = np.array([[len(part) for part in parts] for parts in per_rank]).sum(0)
        assert (sizes == size).all()


def test_own_batches_go_on_after_a_restart_in_their_order(program):
    whole = list(program.OwnBatches(100, 16, 3, 1, seed=1).parts(range(20)))
    rest = list(program.OwnBatches(100, 16, 3, 1, seed=1).parts(range(9, 20)))
    assert [part.tolist() for part in whole[9:]] == [part.tolist() for part in rest]
    assert whole[0].tolist() != whole[6].tolist()


@pytest.fixture
def stored(tmp_path):
    """What preprocessing leaves of small pictures, and their labels."""
    store, values = staged_idx(50, 12)
    pixels = np.arange(50 * 784, dtype=np.uint32).reshape(50, 28, 28).astype(np.uint8)
    tests = pixels[:12]
    names = ("train-images-idx3-ubyte", "t10k-images-idx3-ubyte")
    labels = {name: array for name, array in values.items() if "labels" in name}
    files = {**labels, **dict(zip(names, (pixels, tests), strict=True))}
    stage(store, {name: idx(array) for name, array in files.items()})
    options = Options("tensors", 7, (0.1307, 0.3081))
    preprocess(work(store, options), Progress())
    for name in store.names():
        (tmp_path / name).write_bytes(store.files[f"{DESTINATION}/{name}"])
    return tmp_path, pixels, labels["train-labels-idx1-ubyte"]


@pytest.mark.parametrize("world", [1, 2, 3, 11])
def test_ranks_read_what_preprocessing_made_as_they_would_read_idx(
    program, monkeypatch, stored, world
):
    directory, pixels, labels = stored
    opened = []

    def read_file(path):
        opened.append(path.rpartition("/")[2])
        path = Path(path)
        return path.read_bytes() if path.exists() else None

    monkeypatch.setattr(program, "read_file", read_file)
    about = program.preprocessed(f"{directory}/")
    assert about["counts"] == {"train": 50, "eval": 12}
    parts = []
    for rank in range(world):
        own = program.OwnBatches(50, 16, world, rank, seed=1).own
        opened.clear()
        parts.append(program.read_tensors(str(directory), about, "train", own))
        assert len(opened) <= len(own) // 7 + 2  # only the files that have some of its pictures
    images, found = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    expected = (pixels.reshape(50, -1).astype(np.float32) / 255 - program.MEAN) / program.STD
    assert images.dtype == np.float32 and (images == expected).all()
    assert found.dtype == np.int64 and (found == labels).all()


def test_idx_files_are_read_as_ever_where_nothing_was_preprocessed(program, monkeypatch, stored):
    directory, *_ = stored
    about = json.loads((directory / "metadata.json").read_text())
    contents = {"no": None, "records": {**about, "format": "tfrecord"}}
    for content in contents.values():
        data = None if content is None else json.dumps(content).encode()
        monkeypatch.setattr(program, "read_file", lambda _path, data=data: data)
        assert program.preprocessed("/data") is None
    assert program.scaling(None) == "float32 [n, 784]: pixels / 255, less 0.1307, by 0.3081"
    assert program.scaling(about) == program.scaling(None)


def test_pictures_of_another_size_are_refused(program, monkeypatch):
    data = json.dumps({"format": "tensors", "shape": [3, 32, 32]}).encode()
    monkeypatch.setattr(program, "read_file", lambda _path: data)
    with pytest.raises(SystemExit, match="this network takes 28x28"):
        program.preprocessed("/data")
