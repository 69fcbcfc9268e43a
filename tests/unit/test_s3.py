from __future__ import annotations

import http.server
import os
import threading

import pytest
from botocore.exceptions import ClientError
from tests.unit.conftest import SETTINGS
from tests.unit.data_fakes import make_bucket

from mayfly_train import s3
from mayfly_train.errors import BadInput

URI = s3.S3Uri("bucket", "a/b")


def test_an_address_is_a_bucket_and_a_key_without_slashes_at_its_ends():
    assert s3.parse_uri("s3://b") == s3.parse_uri("s3://b/") == s3.S3Uri("b", "")
    assert s3.parse_uri("s3://b/x/y/") == s3.S3Uri("b", "x/y")
    assert str(s3.parse_uri("s3://b/x").join("/y/", "z")) == "s3://b/x/y/z"
    assert s3.S3Uri("b", "").prefix == "" and URI.prefix == "a/b/"


@pytest.mark.parametrize("text", ["", "bucket/x", "s3:/b/x", "s3://", "s3:///x", "http://b/x"])
def test_another_address_is_refused(text):
    with pytest.raises(s3.S3UserError, match="write s3://bucket/prefix"):
        s3.parse_uri(text)


def test_settings_come_from_the_environment_and_name_what_is_missing():
    environ = {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s", "AWS_ENDPOINT_URL": ""}
    assert s3.S3Settings.from_environ(environ) == s3.S3Settings("k", "s", None, None, "us-east-1")
    with pytest.raises(s3.S3UserError, match="AWS_SECRET_ACCESS_KEY not set"):
        s3.S3Settings.from_environ({"AWS_ACCESS_KEY_ID": "k"})


def test_a_file_of_settings_is_read_as_systemd_reads_it(tmp_path):
    path = tmp_path / "s3.env"
    path.write_text(
        '# made by a role\n\nAWS_ACCESS_KEY_ID=plain\nAWS_SECRET_ACCESS_KEY="a+b/c=\\"d\\\\e"\n'
    )
    settings = s3.S3Settings.from_file(path)
    assert (settings.access_key_id, settings.secret_access_key) == ("plain", 'a+b/c="d\\e')
    with pytest.raises(s3.S3UserError, match="cannot read"):
        s3.S3Settings.from_file(tmp_path / "none")


def test_no_repr_shows_a_key():
    assert "unit-" not in repr(s3.S3Settings("unit-key", "unit-secret", "unit-token"))


def test_objects_are_written_listed_read_and_deleted(client):
    make_bucket(client, "bucket", {"a/bc": b"not below the prefix"})
    s3.write_json(client, URI.join("x.json"), {"one": 1})
    s3.write_bytes(client, URI.join("sub/y"), b"123", "text/plain")
    assert s3.list_sizes(client, URI) == {"x.json": 11, "sub/y": 3}
    assert s3.read_json(client, URI.join("x.json")) == {"one": 1}
    assert s3.size_of(client, URI.join("sub/y")) == 3
    s3.delete(client, URI.join("sub/y"))
    assert s3.size_of(client, URI.join("sub/y")) is None
    with pytest.raises(s3.NotFound, match="nothing at s3://bucket/a/b/sub/y"):
        s3.read_bytes(client, URI.join("sub/y"))


def test_a_bucket_that_does_not_exist_is_named(client):
    for action in (s3.require_bucket, s3.list_sizes):
        with pytest.raises(BadInput, match="no such bucket: bucket — create it") as raised:
            action(client, URI)
        assert raised.value.exit_code == 2


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("InvalidAccessKeyId", "does not know the access key"),
        ("SignatureDoesNotMatch", "secret key for s3://bucket/a/b is wrong"),
        ("AccessDenied", "access denied"),
        ("403", "access denied"),
        ("ExpiredToken", "session token for s3://bucket/a/b has expired"),
        ("RequestTimeTooSkewed", "the clock here is too far from the S3 server's — set the clock"),
    ],
)
def test_wrong_keys_are_the_user_s_fault_and_are_not_shown(code, message):
    answer = {"Error": {"Code": code, "Message": "for AKIASECRET"}}
    with pytest.raises(s3.S3UserError, match=message) as raised, s3.clear_errors(URI):
        raise ClientError(answer, "PutObject")
    assert "AKIA" not in str(raised.value)


