"""A proxy before the fake EC2: it counts calls, answers some with errors, and runs faults.

It is a part of the test's own process, so a fault is a function: one that kills IM, say. It is
called before or after the n-th call that changes something. One that kills the caller swallows the
call before, which then was never made, or its answer after.
"""

from __future__ import annotations

import http.client
import threading
import urllib.parse
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

READ = ("Describe", "List", "Get", "GET", "HEAD")
ERROR = (
    '<?xml version="1.0"?><Response><Errors><Error><Code>{code}</Code>'
    "<Message>{message}</Message></Error></Errors><RequestID>test</RequestID></Response>"
)


@dataclass
class Refusal:
    """An error for a call: for those that follow the first `after` ones, up to the one `until`."""

    code: str
    status: int = 400
    after: int = 0
    until: float = float("inf")
    message: str = "injected"


@dataclass
class Fault:
    """What happens around the n-th call that changes something, counted from 1."""

    number: int
    when: str  # before | after
    run: Callable[[], None]
    swallows: bool = True
    happened: threading.Event = field(default_factory=threading.Event)
    call: str = ""


class FaultProxy:
    """Listens on a free port of loopback; `calls` has what was asked for, in order."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.lock = threading.Lock()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.reset()
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def reset(self) -> None:
        """Forget all calls and faults."""
        with self.lock:
            self.calls: list[str] = []
            self.refusals: dict[str, Refusal] = {}
            self.fault: Fault | None = None

    @property
    def writes(self) -> list[str]:
        """The calls that changed something, or were to."""
        return [call for call in self.calls if not call.startswith(READ)]

    def count(self, action: str) -> int:
        return Counter(self.calls)[action]

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def _take(self, action: str) -> tuple[Refusal | None, Fault | None]:
        """Note a call, and say what is to be made of it."""
        with self.lock:
            self.calls.append(action)
            refusal = self.refusals.get(action)
            number = Counter(self.calls)[action]
            if refusal and not refusal.after < number <= refusal.until:
                refusal = None
            fault = self.fault
            due = fault and not fault.happened.is_set() and not action.startswith(READ)
            if not fault or not due or len(self.writes) != fault.number:
                return refusal, None
            fault.call = action
            return refusal, fault

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                pass

            def forward(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                refusal, fault = proxy._take(action_of(self.command, self.path, body))
                if fault and fault.when == "before" and self.strike(fault):
                    return
                if refusal:
                    text = ERROR.format(code=refusal.code, message=refusal.message).encode()
                    answer = (refusal.status, [("Content-Type", "text/xml")], text)
                else:
                    answer = proxy._ask(self.command, self.path, body, dict(self.headers.items()))
                if fault and fault.when == "after" and self.strike(fault):
                    return
                self.answer(*answer)

            def strike(self, fault: Fault) -> bool:
                """Run the fault; returns whether there is nobody left to answer."""
                fault.run()
                fault.happened.set()
                self.close_connection = fault.swallows
                return fault.swallows

            def answer(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
                self.send_response(status)
                for name, value in headers:
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = forward  # noqa: N815

        return Handler

    def _ask(
        self, command: str, path: str, body: bytes, headers: dict[str, str]
    ) -> tuple[int, list[tuple[str, str]], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.target, timeout=60)
        hop = ("connection", "accept-encoding")
        kept = {name: value for name, value in headers.items() if name.lower() not in hop}
        connection.request(command, path, body, kept)
        answer = connection.getresponse()
        drop = ("content-length", "connection", "transfer-encoding", "date", "server")
        told = [pair for pair in answer.getheaders() if pair[0].lower() not in drop]
        found = (answer.status, told, answer.read())
        connection.close()
        return found


def action_of(command: str, path: str, body: bytes) -> str:
    """The name of an EC2 or STS call; for other services, method and path."""
    named = urllib.parse.parse_qs(body.decode("latin1")).get("Action")
    return named[0] if named else f"{command} {path}"
