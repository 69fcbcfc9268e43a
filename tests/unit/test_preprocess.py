"""Preprocessing: what is made, by one node and by several at once.

HDFS is a fake that makes each operation one step, as the NameNode does; the nodes are threads.
"""

from __future__ import annotations

import hashlib
import io
import json
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from tests.unit.preprocess_fakes import (
    DESTINATION,
    NAMES,
    QUICK,
    SOURCE,
    FakeSharedHdfs,
    Progress,
    idx,
    pictures,
    png,
    stage,
    staged_idx,
    work,
)

from mayfly_train import manifest
from mayfly_train.__main__ import main
from mayfly_train.convert import tfrecord
from mayfly_train.errors import BadInput
from mayfly_train.hdfs import HdfsFailure
from mayfly_train.preprocess import Options, preprocess
from mayfly_train.preprocess.claims import (
    ATTEMPTS,
    Board,
    Claim,
    GivenUp,
    Silence,
    View,
    free_claims,
    given_up,
    read_view,
)
from mayfly_train.preprocess.pictures import layout
from mayfly_train.preprocess.shards import cut, plan
from mayfly_train.preprocess.source import kind_of, wait_until_whole

TENSORS = Options("tensors", shards=7, normalise=(0.1307, 0.3081))
STATE = f"{DESTINATION}/_preprocess"


def run(store, options=TENSORS, node="n1", pace=QUICK):
    return preprocess(work(store, options, node, pace), Progress())


def run_together(store, count=4, options=TENSORS, pace=QUICK):
    with ThreadPoolExecutor(count) as pool:
        nodes = [f"n{number}" for number in range(count)]
        return list(pool.map(lambda node: run(store, options, node, pace), nodes))


def read_json(store, name):
    return json.loads(store.files[f"{DESTINATION}/{name}"])


def tensors(store, split):
    """All examples of a split, in the order of its files."""
    names = [name for name, _ in read_json(store, "metadata.json")["files"][split]]
    files = [np.load(io.BytesIO(store.files[f"{DESTINATION}/{name}"])) for name in names]
    return np.concatenate(files)


def require_whole(store, values):
    """Every example once, in order and normalised, and a manifest that agrees."""
    for split, (images, labels) in {"train": NAMES[:2], "eval": NAMES[2:]}.items():
        found = tensors(store, split)
        expected = (values[images].astype(np.float32) / 255 - 0.1307) / 0.3081
        assert found["image"].dtype == np.float32
        assert found["image"].shape == (len(values[images]), 1, *values[images].shape[1:])
        assert (found["image"][:, 0] == expected).all()
        assert (found["label"] == values[labels]).all()
    made = manifest.parse(store.files[f"{DESTINATION}/manifest.json"].decode())
    for entry in made.files:
        data = store.files[f"{DESTINATION}/{entry.path}"]
        assert (entry.size, entry.sha256) == (len(data), hashlib.sha256(data).hexdigest())
    assert {entry.path for entry in made.files} | {"manifest.json"} == set(store.names())
    assert not [path for path in store.files if path.endswith(".part")]
    return made


# --- which examples stand in which file -----------------------------------------------------------


def test_each_example_is_in_one_shard_for_any_numbers():
    chance = random.Random(7)
    cases = [(n, k) for n in range(12) for k in range(1, 12)]
    cases += [(chance.randrange(100_000), chance.randrange(1, 500)) for _ in range(300)]
    for count, parts in cases:
        ranges = cut(count, parts)
        assert [start for start, _ in ranges] == [0, *(stop for _, stop in ranges[:-1])]
        assert ranges[-1][1] == count
        sizes = [stop - start for start, stop in ranges]
        assert max(sizes) - min(sizes) <= 1
        assert len(ranges) == max(1, min(count, parts))


def test_a_plan_has_every_split_whole_in_shards_of_one_size():
    chance = random.Random(8)
    for _ in range(300):
        counts = {"train": chance.randrange(1, 70_000), "eval": chance.randrange(1, 10_000)}
        shards = plan(counts, chance.randrange(1, 200))
        assert len({shard.name for shard in shards}) == len(shards)
        largest = max(shard.examples for shard in shards if shard.split == "train")
        for split, count in counts.items():
            own = [shard for shard in shards if shard.split == split]
            assert sum(shard.examples for shard in own) == count
            assert all(shard.of == len(own) and shard.examples <= largest for shard in own)
    assert [s.name for s in plan({"train": 60_000, "eval": 10_000}, 16)][
        -1
    ] == "eval-00002-of-00003"


