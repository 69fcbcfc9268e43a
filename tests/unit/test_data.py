from __future__ import annotations

import gzip

import pytest
from tests.unit.data_fakes import make_bucket
from tests.unit.test_convert import cifar_archive

from mayfly import data
from mayfly.errors import UserError
from mayfly_train import convert, manifest, s3
from mayfly_train.convert import Layout, Options, tfrecord
from mayfly_train.errors import BadInput
from mayfly_train.verify import verify_s3

URI = s3.S3Uri("bucket", "data/set")


@pytest.fixture
def put(client):
    make_bucket(client, "bucket", {})
    reported = []

    def run(source, options=Options(), uri="s3://bucket/data/set/"):  # noqa: B008 - frozen
        return data.put(source, uri, client, options, lambda *said: reported.append(said))

    run.reported = reported
    return run


@pytest.fixture
def records(tmp_path):
    directory = tmp_path / "records"
    cifar_archive(tmp_path / "c.tar.gz", per_file=4)
    convert.convert(tmp_path / "c.tar.gz", directory, Options(layout=Layout(shards=2)))
    return directory


def test_an_archive_is_converted_and_uploaded_with_its_manifest_last(put, client, tmp_path):
    cifar_archive(tmp_path / "cifar-10-binary.tar.gz", per_file=4)
    done = put(tmp_path / "cifar-10-binary.tar.gz")
    assert (done.uri, done.name) == ("s3://bucket/data/set/", "cifar-10")
    assert done.files == done.uploaded_files
    made = verify_s3(client, URI)
    assert made.kind == "dataset" and made.total_bytes == done.bytes
    assert [said[0] for said in put.reported][0] == "converting cifar-10-binary.tar.gz"
    assert put.reported[-1] == ("uploading to s3://bucket/data/set/", 1.0)


def test_records_are_uploaded_as_they_are_and_only_once(put, client, records):
    first = put(records)
    again = put(records)
    assert first.uploaded_files == first.files == again.files == 7
    assert (again.uploaded_files, again.uploaded_bytes) == (0, 0)


def test_only_what_changed_or_was_lost_is_uploaded_again(put, client, records):
    put(records)
    changed = records / "train-00000-of-00002.tfrecords"
    with tfrecord.Writer(changed) as writer:
        writer.write(b"changed")
    (records / "manifest.json").unlink()
    s3.delete(client, URI.join("metadata.json"))
    assert put(records).uploaded_files == 2
    assert verify_s3(client, URI).by_path()[changed.name].size == 7 + 16


def test_an_upload_without_its_manifest_is_begun_anew(put, client, records):
    put(records)
    s3.delete(client, URI.join(manifest.NAME))
    assert put(records).uploaded_files == 7


def test_records_without_a_manifest_get_one_with_their_splits(records):
    (records / "manifest.json").unlink()
    made = data.describe(records, "mine")
    assert made.extra["name"] == "mine"
    assert made.extra["splits"]["eval"] == [
        "eval-00000-of-00002.tfrecords",
        "eval-00001-of-00002.tfrecords",
    ]


def test_what_cannot_be_put_is_explained(put, records, tmp_path):
    with pytest.raises(BadInput, match="no such bucket: none"):
        put(records, uri="s3://none/x")
    with pytest.raises(BadInput, match="no such file or directory"):
        put(tmp_path / "nothing")
    (records / "eval-00000-of-00002.tfrecords").write_bytes(b"damaged")
    with pytest.raises(BadInput, match="eval-00000-of-00002.tfrecords has 7 bytes"):
        put(records)
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd/records.tfrecords").write_bytes(b"")
    with pytest.raises(UserError, match="no training files"):
        put(tmp_path / "odd")


def test_a_damaged_record_is_refused_before_anything_is_uploaded(put, client, records):
    (records / "manifest.json").unlink()
    damaged = records / "eval-00001-of-00002.tfrecords"
    whole = damaged.read_bytes()
    flipped = bytes([whole[100] ^ 1])
    for content, message in (
        (whole[:-1], "ends within a record"),
        (whole[:100] + flipped + whole[101:], "is damaged"),
        (b"\xff" + whole[1:], "not a TFRecord file"),
    ):
        damaged.write_bytes(content)
        with pytest.raises(BadInput, match=message) as raised:
            put(records)
        assert damaged.name in str(raised.value)
    assert s3.list_sizes(client, URI) == {}


def test_compressed_records_are_taken_as_they_are(put, records):
    (records / "manifest.json").unlink()
    path = records / "eval-00001-of-00002.tfrecords"
    path.write_bytes(gzip.compress(path.read_bytes()))
    assert put(records).files > 0
