from __future__ import annotations

import gzip
import hashlib
import json
import random
import zlib

import pytest
from tests.unit.data_fakes import FakeHdfs, RecordingProgress, make_bucket, record_of

from mayfly_train import manifest, s3
from mayfly_train.errors import BadInput, NodeError
from mayfly_train.hdfs import HdfsFailure, HdfsFull
from mayfly_train.manifest import Entry
from mayfly_train.stage import DamagedData, Job, Share, stage
from mayfly_train.staging_progress import StagingProgress

FILES = {
    f"train-{number:05d}-of-00006.tfrecords": record_of(
        random.Random(number).randbytes(1000 * number - 16)
    )
    for number in range(1, 6)
}
FILES["train-00000-of-00006.tfrecords"] = b""
SOURCE = s3.S3Uri("bucket", "data")


def dataset(files=FILES):
    entries = [Entry(n, len(d), hashlib.sha256(d).hexdigest()) for n, d in files.items()]
    return manifest.build("dataset", entries, name="unit")


@pytest.fixture
def job(client, no_pause, monkeypatch):
    objects = {f"data/{name}": data for name, data in FILES.items()}
    objects["data/manifest.json"] = dataset().to_json().encode()
    make_bucket(client, "bucket", objects)
    monkeypatch.setattr(s3.read_chunks, "__defaults__", (97,))
    return Job(client, SOURCE, FakeHdfs(), "/mayfly/data")


def staged(job):
    """What stands under final names, by name."""
    return {
        path.removeprefix("/mayfly/data/"): data
        for path, data in job.store.files.items()
        if "/_staging/" not in path
    }


def run(job, share=Share(), progress=None):  # noqa: B008 - frozen
    return stage(job, share, progress or RecordingProgress(), parallel=2)


def test_all_files_and_the_manifest_arrive(job):
    progress = RecordingProgress()
    result = run(job, progress=progress)
    assert staged(job) == {**FILES, "manifest.json": dataset_text(job)}
    assert (result.changed, result.files, result.copied_files) == (True, 6, 6)
    assert result.bytes == result.copied_bytes == 15000
    assert progress.total == (6, 15000) and (progress.files, progress.bytes) == (6, 15000)
    assert not [path for path in job.store.files if path.endswith(".part")]


def dataset_text(job):
    return s3.read_bytes(job.client, SOURCE.join("manifest.json"))


def test_a_second_run_copies_nothing(job):
    run(job)
    job.store.writes.clear()
    progress = RecordingProgress()
    result = run(job, progress=progress)
    assert (result.changed, result.copied_files, job.store.writes) == (False, 0, [])
    assert (progress.files, progress.bytes) == (6, 15000)


def test_the_namenode_is_asked_little(job, monkeypatch):
    asked = []

    def count(name):
        answer = getattr(job.store, name)
        monkeypatch.setattr(job.store, name, lambda path: asked.append(name) or answer(path))

    for name in ("status", "walk", "make_directory"):
        count(name)
    run(job)
    # For each file once, after it was written, and once for the marker.
    assert asked.count("status") == len(FILES) + 1
    assert asked.count("walk") == 1
    assert 1 <= asked.count("make_directory") <= 2  # once by each of the two that copy at a time
    asked.clear()
    run(job)
    assert asked == ["walk", "status"]


@pytest.mark.parametrize("count", [1, 2, 3, 6, 9])
def test_the_shares_are_disjoint_whole_and_about_equal(count):
    files = dataset().files
    shares = [Share(index, count).of(files) for index in range(count)]
    together = [entry for share in shares for entry in share]
    assert sorted(together, key=lambda e: e.path) == sorted(files, key=lambda e: e.path)
    sizes = [sum(entry.size for entry in share) for share in shares]
    assert max(sizes) - min(sizes) <= max(entry.size for entry in files)


def test_several_nodes_together_bring_the_whole(job):
    results = [run(job, Share(index, 3)) for index in range(3)]
    assert staged(job) == {**FILES, "manifest.json": dataset_text(job)}
    assert sum(result.copied_bytes for result in results) == 15000


@pytest.mark.parametrize("text", ["", "1", "2/2", "-1/2", "a/b", "0/0", "1/2/3"])
def test_a_wrong_share_is_refused(text):
    with pytest.raises(BadInput, match="not a share"):
        Share.parse(text)


@pytest.mark.parametrize("seed", range(8))
def test_a_write_cut_anywhere_leaves_nothing_under_a_final_name(job, seed):
    cut = random.Random(seed).randrange(5000)
    job.store.failing_writes = lambda path, web: cut if "00005-of" in path else None
    with pytest.raises(HdfsFailure, match="a DataNode died"):
        run(job)
    done = staged(job)
    assert "train-00005-of-00006.tfrecords" not in done
    assert done.items() <= FILES.items()
    assert not [path for path in job.store.files if path.endswith(".part")]

    job.store.failing_writes = lambda path, web: None
    result = run(job)
    assert staged(job) == {**FILES, "manifest.json": dataset_text(job)}
    assert result.copied_files == 6 - len(done)


def test_a_failed_native_write_is_repeated_through_webhdfs(job):
    job.store.failing_writes = lambda path, web: None if web else 10
    progress = RecordingProgress()
    run(job, progress=progress)
    assert staged(job) == {**FILES, "manifest.json": dataset_text(job)}
    assert [web for path, web in job.store.writes if "00005-of" in path] == [False, True]
    assert progress.bytes == 15000