# --- what is made ---------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("train", "evaluation", "shards"), [(50, 12, 7), (3, 1, 8), (64, 64, 1)])
def test_one_node_makes_tensors(train, evaluation, shards, packed):
    store, values = staged_idx(train, evaluation, packed)
    result = run(store, replace(TENSORS, shards=shards))
    made = require_whole(store, values)
    assert result.changed and result.shards == result.of == len(made.files) - 1
    assert result.examples == train + evaluation
    about = read_json(store, "metadata.json")
    assert about["counts"] == {"train": train, "eval": evaluation}
    assert (about["shape"], about["classes"], about["name"]) == ([1, 4, 4], 10, "Small")
    assert about["normalised"] == {"mean": 0.1307, "std": 0.3081}
    assert made.extra["shards"][f"train-00000-of-{min(train, shards):05d}"]["attempts"] == 1


def test_a_shard_reads_only_its_own_part_of_the_source():
    store, values = staged_idx(50, 12)
    run(store)
    reads = [entry for entry in store.ranges if entry[1] >= 8 and "train-images" in entry[0]]
    pixels = sorted((offset, length) for _, offset, length in reads if offset >= 16)
    assert sum(length for _, length in pixels) == values[NAMES[0]].size
    assert max(length for _, length in pixels) <= 8 * 16


def test_without_normalisation_tensors_go_from_0_to_1():
    store, values = staged_idx()
    run(store, Options("tensors", 2))
    expected = values[NAMES[0]].astype(np.float32) / 255
    assert (tensors(store, "train")["image"][:, 0] == expected).all()
    assert read_json(store, "metadata.json")["normalised"] == {"mean": 0.0, "std": 1.0}


def records(store, tmp_path, split):
    found = []
    for name, _ in read_json(store, "metadata.json")["files"][split]:
        (tmp_path / name).write_bytes(store.files[f"{DESTINATION}/{name}"])
        found += list(tfrecord.read(tmp_path / name))
    return found


def test_tfrecords_keep_bytes_unless_normalisation_is_asked(tmp_path):
    store, values = staged_idx()
    run(store, Options("tfrecord", 3))
    assert "train-00002-of-00003.tfrecords" in store.names()
    found = [tfrecord.decode_example(record) for record in records(store, tmp_path, "train")]
    assert [image for image, _ in found] == [image.tobytes() for image in values[NAMES[0]]]
    assert [label for _, label in found] == values[NAMES[1]].tolist()
    about = read_json(store, "metadata.json")
    assert (about["image"], about["normalised"]) == ("uint8", None)


def test_tfrecords_of_normalised_pixels_hold_floats(tmp_path):
    store, values = staged_idx()
    run(store, Options("tfrecord", 3, (0.5, 0.25)))
    first = records(store, tmp_path, "eval")[0]
    expected = (values[NAMES[2]][0].astype(np.float32) / 255 - 0.5) / 0.25
    assert expected.astype("<f4").tobytes() in first
    assert tfrecord.encode_float_example(expected.tobytes(), int(values[NAMES[3]][0])) == first
    assert read_json(store, "metadata.json")["image"] == "float32"


def test_images_of_a_class_each_are_mixed_and_resized():
    store = FakeSharedHdfs()
    colours = {"cat": 10, "dog": 200}
    files = {
        f"{name}/{number:02d}.png": png(np.full((6, 5, 3), colour, np.uint8))
        for name, colour in colours.items()
        for number in range(15)
    }
    stage(store, {**files, "README.txt": b"not an image"})
    run_together(store, 2, Options("tensors", 4, image_size=3))
    about = read_json(store, "metadata.json")
    assert about["counts"] == {"train": 27, "eval": 3}
    assert (about["class_names"], about["shape"]) == (["cat", "dog"], [3, 3, 3])
    found = tensors(store, "train")
    expected = np.array([10, 200], np.float32)[found["label"]] / 255
    assert (found["image"] == expected[:, None, None, None]).all()
    assert len(set(found["label"][:10].tolist())) == 2


def test_directories_of_splits_are_taken_as_they_are():
    names = ["train/a/1.png", "train/b/2.JPG", "test/a/3.png", "validation/b/4.png", "train/x.txt"]
    classes, items = layout(names)
    assert classes == ("a", "b")
    assert {split: len(of) for split, of in items.items()} == {
        "train": 2, "eval": 1, "validation": 1,
    }  # fmt: skip
    assert layout([*names, "stray/5.png"])[0] == ("a", "b")


