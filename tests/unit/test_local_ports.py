"""A port that is taken is named, with its holder and the variable to set."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from mayfly.errors import UserError
from mayfly.local import ports
from mayfly.local.ports import free_ports, port_setting, require_free


@pytest.fixture
def listener():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server.getsockname()[1]


def test_a_taken_port_names_its_holder_and_the_variable(listener: int) -> None:
    with pytest.raises(UserError) as error:
        require_free("127.0.0.1", listener, "MAYFLY_IM_PORT")
    text = str(error.value)
    assert f"port {listener} on 127.0.0.1 is taken" in text
    assert f"(pid {os.getpid()}, in {Path.cwd()})" in text
    assert "set MAYFLY_IM_PORT" in text
    assert error.value.exit_code == 2


def test_a_holder_that_cannot_be_seen_is_said(listener: int, monkeypatch) -> None:
    monkeypatch.setattr(ports, "holder_of", lambda _: None)
    with pytest.raises(UserError, match="is taken: held by a process that cannot be seen — stop"):
        require_free("127.0.0.1", listener, "MAYFLY_IM_PORT")


def test_an_address_of_another_machine_is_no_taken_port(listener: int) -> None:
    with pytest.raises(UserError, match="cannot be listened at: Cannot assign requested address"):
        require_free("192.0.2.1", listener, "MAYFLY_IM_PORT")


def test_a_free_port_is_accepted() -> None:
    (port,) = free_ports(1)
    require_free("127.0.0.1", port, "MAYFLY_IM_PORT")


def test_free_ports_differ() -> None:
    assert len(set(free_ports(8))) == 8


@pytest.mark.parametrize("value", ["http", "0", "65536", "-1", "80 "])
def test_what_is_no_port_is_refused(value: str) -> None:
    with pytest.raises(UserError, match="MAYFLY_S3_PORT is not a port"):
        port_setting({"MAYFLY_S3_PORT": value}, "MAYFLY_S3_PORT", 8333)


@pytest.mark.parametrize(("environ", "port"), [({}, 8333), ({"P": ""}, 8333), ({"P": "9"}, 9)])
def test_the_port_setting(environ: dict[str, str], port: int) -> None:
    assert port_setting(environ, "P", 8333) == port
