"""First contact with a foreign IM: a fake of its two addresses on a real socket."""

from __future__ import annotations

import http.server
import ssl
import subprocess
import threading
from collections.abc import Iterator

import pytest

from mayfly.auth.credential import Missing
from mayfly.errors import RemoteError, UserError
from mayfly.im_server import find_server, greet, server_url
from mayfly.local.ports import free_ports

CANARY = "canary-of=the;tests"
USER = {"IM_USER": "ada", "IM_PASSWORD": CANARY}


class FakeIM(http.server.BaseHTTPRequestHandler):
    """Tells a version, and lists nothing to who has the password or the token."""

    version, page = "2.0.0", ""
    keys = (f"password = '{CANARY}';", f"token = '{CANARY}';")
    seen: list[str]

    def do_GET(self) -> None:
        header = self.headers.get("Authorization") or ""
        self.seen.append(f"{self.path} {header}")
        known = self.path == "/version" or any(key in header for key in self.keys)
        self.send_response(200 if known else 401)
        self.end_headers()
        text = (self.page or self.version) if self.path == "/version" else f"you sent {header}"
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture
def fake() -> Iterator[tuple[type[FakeIM], str]]:
    class Handler(FakeIM):
        seen: list[str] = []

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield Handler, f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize(
    "keys", [USER, {"IM_TOKEN": CANARY}, {"IM_TOKEN_COMMAND": f"echo '{CANARY}'"}]
)
def test_a_server_is_known_by_its_version_and_takes_the_keys(fake, keys):
    handler, url = fake
    server = find_server({"IM_URL": f"{url}/", **keys})
    assert greet(server) == "2.0.0"
    assert [line.split()[0] for line in handler.seen] == ["/version", "/infrastructures"]
    assert CANARY not in handler.seen[0]
    assert "canary" not in f"{server!r} {server}"


@pytest.mark.parametrize("version", ["1.17.0", "1.19.2", "2.0.0"])
def test_new_enough(fake, version):
    fake[0].version = version
    assert greet(find_server({"IM_URL": fake[1], **USER})) == version


@pytest.mark.parametrize("version", ["1.16.3", "1.9.0", "0.99"])
def test_too_old(fake, version):
    handler, url = fake
    handler.version = version
    with pytest.raises(RemoteError, match=f"too old: version {version}, and 1.17 is") as error:
        greet(find_server({"IM_URL": url, **USER}))
    assert url in str(error.value)
    assert error.value.exit_code == 1
    assert len(handler.seen) == 1, "the keys are not for a server that is of no use"


@pytest.mark.parametrize("page", ["<html>welcome</html>", "version 3.1 of " + 99 * "x"])
def test_something_else_answers(fake, page):
    fake[0].page = page
    with pytest.raises(RemoteError, match="is no IM"):
        greet(find_server({"IM_URL": fake[1], **USER}))


def test_a_wrong_password_is_refused_and_not_shown(fake):
    environ = {"IM_URL": fake[1], "IM_USER": "ada", "IM_PASSWORD": "canary-wrong"}
    with pytest.raises(UserError, match=f"IM at {fake[1]} refuses the keys — check") as error:
        greet(find_server(environ))
    assert "canary" not in str(error.value)


def test_nobody_answers():
    url = f"http://127.0.0.1:{free_ports(1)[0]}"
    with pytest.raises(RemoteError, match=f"IM does not answer at {url}/version: .* refused"):
        greet(find_server({"IM_URL": url, **USER}))


def test_a_certificate_of_nobody_known(tmp_path):
    key, certificate = str(tmp_path / "key.pem"), str(tmp_path / "cert.pem")
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost"]
    subprocess.run(
        [*make, "-keyout", key, "-out", certificate, "-days", "2"], check=True, capture_output=True
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), FakeIM) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"https://localhost:{server.server_port}"
        with pytest.raises(RemoteError, match="not accepted: self-signed certificate") as error:
            greet(find_server({"IM_URL": url, **USER}))
        server.shutdown()
    assert url in str(error.value)
    assert "REQUESTS_CA_BUNDLE" in str(error.value)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("im.example:8800", "is no address"),
        ("https://", "is no address"),
        ("http://im.example:8800", "unencrypted"),
        ("https://ada:canary@im.example", "IM_URL holds a password"),
    ],
)
def test_an_address_that_cannot_be_used(url, says):
    with pytest.raises(UserError, match=says) as error:
        server_url({"IM_URL": url})
    assert "canary" not in str(error.value)


def test_no_address_is_no_server():
    assert find_server({}) is None
    assert server_url({"IM_URL": "http://[::1]:8800/im/"}) == "http://[::1]:8800/im"


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({}, "IM_USER and IM_PASSWORD, IM_TOKEN or IM_TOKEN_COMMAND"),
        ({"IM_USER": "ada"}, "missing IM_PASSWORD"),
        ({"IM_PASSWORD": CANARY}, "missing IM_USER"),
    ],
)
def test_keys_that_are_missing_are_named(keys, says):
    with pytest.raises(Missing, match=says):
        find_server({"IM_URL": "https://im.example", **keys})