# --- together -------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_several_nodes_make_each_shard_once(seed):
    random.seed(seed)
    store, values = staged_idx(100, 30)
    store.travel_s = 0.002
    results = run_together(store, 5, replace(TENSORS, shards=20))
    made = require_whole(store, values)
    assert sum(result.shards for result in results) == len(made.files) - 1 == 26
    assert len(store.written) == 26
    assert all(said["attempts"] == 1 for said in made.extra["shards"].values())


def test_a_second_run_changes_nothing():
    store, _ = staged_idx()
    run(store)
    before = dict(store.files)
    result = run(store, node="n2")
    assert (result.changed, store.files) == (False, before)


def test_a_shard_that_is_there_is_not_written_again():
    store, values = staged_idx()
    final = f"{DESTINATION}/train-00003-of-00007.npy"
    board = Board(store, STATE, "lost", QUICK)
    run(store)
    for path in [p for p in store.files if p.endswith(".done") or "manifest.json" in p]:
        if path.startswith(SOURCE):
            continue
        data = store.files.pop(path)
        if path.endswith(".done"):  # as if each node had been lost before it said so
            store.put(path.replace(".done", ".1.record"), data)
    for path in [p for p in store.files if "/result." in p]:
        del store.files[path]
    store.written.clear()
    assert board.read_record(Claim("train-00003-of-00007", 1))["node"] == "n1"
    run(store, node="n2")
    made = require_whole(store, values)
    assert store.written == []
    assert final in store.files
    assert {said["node"] for said in made.extra["shards"].values()} == {"n1"}


def test_a_shard_of_a_node_that_fell_silent_is_redone_by_another():
    store, values = staged_idx()
    board = Board(store, STATE, "lost", QUICK)
    assert board.take(Claim("train-00002-of-00007", 1))
    store.put(f"{STATE}/train-00002-of-00007.1.part", b"half of it")
    run_together(store, 3)
    made = require_whole(store, values)
    attempts = {name: said["attempts"] for name, said in made.extra["shards"].items()}
    assert attempts.pop("train-00002-of-00007") == 2
    assert set(attempts.values()) == {1}


def test_a_node_that_wakes_up_late_cannot_replace_what_another_has_made():
    store, values = staged_idx()
    asleep, awake = threading.Event(), threading.Event()
    sleeper = threading.local()

    def before_write(path, web):
        if getattr(sleeper, "sleeps", False) and not awake.is_set():
            asleep.set()
            assert awake.wait(30)

    store.before_write = before_write

    def sleep_in_the_first_shard():
        sleeper.sleeps = True
        # It no longer renews after this time, as a stopped process does not.
        return run(store, node="late", pace=replace(QUICK, stuck=0.0))

    with ThreadPoolExecutor(2) as pool:
        late = pool.submit(sleep_in_the_first_shard)
        assert asleep.wait(30)
        other = pool.submit(run, store, TENSORS, "quick")
        assert other.result(30).shards == 9
        awake.set()
        assert late.result(30).shards <= 1
    require_whole(store, values)


def test_of_many_that_take_over_at_once_one_wins():
    for _ in range(50):
        store = FakeSharedHdfs()
        store.travel_s = 0.001
        claim = Claim("train-00000-of-00001", 2)
        boards = [Board(store, STATE, f"n{number}", QUICK) for number in range(8)]
        together = threading.Barrier(8)

        def take(board, together=together, claim=claim):
            together.wait()
            return board.take(claim)

        with ThreadPoolExecutor(8) as pool:
            won = list(pool.map(take, boards))
        assert won.count(True) == 1
        holder = read_view(store.list_directory(STATE)).holders[claim]
        assert holder == f"n{won.index(True)}"


def test_many_that_see_the_same_silence_redo_the_shard_once():
    """The whole race: eight nodes look, judge and take over, again and again."""
    for seed in range(5):
        random.seed(seed)
        store, values = staged_idx(8, 2)
        store.travel_s = 0.002
        lost = Board(store, STATE, "lost", QUICK)
        for name in [shard.name for shard in plan({"train": 8, "eval": 2}, 2)]:
            assert lost.take(Claim(name, 1))
        results = run_together(store, 8, replace(TENSORS, shards=2))
        made = require_whole(store, values)
        assert {said["attempts"] for said in made.extra["shards"].values()} == {2}
        assert len(store.written) == len(made.files) - 1
        assert sum(result.shards for result in results) == len(made.files) - 1


# --- failures -------------------------------------------------------------------------------------


def test_an_error_is_tried_again_by_whoever_is_free(no_pause):
    store, values = staged_idx()
    failing = [True] * 2

    def before_write(path, web):
        if "train-00001" in path and failing:
            failing.pop()
            raise ValueError("something\nbroke")

    store.before_write = before_write
    run_together(store, 2)
    made = require_whole(store, values)
    assert made.extra["shards"]["train-00001-of-00007"]["attempts"] == 3
    error = store.files[f"{STATE}/train-00001-of-00007.1.error"].decode()
    assert error.endswith(": something broke")