def test_a_server_s_own_fault_is_not_the_user_s():
    with pytest.raises(s3.S3Error, match="answered SlowDown") as raised, s3.clear_errors(URI):
        raise ClientError({"Error": {"Code": "SlowDown"}}, "PutObject")
    assert raised.value.exit_code == 1


def test_a_server_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    client = s3.connect(s3.S3Settings("k", "s", None, "http://127.0.0.1:1"))
    with pytest.raises(s3.S3Error, match="cannot reach http://127.0.0.1:1") as raised:
        s3.list_sizes(client, URI)
    assert raised.value.exit_code == 1


def test_everything_below_a_prefix_is_deleted_and_nothing_beside_it(client):
    names = [f"a/b/{number}" for number in range(3)]
    make_bucket(client, "bucket", dict.fromkeys([*names, "a/bc", "a/b"], b"x"))
    assert s3.delete_below(client, URI) == 3
    assert sorted(s3.list_sizes(client, s3.S3Uri("bucket", ""))) == ["a/b", "a/bc"]
    assert s3.delete_below(client, URI) == 0


def test_a_whole_bucket_is_never_emptied(client):
    with pytest.raises(s3.S3UserError, match="whole bucket"):
        s3.delete_below(client, s3.S3Uri("bucket", ""))


def test_objects_that_are_still_there_are_an_error(client, monkeypatch):
    make_bucket(client, "bucket", {"a/b/x": b"x"})
    monkeypatch.setattr(client, "delete_objects", lambda **_: {"Errors": [{"Code": "Denied"}]})
    with pytest.raises(s3.S3Error, match="1 objects are still at s3://bucket/a/b"):
        s3.delete_below(client, URI)


class BreakingServer(http.server.BaseHTTPRequestHandler):
    """Serves one object and closes the connection at the places that the test names."""

    data = bytes(range(256)) * 40
    breaks: list[int] = []
    ranges: list[str | None] = []
    etag = '"one"'

    def do_GET(self):
        wanted = self.headers.get("Range")
        self.ranges.append(wanted)
        start = int(wanted.split("=")[1].rstrip("-")) if wanted else 0
        if self.headers.get("If-Match", self.etag) != self.etag:
            self.send_response(412)
            self.end_headers()
            return
        self.send_response(206 if wanted else 200)
        self.send_header("ETag", self.etag)
        self.send_header("Content-Length", str(len(self.data) - start))
        self.end_headers()
        end = self.breaks.pop(0) if self.breaks else len(self.data)
        self.wfile.write(self.data[start:end])
        self.close_connection = True

    def log_message(self, *args):
        pass


@pytest.fixture
def breaking():
    class Handler(BreakingServer):
        breaks: list[int] = []
        ranges: list[str | None] = []

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}"
    yield Handler, s3.connect(s3.S3Settings("k", "s", None, url))
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_broken_stream_is_taken_up_where_it_broke(breaking, no_pause):
    handler, client = breaking
    handler.breaks[:] = [1000, 1000, 5003]
    data = b"".join(s3.read_chunks(client, URI, chunk_bytes=512))
    assert data == handler.data
    assert handler.ranges == [None, "bytes=1000-", "bytes=1000-", "bytes=5003-"]
    assert len(no_pause) == 3


def test_a_stream_that_breaks_forever_ends_in_an_error(breaking, no_pause):
    handler, client = breaking
    handler.breaks[:] = [100] * 50
    with pytest.raises(s3.S3Error, match="breaks again and again at byte 100"):
        b"".join(s3.read_chunks(client, URI, chunk_bytes=64))


def test_an_object_that_changes_while_it_is_read_is_not_mixed(breaking, no_pause):
    handler, client = breaking
    handler.breaks[:] = [100]
    chunks = s3.read_chunks(client, URI, chunk_bytes=64)
    next(chunks)
    handler.etag = '"two"'
    with pytest.raises(s3.S3Error):
        b"".join(chunks)


def test_the_client_does_not_ask_a_metadata_service(monkeypatch):
    monkeypatch.delenv("AWS_EC2_METADATA_DISABLED", raising=False)
    client = s3.connect(SETTINGS)
    assert client.meta.config.signature_version == "s3v4"
    assert os.environ["AWS_EC2_METADATA_DISABLED"] == "true"
