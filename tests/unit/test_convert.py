from __future__ import annotations

import gzip
import io
import json
import struct
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mayfly_train import convert, manifest
from mayfly_train.__main__ import main
from mayfly_train.convert import Layout, Options, tfrecord
from mayfly_train.errors import BadInput
from mayfly_train.verify import verify_directory

CIFAR_CLASSES = [
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
]


def read_split(directory: Path, split: str) -> list[tuple[bytes, int]]:
    files = json.loads((directory / "manifest.json").read_text())["splits"][split]
    return [tfrecord.decode_example(r) for name in files for r in tfrecord.read(directory / name)]


def metadata(directory: Path) -> dict:
    return json.loads((directory / "metadata.json").read_text())


# --- TFRecord ---


def test_an_example_is_encoded_as_tensorflow_encodes_it():
    # tf.train.Example(...).SerializeToString(deterministic=True) of TensorFlow 2.15.1, recorded.
    assert tfrecord.encode_example(b"\x01\x02\x03", 300).hex() == (
        "0a230a100a05696d61676512070a050a03010203"
        "0a0f0a056c6162656c12061a040a02ac02"
    )  # fmt: skip


def test_a_file_is_framed_as_tensorflow_frames_it(tmp_path):
    # tf.io.TFRecordWriter of TensorFlow 2.15.1, recorded for the one record b"hello".
    with tfrecord.Writer(tmp_path / "f") as writer:
        writer.write(b"hello")
    assert (tmp_path / "f").read_bytes().hex() == (
        "0500000000000000eab2043e68656c6c6fbb1f1c19"
    )  # fmt: skip


@pytest.mark.parametrize("label", [0, 1, 127, 128, 300, 2**40])
@pytest.mark.parametrize("size", [0, 1, 127, 128, 3072, 150528])
def test_an_example_comes_back(tmp_path, label, size):
    image = bytes(number % 251 for number in range(size))
    with tfrecord.Writer(tmp_path / "f") as writer:
        writer.write(tfrecord.encode_example(image, label))
        writer.write(tfrecord.encode_example(image[::-1], label + 1))
    records = [tfrecord.decode_example(record) for record in tfrecord.read(tmp_path / "f")]
    assert records == [(image, label), (image[::-1], label + 1)]


def test_every_damaged_byte_and_every_cut_is_noticed(tmp_path):
    path = tmp_path / "f"
    with tfrecord.Writer(path) as writer:
        writer.write(b"some record")
    whole = path.read_bytes()
    for position in range(len(whole)):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        with pytest.raises(BadInput):
            list(tfrecord.read(path))
        if position:
            path.write_bytes(whole[:position])
            with pytest.raises(BadInput, match="ends within a record"):
                list(tfrecord.read(path))


@pytest.mark.parametrize("record", [b"", b"\x0a", b"\xff\xff", b"\x0a\x05ab", b"\x08\x01"])
def test_what_is_no_example_is_refused(record):
    with pytest.raises(BadInput, match="not an example"):
        tfrecord.decode_example(record)


# --- CIFAR-10 ---


def cifar_archive(path: Path, per_file: int = 20, **changed: bytes | None) -> dict[str, bytes]:
    """A small archive in the official layout; returns its files."""
    rng = np.random.default_rng(1)
    names = [f"data_batch_{number}.bin" for number in range(1, 6)] + ["test_batch.bin"]
    files: dict[str, bytes | None] = {"batches.meta.txt": "\n".join(CIFAR_CLASSES).encode() + b"\n"}
    for name in names:
        records = rng.integers(0, 256, (per_file, 3073), dtype=np.uint8)
        records[:, 0] = rng.integers(0, 10, per_file)
        files[name] = records.tobytes()
    files |= {name.replace("_bin", ".bin"): data for name, data in changed.items()}
    kept = {name: data for name, data in files.items() if data is not None}
    with tarfile.open(path, "w:gz") as archive:
        for name, data in kept.items():
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return kept


def test_the_cifar_10_archive_becomes_sharded_records(tmp_path):
    files = cifar_archive(tmp_path / "cifar-10-binary.tar.gz")
    out = tmp_path / "out"
    made = convert.convert(tmp_path / "cifar-10-binary.tar.gz", out, Options())
    assert verify_directory(out) == made
    assert metadata(out) == {
        "name": "cifar-10",
        "shape": [3, 32, 32],
        "classes": 10,
        "counts": {"train": 90, "validation": 10, "eval": 20},
        "class_names": CIFAR_CLASSES,
    }
    assert "train-00000-of-00008.tfrecords" in made.by_path()
    expected = [(r[1:], r[0]) for r in chunks(files["test_batch.bin"], 3073)]
    assert sorted(read_split(out, "eval")) == sorted(expected)
    train = b"".join(files[f"data_batch_{number}.bin"] for number in range(1, 6))
    together = read_split(out, "train") + read_split(out, "validation")
    assert sorted(together) == sorted((r[1:], r[0]) for r in chunks(train, 3073))


def chunks(data: bytes, size: int) -> list[bytes]:
    return [data[start : start + size] for start in range(0, len(data), size)]