def test_a_failed_native_write_is_repeated_through_webhdfs(no_pause):
    store, values = staged_idx()

    def before_write(path, web):
        if not web:
            raise HdfsFailure("a DataNode died")

    store.before_write = before_write
    run(store)
    made = require_whole(store, values)
    assert {said["attempts"] for said in made.extra["shards"].values()} == {1}


def test_the_third_error_fails_the_run_on_all_nodes_and_names_the_shard(no_pause):
    store, _ = staged_idx()

    def before_write(path, web):
        if "train-00001" in path:
            raise BadInput("the pixels are too dark — light them")

    store.before_write = before_write
    with ThreadPoolExecutor(3) as pool:
        nodes = [pool.submit(run, store, TENSORS, f"n{number}") for number in range(3)]
        errors = [node.exception(30) for node in nodes]
    for error in errors:
        assert isinstance(error, GivenUp) and "\n" not in str(error)
        assert "train-00001-of-00007 failed 3 times, at last on n" in str(error)
        assert "the pixels are too dark" in str(error)
    assert "manifest.json" not in store.names()


def test_a_silence_at_the_last_attempt_fails_the_run_too():
    store, _ = staged_idx()
    board = Board(store, STATE, "lost", QUICK)
    for attempt in range(1, ATTEMPTS + 1):
        board.take(Claim("train-00001-of-00007", attempt))
    with pytest.raises(GivenUp, match="failed 3 times, at last on lost went silent"):
        run(store)


def test_an_image_that_cannot_be_read_is_named(no_pause):
    store = FakeSharedHdfs()
    good = png(np.zeros((2, 2, 3), np.uint8))
    stage(store, {"a/1.png": good, "a/2.png": b"no image", "a/3.png": good, "b/4.png": good})
    with pytest.raises(GivenUp, match=r"cannot read the image /mayfly/data/a/2\.png"):
        run(store, Options("tensors", 4, image_size=2))


def test_a_write_that_is_cut_is_not_renamed(no_pause, monkeypatch):
    store, _ = staged_idx()
    whole = store.write_chunks

    def cut_short(path, chunks, web=False):
        whole(path, chunks, web)
        if "train-00004" in path:
            store.files[path] = store.files[path][:-1]

    monkeypatch.setattr(store, "write_chunks", cut_short)
    with pytest.raises(GivenUp, match="train-00004-of-00007 failed .* write it again"):
        run(store)
    assert "train-00004-of-00007.npy" not in store.names()


# --- bad input ------------------------------------------------------------------------------------


def damaged(change):
    store, values = FakeSharedHdfs(), pictures(8, 4)
    files = {name: idx(array) for name, array in values.items()}
    change(files)
    stage(store, files)
    return store


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda files: files.pop(NAMES[1]), "nothing to preprocess: t10k"),
        (lambda files: files.update({NAMES[0]: b"\0\0\x0d\3" + bytes(16)}), "not an IDX file"),
        (lambda files: files.update({NAMES[1]: idx(np.zeros(7, np.uint8))}), "do not fit"),
        (lambda files: files.update({NAMES[0]: idx(np.zeros((8, 2), np.uint8))}), "do not fit"),
        (
            lambda files: files.update({NAMES[2]: idx(np.zeros((4, 5, 5), np.uint8))}),
            r"images of \(4, 4\) to train and \(5, 5\)",
        ),
    ],
)  # fmt: skip
def test_a_source_that_is_not_idx_is_refused(change, says):
    with pytest.raises(BadInput, match=says) as caught:
        run(damaged(change))
    assert "\n" not in str(caught.value)


def test_a_gzipped_file_that_is_cut_is_refused():
    store, _ = staged_idx(packed=True)
    name = f"{NAMES[0]}.gz"
    files = {
        path.removeprefix(f"{SOURCE}/"): data
        for path, data in store.files.items()
        if not path.endswith("manifest.json")
    }
    stage(store, {**files, name: files[name][:-20]})
    with pytest.raises(BadInput, match="cannot unpack /mayfly/data/train-images"):
        run(store)


def test_a_destination_with_other_files_is_refused():
    store, _ = staged_idx()
    store.put(f"{DESTINATION}/train.tfrecords", b"x")
    with pytest.raises(BadInput, match=r"train\.tfrecords in HDFS is not of this preprocessing"):
        run(store)


