"""Our own IM for clouds as files and processes; `sleep` is a fake of the service."""

from __future__ import annotations

import json
import os
import socket
import sqlite3
from pathlib import Path

import pytest

from mayfly.errors import UserError
from mayfly.local import cloudim, imservice, platform
from mayfly.local.imservice import CLOUDS, LOCAL
from mayfly.local.paths import find_paths


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"MAYFLY_STATE_DIR": str(tmp_path / "state"), "MAYFLY_CACHE_DIR": str(tmp_path / "c")}


@pytest.fixture
def fake_service(environ):
    """A running program in the place of the service, which knows two infrastructures."""
    directory = find_paths(environ).of(CLOUDS.part)
    with sqlite3.connect(directory / imservice.DATABASE) as connection:
        connection.execute("CREATE TABLE inf_list(id VARCHAR(255), deleted INTEGER, data TEXT)")
        rows = [("one", 0, "canary-of-one"), ("two", 0, ""), ("old", 1, "")]
        connection.executemany("INSERT INTO inf_list VALUES (?, ?, ?)", rows)
    connection.close()
    daemon = imservice._daemon(directory)
    daemon.start(["sleep", "600"], os.environ)
    yield daemon
    daemon.stop()


@pytest.fixture
def older(environ, fake_service):
    """The record of the service: it runs with connectors of before, so another would be wanted."""
    record = find_paths(environ).of(CLOUDS.part) / "service.json"
    wish = {"url": "http://127.0.0.1:1", "engine": [], "connectors": "of before", "told": {}}
    record.write_text(json.dumps(wish))
    return record


def test_another_shell_s_command_does_not_restart_it_while_it_makes_nodes(
    environ, fake_service, older
):
    """IM writes an infrastructure down before its first node is asked for."""
    process, said = fake_service.process(), []
    service = imservice.up(CLOUDS, find_paths(environ), said.append, environ)
    assert (service.reused, service.url) == (True, "http://127.0.0.1:1")
    assert fake_service.process() == process
    assert said == [
        "the IM service for clouds is at work: what has changed since its start counts later"
    ]
    assert "of before" in older.read_text(), "the next command is to look again"


class Started(Exception):
    """Instead of a service that is started anew."""


@pytest.mark.parametrize("kind", [CLOUDS, LOCAL])
def test_without_nodes_in_the_making_what_has_changed_counts_now(
    environ, fake_service, older, monkeypatch, kind
):
    """The one for containers in any case: its nodes are of this machine, and cost nothing."""

    def install(*_):
        raise Started

    monkeypatch.setattr(imservice, "install", install)
    monkeypatch.setattr(imservice.ports, "require_free", lambda *_: None)
    paths = find_paths(environ)
    if kind is LOCAL:
        older.parent.rename(paths.state / LOCAL.part)
    else:
        for infrastructure in ("one", "two"):
            imservice.wipe(CLOUDS, paths, infrastructure)
    with pytest.raises(Started):
        imservice.up(kind, paths, lambda _: None, environ)
    assert imservice.running(kind, paths) is None


def test_the_two_services_share_nothing(tmp_path):
    ours = imservice.config(tmp_path, 8801, CLOUDS)
    assert {LOCAL.part, LOCAL.port_variable, LOCAL.default_port}.isdisjoint(
        {CLOUDS.part, CLOUDS.port_variable, CLOUDS.default_port}
    )
    assert "REST_ADDRESS = 127.0.0.1\n" in ours
    assert "VERIFI_SSL = True\n" in ours
    # Clouds are slower than containers: IM's own waits stay.
    assert "CHECK_CTXT_PROCESS_INTERVAL" not in ours
    assert "CHECK_CTXT_PROCESS_INTERVAL" in imservice.config(tmp_path, 8800)


def test_clouds_are_configured_by_ims_own_playbooks(tmp_path):
    stock = tmp_path / "venv/lib/python3.11/site-packages/contextualization"
    stock.mkdir(parents=True)
    (stock / "basic.yml").write_text("stock")
    ours = tmp_path / "ours"
    ours.mkdir()
    (ours / "basic.yml").write_text("short")
    for overlay, text in ((None, "stock"), (ours, "short")):
        imservice.make_contextualization(tmp_path / "venv", overlay, tmp_path / "target")
        assert (tmp_path / "target/basic.yml").read_text() == text


def test_no_key_to_a_cloud_is_in_its_auth_file():
    (line,) = imservice.auth_lines("pw", None).splitlines()
    assert line == "id = im; type = InfrastructureManager; username = mayfly; password = pw"


def test_the_last_infrastructure_takes_the_service_along(environ, fake_service):
    paths = find_paths(environ)
    assert imservice.known_infrastructures(CLOUDS, paths) == 2
    cloudim.wipe(["one"], environ)
    assert fake_service.process() is not None
    database = fake_service.directory / imservice.DATABASE
    assert b"canary-of-one" not in database.read_bytes()
    cloudim.wipe(["two"], environ)
    assert fake_service.process() is None


def test_down_leaves_a_service_that_knows_nodes(environ, fake_service, monkeypatch):
    monkeypatch.setattr(platform.engine, "find_running", lambda environ: None)
    said: list[str] = []
    platform.down(said.append, environ)
    assert fake_service.process() is not None
    assert any("stays: it knows 2 infrastructures" in text for text in said)
    cloudim.wipe(["one", "two"], environ)
    assert platform.down(said.append, environ) == ["IM service for clouds"]
    assert not find_paths(environ).state.exists()


def test_a_taken_port_is_told_before_anything_is_made(environ):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        environ["MAYFLY_CLOUD_IM_PORT"] = str(server.getsockname()[1])
        for ask in (lambda: cloudim.check(environ), lambda: cloudim.up(print, environ)):
            with pytest.raises(UserError, match=r"is taken: .* set MAYFLY_CLOUD_IM_PORT"):
                ask()
    assert not find_paths(environ).state.exists()


def test_it_is_told_where_endpoints_are_and_no_key():
    assert "AWS_ENDPOINT_URL" in CLOUDS.told
    assert not [name for name in CLOUDS.told if "KEY" in name or "TOKEN" in name]