def test_the_unpacked_archive_gives_the_same_files(tmp_path):
    files = cifar_archive(tmp_path / "a.tar.gz")
    unpacked = tmp_path / "cifar-10-batches-bin"
    unpacked.mkdir()
    for name, data in files.items():
        (unpacked / name).write_bytes(data)
    digests = [
        {
            entry.path: entry.sha256
            for entry in convert.convert(source, tmp_path / out, Options()).files
        }
        for source, out in ((tmp_path / "a.tar.gz", "one"), (unpacked, "two"))
    ]
    assert digests[0] == digests[1]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"data_batch_3_bin": None}, "lacks data_batch_3.bin"),
        ({"data_batch_3_bin": b"x" * 3072}, "not a multiple of 3073"),
        ({"data_batch_3_bin": b""}, "data_batch_3.bin .* has 0 bytes"),
        ({"data_batch_3_bin": b"\x0a" * 3073}, "has label 10"),
    ],
)
def test_a_wrong_cifar_10_archive_is_explained(tmp_path, changed, message):
    cifar_archive(tmp_path / "a.tar.gz", **changed)
    with pytest.raises(BadInput, match=message):
        convert.convert(tmp_path / "a.tar.gz", tmp_path / "out", Options())


def test_a_cut_archive_is_explained(tmp_path):
    cifar_archive(tmp_path / "a.tar.gz")
    data = (tmp_path / "a.tar.gz").read_bytes()
    (tmp_path / "a.tar.gz").write_bytes(data[: len(data) // 2])
    for kind in ("cifar10", "auto"):
        with pytest.raises(BadInput, match=r"cannot read .*a\.tar\.gz"):
            convert.convert(tmp_path / "a.tar.gz", tmp_path / "out", Options(format=kind))


# --- IDX ---


def idx_bytes(array: np.ndarray) -> bytes:
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


def idx_directory(path: Path, compress: bool) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(2)
    path.mkdir()
    arrays = {}
    for prefix, count in (("train", 30), ("t10k", 10)):
        arrays[f"{prefix}-images-idx3-ubyte"] = rng.integers(1, 256, (count, 28, 28), np.uint8)
        arrays[f"{prefix}-labels-idx1-ubyte"] = rng.integers(0, 10, count, np.uint8)
    for name, array in arrays.items():
        data = idx_bytes(array)
        if compress:
            (path / f"{name}.gz").write_bytes(gzip.compress(data))
        else:
            (path / name).write_bytes(data)
    return arrays


@pytest.mark.parametrize("compress", [True, False])
def test_idx_images_keep_their_shape(tmp_path, compress):
    arrays = idx_directory(tmp_path / "digits", compress)
    layout = Layout(single_file=True)
    out = tmp_path / "out"
    made = convert.convert(tmp_path / "digits", out, Options(layout=layout))
    names = ["eval.tfrecords", "metadata.json", "train.tfrecords", "validation.tfrecords"]
    assert sorted(made.by_path()) == names
    assert metadata(out)["shape"] == [1, 28, 28]
    assert metadata(out)["name"] == "digits"
    images, labels = arrays["t10k-images-idx3-ubyte"], arrays["t10k-labels-idx1-ubyte"]
    expected = [(image.tobytes(), label) for image, label in zip(images, labels, strict=True)]
    assert read_split(out, "eval") == expected


def test_padded_idx_images_stand_in_the_middle_of_three_equal_channels(tmp_path):
    arrays = idx_directory(tmp_path / "digits", True)
    options = Options(padded=True, name="unit digits", layout=Layout(validation_fraction=0))
    made = convert.convert(tmp_path / "digits", tmp_path / "out", options)
    assert metadata(tmp_path / "out")["shape"] == [3, 32, 32]
    assert made.extra["name"] == "unit digits"
    assert set(made.extra["splits"]) == {"train", "eval"}
    image, label = next(iter(read_split(tmp_path / "out", "eval")))
    channels = np.frombuffer(image, np.uint8).reshape(3, 32, 32)
    for channel in channels:
        assert (channel[2:30, 2:30] == arrays["t10k-images-idx3-ubyte"][0]).all()
        assert channel.sum() == channel[2:30, 2:30].sum()
    assert label == arrays["t10k-labels-idx1-ubyte"][0]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "cannot read"),
        (b"\0\0\x08\x03\0", "cannot read"),
        (struct.pack(">HBBI", 0, 9, 1, 1) + b"x", "not an IDX file of unsigned bytes"),
        (struct.pack(">HBBI", 0, 8, 1, 5) + b"xxxx", "holds 4 values, its header says 5"),
    ],
)
def test_a_wrong_idx_file_is_explained(tmp_path, data, message):
    (tmp_path / "f").write_bytes(data)
    with pytest.raises(BadInput, match=message):
        convert.idx.read_array(tmp_path / "f")


