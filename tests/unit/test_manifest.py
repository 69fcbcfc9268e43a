from __future__ import annotations

import json

import pytest

from mayfly_train import manifest
from mayfly_train.manifest import BadManifest, Entry
from mayfly_train.verify import verify_directory

SHA = "a" * 64


def document(**changes):
    entry = {"path": "train.tfrecords", "size": 3, "sha256": SHA}
    return {"version": 1, "kind": "dataset", "created": "now", "files": [entry], **changes}


def test_a_directory_s_manifest_lists_its_files_and_says_what_else_is_known(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "b").write_bytes(b"hello")
    (tmp_path / "sub/a").write_bytes(b"")
    (tmp_path / "manifest.json").write_text("an older one")
    (tmp_path / ".hidden").write_text("x")
    made = manifest.from_directory(tmp_path, "dataset", name="unit")
    assert [(entry.path, entry.size) for entry in made.files] == [("b", 5), ("sub/a", 0)]
    assert made.files[0].sha256 == (
        "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824"
    )
    assert manifest.parse(made.to_json()) == made
    assert json.loads(made.to_json())["name"] == "unit"
    assert made.total_bytes == 5


@pytest.mark.parametrize(
    "path",
    ["", ".", "..", "../x", "a/../b", "/etc/passwd", "a//b", "./a", "a/", "a\\b", "a\nb", None, 3]
    + ["manifest.json"],
)
def test_a_path_that_could_leave_the_directory_is_refused(path):
    text = json.dumps(document(files=[{"path": path, "size": 1, "sha256": SHA}]))
    with pytest.raises(BadManifest, match="path not allowed"):
        manifest.parse(text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "version 1"),
        ({"kind": "cat"}, "unknown kind 'cat'"),
        ({"files": {}}, "lists no files"),
        ({"files": ["x"]}, "not an entry"),
        ({"files": [{"path": "a", "size": -1, "sha256": SHA}]}, "size is -1"),
        ({"files": [{"path": "a", "size": True, "sha256": SHA}]}, "size is True"),
        ({"files": [{"path": "a", "size": "3", "sha256": SHA}]}, "size is '3'"),
        ({"files": [{"path": "a", "size": 3, "sha256": "A" * 64}]}, "sha256 is"),
        ({"files": [{"path": "a", "size": 3, "sha256": SHA}] * 2}, "listed twice: a"),
    ],
)
def test_what_is_wrong_is_named_with_the_place(change, message):
    with pytest.raises(BadManifest, match=f"here: .*{message}"):
        manifest.parse(json.dumps(document(**change)), "here")


@pytest.mark.parametrize("text", ["", "[]", "{", "3", "null", '{"version": 1}'])
def test_what_is_no_manifest_is_refused(text):
    with pytest.raises(BadManifest):
        manifest.parse(text)


def test_a_listing_is_compared_by_name_and_size():
    made = manifest.build("model", [Entry("a", 1, SHA), Entry("b", 2, SHA), Entry("c", 3, SHA)])
    assert manifest.differences(made, {"a": 1, "b": 2, "c": 3, "more": 9}) == []
    assert manifest.differences(made, {"a": 1, "b": 9}) == [
        "b has 9 bytes, the manifest says 2",
        "c is missing",
    ]
    with pytest.raises(BadManifest, match="s3://x does not match its manifest: b has 9 bytes"):
        manifest.require_match(made, {"a": 1, "b": 9}, "s3://x")


def test_the_digest_depends_on_the_files_alone():
    first = manifest.build("dataset", [Entry("a", 1, SHA), Entry("b", 2, SHA)], name="one")
    second = manifest.build("dataset", [Entry("b", 2, SHA), Entry("a", 1, SHA)], name="two")
    other = manifest.build("dataset", [Entry("a", 1, SHA), Entry("b", 3, SHA)])
    assert first.digest() == second.digest() != other.digest()


def test_a_changed_byte_in_a_directory_is_found(tmp_path):
    (tmp_path / "a").write_bytes(b"hello")
    made = manifest.from_directory(tmp_path, "dataset")
    (tmp_path / "manifest.json").write_text(made.to_json())
    assert verify_directory(tmp_path) == made
    (tmp_path / "a").write_bytes(b"hullo")
    with pytest.raises(BadManifest, match="SHA-256"):
        verify_directory(tmp_path)
    (tmp_path / "a").unlink()
    with pytest.raises(BadManifest, match="a is missing"):
        verify_directory(tmp_path)