def test_other_options_in_the_same_destination_are_refused():
    store, _ = staged_idx()
    run(store)
    with pytest.raises(BadInput, match="made from other data or with other options"):
        run(store, replace(TENSORS, normalise=(0.5, 0.5)))


def test_a_shard_that_somebody_else_has_written_is_not_taken(no_pause):
    store, _ = staged_idx()
    store.put(f"{DESTINATION}/train-00000-of-00007.npy", b"foreign")
    with pytest.raises(GivenUp, match="was written by somebody else"):
        run(store)
    assert store.files[f"{DESTINATION}/train-00000-of-00007.npy"] == b"foreign"


def test_a_result_that_lost_a_file_is_told():
    store, _ = staged_idx()
    run(store)
    del store.files[f"{DESTINATION}/train-00000-of-00007.npy"]
    with pytest.raises(BadInput, match="train-00000-of-00007.npy is missing"):
        run(store)


@pytest.mark.parametrize(
    "options",
    [
        {"to": "csv"},
        {"to": "tensors", "shards": 0},
        {"to": "tensors", "image_size": 0},
        {"to": "tensors", "normalise": (0.0, 0.0)},
        {"to": "tensors", "normalise": (float("nan"), 1.0)},
    ],
)
def test_options_that_cannot_work_are_refused(options):
    with pytest.raises(BadInput):
        Options(**options)


def test_a_name_that_no_file_can_have_is_refused():
    with pytest.raises(BadInput, match="not a node's name: 'a/b'"):
        run(staged_idx()[0], node="a/b")


def test_the_command_refuses_to_write_into_its_source(capsys):
    words = ["--namenode-http=http://n:9870", "--worker=n1", "--to=tensors"]
    source = "hdfs://n:9000/mayfly/data"
    for destination in (source, f"{source}/x", "hdfs://other:9000/mayfly/x"):
        assert main(["preprocess", *words, source, destination]) == 2
        assert "name a directory beside it" in capsys.readouterr().err


def test_what_can_be_preprocessed_is_known_by_its_names():
    assert kind_of([f"{name}.gz" for name in NAMES]) == "idx"
    assert kind_of(["cat/1.png", "LICENSE"]) == "images"
    for names in (["train-00000-of-00001.tfrecords"], ["1.png"], ["a/b/c/1.png"], []):
        with pytest.raises(BadInput, match="nothing to preprocess"):
            kind_of(names)


# --- waiting and judging --------------------------------------------------------------------------


def test_it_waits_until_other_nodes_have_staged_their_share():
    store, _ = staged_idx()
    late = store.files.pop(f"{SOURCE}/{NAMES[2]}")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wait_until_whole, store, SOURCE, sleep=lambda _: time.sleep(0.01))
        assert not waiting.done()
        store.put(f"{SOURCE}/{NAMES[2]}", late)
        assert len(waiting.result(20).files) == 4


def test_a_dataset_that_never_becomes_whole_is_told():
    store, _ = staged_idx()
    del store.files[f"{SOURCE}/{NAMES[2]}"]
    clock = iter(range(0, 10_000, 100))
    with pytest.raises(HdfsFailure, match=f"is not whole: {NAMES[2]} is missing"):
        wait_until_whole(store, SOURCE, 900, lambda: next(clock), lambda _: None)
    with pytest.raises(HdfsFailure, match=r"no manifest\.json"):
        wait_until_whole(FakeSharedHdfs(), SOURCE, 0, iter(range(9)).__next__, lambda _: None)


def test_a_claim_is_silent_only_while_one_looks():
    now = [0.0]
    silence = Silence(replace(QUICK, look=1.0, silent=10.0, clock=lambda: now[0]))
    view = View({Claim("a", 1): 5})

    def look(after_s, view=view):
        now[0] += after_s
        return silence.after(view)

    assert look(0) == look(1) == frozenset()
    assert look(3600) == frozenset()  # it was busy: that counts as two seconds
    assert [bool(look(1)) for _ in range(8)] == [False] * 6 + [True, True]
    assert look(1, View({Claim("a", 1): 6})) == frozenset()
    assert look(1, View()) == frozenset()


def test_which_claims_are_free():
    a1, b3 = Claim("a", 1), Claim("b", 3)
    view = View({a1: 1, b3: 1, Claim("b", 2): 1}, errors=frozenset({Claim("b", 2)}))
    assert free_claims(["a", "b", "c"], view, ()) == [Claim("c", 1)]
    assert free_claims(["a"], view, {a1}) == [Claim("a", 2)]
    assert free_claims(["b"], view, {b3}) == []
    assert given_up(["a", "b"], view, {a1}) is None
    assert given_up(["a", "b"], view, {b3}) == b3
