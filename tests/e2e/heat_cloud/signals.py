"""Where nodes report: Heat's signal API as far as a wait condition's curl_cli uses it."""

from __future__ import annotations

import http.server
import json
import secrets
import threading
from typing import Any


class Signals(http.server.ThreadingHTTPServer):
    """Takes signals of handles at `address`; each handle has a token of its own."""

    daemon_threads = True

    def __init__(self, address: str) -> None:
        self.tokens: dict[str, str] = {}
        self.received: dict[str, list[dict[str, Any]]] = {}
        super().__init__((address, 0), _Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def curl_cli(self, handle: str) -> str:
        """As OS::Heat::WaitConditionHandle words it."""
        token = self.tokens.setdefault(handle, secrets.token_urlsafe(32))
        host, port = self.server_address[:2]
        return (
            f"curl -i -X POST -H 'X-Auth-Token: {token}' "
            "-H 'Content-Type: application/json' -H 'Accept: application/json' "
            f"http://{host}:{port}/v1/project/stacks/stack/id/resources/{handle}/signal"
        )

    def close(self) -> None:
        self.shutdown()
        self.server_close()


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Signals

    def do_POST(self) -> None:
        handle = self.path.split("/")[-2]
        if self.headers["X-Auth-Token"] != self.server.tokens.get(handle):
            self.send_error(401)
            return
        signal = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert set(signal) <= {"status", "reason", "data", "id"}
        assert signal["status"] in ("SUCCESS", "FAILURE")
        self.server.received.setdefault(handle, []).append(signal)
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass
