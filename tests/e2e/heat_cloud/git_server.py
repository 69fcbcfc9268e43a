"""A Git repository behind HTTPS, with a certificate authority that only the test's image trusts."""

from __future__ import annotations

import functools
import http.server
import ssl
import subprocess
import threading
from pathlib import Path


def make_certificates(directory: Path, address: str) -> tuple[Path, Path]:
    """An authority, and a certificate for `address` with its key in the same file."""
    authority, server = directory / "authority.crt", directory / "server.pem"
    new = ["openssl", "req", "-newkey", "rsa:2048", "-nodes", "-subj"]
    key, request, leaf = directory / "ca.key", directory / "server.csr", directory / "server.crt"
    _run(
        *new, "/CN=Mayfly test authority", "-x509", "-days", "2", "-keyout", key, "-out", authority
    )
    _run(*new, f"/CN={address}", "-keyout", directory / "server.key", "-out", request)
    extensions = directory / "extensions"
    extensions.write_text(f"subjectAltName=IP:{address}\n")
    sign = ["openssl", "x509", "-req", "-days", "2", "-CAcreateserial", "-extfile", extensions]
    _run(*sign, "-CA", authority, "-CAkey", key, "-in", request, "-out", leaf)
    server.write_text(leaf.read_text() + (directory / "server.key").read_text())
    return authority, server


def publish(directory: Path, name: str, files: dict[str, str]) -> None:
    """A bare repository `name` in `directory`, as a plain web server can serve it."""
    work = directory.parent / f"work-{name}"
    for path, text in files.items():
        (work / path).parent.mkdir(parents=True, exist_ok=True)
        (work / path).write_text(text)
    git = ["git", "-C", work, "-c", "user.name=Test", "-c", "user.email=test@localhost"]
    _run("git", "init", "-q", "-b", "main", work)
    _run(*git, "add", ".")
    _run(*git, "commit", "-q", "-m", "program")
    _run("git", "clone", "-q", "--bare", work, directory / name)
    _run("git", "-C", directory / name, "update-server-info")


class GitServer(http.server.ThreadingHTTPServer):
    """Serves `directory` at https://address:port/; what is not there answers 404."""

    daemon_threads = True

    def __init__(self, address: str, directory: Path, certificate: Path) -> None:
        handler = functools.partial(_Quiet, directory=str(directory))
        super().__init__((address, 0), handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        self.socket = context.wrap_socket(
            self.socket, server_side=True, do_handshake_on_connect=False
        )
        self.url = f"https://{address}:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.shutdown()
        self.server_close()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


def _run(*command: str | Path) -> None:
    subprocess.run([str(word) for word in command], check=True, capture_output=True)