def test_a_file_of_the_right_size_but_wrong_content_is_copied_again(job):
    name = "train-00002-of-00006.tfrecords"
    job.store.files[f"/mayfly/data/{name}"] = b"x" * 2000
    assert run(job).copied_files == 6
    assert staged(job)[name] == FILES[name]


def test_data_that_is_not_what_the_manifest_says_never_gets_its_name(job):
    name = "train-00004-of-00006.tfrecords"
    job.client.put_object(Bucket="bucket", Key=f"data/{name}", Body=b"x" * 4000)
    with pytest.raises(DamagedData, match=f"s3://bucket/data/{name} does not match its manifest"):
        run(job)
    assert name not in staged(job)


def test_an_object_that_is_missing_or_cut_is_found_before_anything_is_copied(job):
    job.client.put_object(Bucket="bucket", Key="data/train-00004-of-00006.tfrecords", Body=b"x")
    with pytest.raises(BadInput, match="train-00004-of-00006.tfrecords has 1 bytes"):
        run(job)
    job.client.delete_object(Bucket="bucket", Key="data/train-00004-of-00006.tfrecords")
    with pytest.raises(BadInput, match="train-00004-of-00006.tfrecords is missing"):
        run(job)
    assert job.store.files == {}


def test_an_empty_prefix_a_missing_manifest_and_a_model_are_told_apart(client, no_pause):
    model = manifest.build("model", [Entry("a", 1, "a" * 64)]).to_json().encode()
    make_bucket(client, "bucket", {"loose/a": b"x", "model/manifest.json": model, "model/a": b"x"})
    for prefix, message in (
        ("none", "nothing under s3://bucket/none/"),
        ("loose", "no manifest.json under s3://bucket/loose/"),
        ("model", "not a dataset"),
    ):
        with pytest.raises(BadInput, match=message):
            run(Job(client, s3.S3Uri("bucket", prefix), FakeHdfs(), "/d"))


def test_another_dataset_in_the_directory_is_not_mixed_with_this_one(job):
    job.store.files["/mayfly/data/train-00000-of-00002.tfrecords"] = b"other"
    with pytest.raises(BadInput, match="files of another dataset"):
        run(job)


def test_the_progress_document_tells_the_end_and_the_error(job):
    written = []
    with StagingProgress(written.append, {"share": 0}) as progress:
        run(job, progress=progress)
    assert (written[0]["bytes_done"], written[0]["finished"]) == (0, None)
    last = written[-1]
    assert (last["bytes_done"], last["bytes_total"], last["files_done"]) == (15000, 15000, 6)
    assert last["finished"] and last["error"] is None
    assert json.loads(json.dumps(last)) == last

    with pytest.raises(NodeError), StagingProgress(written.append, {"share": 1}):
        raise NodeError("the disk is full")
    assert (written[-1]["error"], written[-1]["share"]) == ("the disk is full", 1)


def test_status_that_cannot_be_written_does_not_stop_the_work(job):
    def refuse(document):
        raise s3.S3Error("no")

    with StagingProgress(refuse, {"share": 0}) as progress:
        assert run(job, progress=progress).copied_files == 6


def test_bytes_that_hdfs_lost_without_a_word_are_noticed_and_copied_again(job):
    real, lost = job.store.write_chunks, []

    def lossy(path, chunks, web=False):
        real(path, chunks, web)
        if "00005-of" in path and not lost:
            lost.append(path)
            job.store.files[path] = job.store.files[path][:-1]

    job.store.write_chunks = lossy
    assert run(job).copied_files == 6
    assert len(lost) == 1
    assert staged(job) == {**FILES, "manifest.json": dataset_text(job)}


def put_dataset(client, files):
    for name, data in files.items():
        client.put_object(Bucket="bucket", Key=f"data/{name}", Body=data)
    text = dataset(files).to_json().encode()
    client.put_object(Bucket="bucket", Key="data/manifest.json", Body=text)


@pytest.mark.parametrize("cut", [1, 11, 12, 500, 1999])
def test_a_file_that_was_cut_before_its_manifest_was_made_is_named(job, cut):
    name = "train-00002-of-00006.tfrecords"
    put_dataset(job.client, {**FILES, name: FILES[name][:cut]})
    with pytest.raises(DamagedData, match=f"s3://bucket/data/{name} ends within a record"):
        run(job)
    assert name not in staged(job)
    assert not [path for path in job.store.files if path.endswith(".part")]


@pytest.mark.parametrize("compress", [gzip.compress, zlib.compress])
def test_compressed_records_and_other_files_are_copied_as_they_are(job, compress):
    files = {"train.tfrecords": compress(FILES["train-00005-of-00006.tfrecords"]), "note.txt": b"x"}
    put_dataset(job.client, files)
    run(job)
    assert files.items() <= staged(job).items()


def test_a_full_hdfs_is_told_at_once_and_leaves_no_part(job, no_pause):
    def full(path, chunks, web=False):
        job.store.files[path] = next(iter(chunks))
        raise HdfsFull("HDFS is full")

    job.store.write_chunks = full
    with pytest.raises(HdfsFull):
        run(job)
    assert job.store.files == {} and no_pause == []


def test_datanodes_without_room_are_told(job, no_pause):
    job.store.failing_writes = lambda path, web: 0
    job.store.free = 3 << 20
    with pytest.raises(HdfsFull, match=r"no DataNode has room for .* \(3 MiB free\)"):
        run(job)