def test_a_missing_idx_file_is_named(tmp_path):
    idx_directory(tmp_path / "digits", False)
    (tmp_path / "digits/t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(BadInput, match="no t10k-labels-idx1-ubyte"):
        convert.convert(tmp_path / "digits", tmp_path / "out", Options(format="idx"))


# --- images ---


def image_tree(root: Path, classes: tuple[str, ...], count: int = 10) -> None:
    """Images of one colour each: the red value is ten times the label's place, plus the number."""
    for place, name in enumerate(classes):
        (root / name).mkdir(parents=True)
        for number in range(count):
            colour = (10 * place + number, 100, 200)
            Image.new("RGB", (5 + number, 9), colour).save(root / name / f"{number}.png")


def test_images_are_resized_and_labelled_in_the_order_of_the_named_classes(tmp_path):
    classes = ("kid", "young", "adult", "elder")
    image_tree(tmp_path / "faces", classes)
    options = Options(class_names=classes, image_size=16)
    out = tmp_path / "out"
    convert.convert(tmp_path / "faces", out, options)
    assert metadata(out) == {
        "name": "faces",
        "shape": [3, 16, 16],
        "classes": 4,
        "counts": {"train": 32, "validation": 4, "eval": 4},
        "class_names": list(classes),
    }
    records = [r for split in ("train", "validation", "eval") for r in read_split(out, split)]
    assert len(records) == 40
    for image, label in records:
        red, green, blue = np.frombuffer(image, np.uint8).reshape(3, 16, 16)
        assert red[0, 0] // 10 == label and (red == red[0, 0]).all()
        assert (green == 100).all() and (blue == 200).all()
    assert len({(image, label) for image, label in records}) == 40


def test_directories_of_splits_are_taken_as_they_are(tmp_path):
    for split, count in (("train", 6), ("validation", 2), ("test", 3)):
        image_tree(tmp_path / "set" / split, ("a", "b"), count)
    convert.convert(tmp_path / "set", tmp_path / "out", Options(image_size=8))
    counts = {"train": 12, "validation": 4, "eval": 6}
    assert metadata(tmp_path / "out")["counts"] == counts


def test_wrong_images_are_explained(tmp_path):
    image_tree(tmp_path / "set", ("a", "b"))
    with pytest.raises(BadInput, match="class 'b' in .* is not among a, c"):
        convert.convert(tmp_path / "set", tmp_path / "x", Options(class_names=("a", "c")))
    with pytest.raises(BadInput, match="image size is 0"):
        convert.convert(tmp_path / "set", tmp_path / "y", Options(format="images", image_size=0))
    (tmp_path / "set/a/0.png").write_bytes(b"no image")
    with pytest.raises(BadInput, match=r"0\.png"):
        convert.convert(tmp_path / "set", tmp_path / "z", Options(image_size=8))


# --- all ---


def test_the_same_seed_gives_the_same_bytes_and_another_one_does_not(tmp_path):
    idx_directory(tmp_path / "digits", True)
    digests = [
        convert.convert(
            tmp_path / "digits", tmp_path / f"out{number}", Options(layout=Layout(seed=seed))
        ).digest()
        for number, seed in enumerate((1, 1, 2))
    ]
    assert digests[0] == digests[1] != digests[2]


def test_there_are_never_more_shards_than_examples(tmp_path):
    idx_directory(tmp_path / "digits", True)
    made = convert.convert(tmp_path / "digits", tmp_path / "out", Options(layout=Layout(shards=20)))
    assert len(made.extra["splits"]["train"]) == 20
    assert len(made.extra["splits"]["validation"]) == 3
    assert len(made.extra["splits"]["eval"]) == 10


def test_a_directory_that_is_not_empty_is_left_alone(tmp_path):
    idx_directory(tmp_path / "digits", True)
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine").write_text("x")
    with pytest.raises(BadInput, match="not empty"):
        convert.convert(tmp_path / "digits", tmp_path / "out", Options())
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]


def test_an_unknown_source_is_explained(tmp_path):
    with pytest.raises(BadInput, match="no such file or directory"):
        convert.detect(tmp_path / "none")
    with pytest.raises(BadInput, match="unknown kind of data"):
        convert.detect(tmp_path)
    with pytest.raises(BadInput, match="shards is 0"):
        Layout(shards=0)
    with pytest.raises(BadInput, match="validation fraction is 1"):
        Layout(validation_fraction=1)


def test_the_command_converts_and_verifies(tmp_path, capsys):
    idx_directory(tmp_path / "digits", True)
    source, out = str(tmp_path / "digits"), str(tmp_path / "out")
    assert main(["convert", source, out, "--pad", "--shards", "2", "--name", "n"]) == 0
    assert main(["verify-manifest", out]) == 0
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    total = manifest.parse((tmp_path / "out/manifest.json").read_text()).total_bytes
    assert said == [{"name": "n", "files": 7}, {"ok": True, "files": 7, "bytes": total}]
    assert main(["convert", source, out]) == 2
    assert capsys.readouterr().err.startswith("mayfly-node: not empty: ")


def test_features_of_any_name_are_the_same_bytes_in_any_order():
    assert tfrecord.encode({"label": [3], "image": [b"x"]}) == tfrecord.encode_example(b"x", 3)
    features = {"tokens": [b"a", b"", b"b"], "starts": [0, 300, 2**40], "none": []}
    assert tfrecord.decode(tfrecord.encode(features)) == {**features, "none": []}
