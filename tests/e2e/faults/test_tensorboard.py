"""TensorBoard of a run, through the tunnel that the command opens."""

from __future__ import annotations

import json
import signal
import socket
import urllib.request

import pytest
from machine import start


@pytest.mark.slow
def test_it_is_reached_until_ctrl_c(lab):
    process = start("tensorboard", lab.run_id, "--json")
    try:
        line = process.stdout.readline()
        assert line, process.stderr.read()
        url = json.loads(line)["url"]
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with direct.open(url, timeout=30) as answer:
            assert answer.status == 200 and b"TensorBoard" in answer.read()
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0, process.stderr.read()
    finally:
        process.kill()
        process.wait()
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1].strip("/"))), 2)
