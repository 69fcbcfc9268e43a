"""The probe of a gRPC server, against small servers of our own."""

from __future__ import annotations

import socket
import threading
import time

from mayfly_train.probe import ABSENT, SILENT, SPEAKS, Pulse, ask

SETTINGS = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])


class Server:
    """Accepts one connection after the other and sends the same answer, or nothing for None."""

    def __init__(self, answer: bytes | None) -> None:
        self.answer = answer
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.address = self.socket.getsockname()
        self.open: list[socket.socket] = []
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self) -> None:
        while True:
            try:
                connection, _ = self.socket.accept()
            except OSError:
                return
            if self.answer is None:
                self.open.append(connection)
                continue
            with connection:
                connection.sendall(self.answer)
                connection.recv(100)


def test_a_server_speaks_is_silent_or_is_absent():
    assert ask(Server(SETTINGS).address, 5) == SPEAKS
    assert ask(Server(None).address, 0.1) == SILENT
    assert ask(Server(b"HTTP/1.1 400 Bad Request\r\n").address, 5) == ABSENT
    assert ask(Server(b"").address, 5) == ABSENT
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = closed.getsockname()
    assert ask(address, 5) == ABSENT


def test_silence_counts_only_after_an_answer():
    server = Server(None)
    pulse = Pulse(server.address, interval=0.05)
    pulse.start()
    time.sleep(0.3)
    assert pulse.silent_for() == 0
    server.answer = SETTINGS
    wait_until(lambda: pulse.silent_for() > 0)
    server.answer = None
    wait_until(lambda: pulse.silent_for() > 0.3)
    server.answer = b""
    wait_until(lambda: pulse.silent_for() == 0)
    pulse.stop()


def wait_until(condition) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)
