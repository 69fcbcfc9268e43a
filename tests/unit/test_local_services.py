"""Settings and files of the engine, the S3 server and the IM service."""

from __future__ import annotations

import json
import re
import socket
import sqlite3
import stat
from ipaddress import IPv4Network
from pathlib import Path

import pytest

from mayfly.errors import UserError
from mayfly.local import engine, imservice, oci_runtime, platform, ports, s3server
from mayfly.local.paths import Paths, find_paths

KEYS = {"MAYFLY_S3_ACCESS_KEY_ID": "given", "MAYFLY_S3_SECRET_ACCESS_KEY": "given-secret"}


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    return Paths(tmp_path / "checkout", tmp_path / "state/local", tmp_path / "cache")


def test_paths_follow_the_environment(tmp_path: Path) -> None:
    found = find_paths({"MAYFLY_STATE_DIR": str(tmp_path), "MAYFLY_CACHE_DIR": "/c"}, Path("/x"))
    assert found.state == tmp_path / "local"
    assert found.cache == Path("/c")
    assert find_paths({}, Path("/x")).state == Path("/x/.mayfly/local")


def test_sockets_have_short_names_however_long_the_checkout(tmp_path: Path) -> None:
    found = find_paths({"MAYFLY_STATE_DIR": str(tmp_path / ("long" * 60))})
    assert len(engine.OwnEngine(found).docker.host) < 100
    assert len(engine.OwnEngine(found).bridge) <= 15


def test_state_directories_are_private(paths: Paths) -> None:
    directory = paths.of("im")
    for path in (directory, paths.state, paths.state.parent):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_a_docker_host_elsewhere_is_refused() -> None:
    with pytest.raises(UserError, match=r"DOCKER_HOST is not on this machine: tcp://10\.0\.0\.1"):
        engine.find_running({"DOCKER_HOST": "tcp://10.0.0.1:2375"})


def test_a_docker_host_that_does_not_answer_is_named(tmp_path: Path) -> None:
    address = f"unix://{tmp_path}/docker.sock"
    with pytest.raises(UserError, match=f"no Docker Engine answers at DOCKER_HOST {address}"):
        engine.find_running({"DOCKER_HOST": address})


def test_a_client_alone_is_no_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(engine, "DEFAULT_SOCKET", f"unix://{tmp_path}/docker.sock")
    (tmp_path / "docker.sock").touch()  # nothing listens
    assert engine.find_running({}) is None


def test_an_engine_that_refuses_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(engine, "DEFAULT_SOCKET", f"unix://{tmp_path}/docker.sock")
    monkeypatch.setattr("os.access", lambda *_: False)
    (tmp_path / "docker.sock").touch()
    with pytest.raises(UserError, match="does not let you in"):
        engine.find_running({})


def test_starting_an_engine_needs_root(
    paths: Paths, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(engine, "DEFAULT_SOCKET", f"unix://{tmp_path}/docker.sock")
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(UserError, match="starting one needs root") as error:
        engine.up(paths, print, {})
    assert "\n" not in str(error.value)


def test_a_check_of_the_engine_starts_nothing(
    paths: Paths, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(engine, "DEFAULT_SOCKET", f"unix://{tmp_path}/docker.sock")
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert engine.check(paths, {}) == "none answers: our own will be started"
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(UserError, match="starting one needs root"):
        engine.check(paths, {})
    assert not paths.state.exists()


def test_our_engine_shares_nothing_with_others(
    paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mayfly.local.host.missing_capabilities", lambda _: [])
    own = engine.OwnEngine(paths)
    settings = own._settings(IPv4Network("10.213.0.0/16"))
    assert settings["iptables"] is False
    assert settings["bridge"] == own.bridge != "docker0"
    assert settings["default-address-pools"] == [{"base": "10.213.0.0/17", "size": 24}]
    assert paths.id in settings["containerd-namespace"]
    assert str(paths.state) in settings["data-root"]
    assert "default-runtime" not in settings


def test_rules_are_marked_and_symmetrical(paths: Paths) -> None:
    own = engine.OwnEngine(paths)
    for rule in own._rules(IPv4Network("10.213.0.0/16")):
        check, insert = rule("-C"), rule("-I")
        assert own.bridge in check
        assert [word for word in check if word != "-C"] == [word for word in insert if word != "-I"]


def test_the_runtime_takes_out_what_the_machine_lacks(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    sets = {"bounding": ["CAP_KILL", "CAP_SYS_RESOURCE"], "effective": ["CAP_SYS_RESOURCE"]}
    path.write_text(json.dumps({"process": {"capabilities": sets}, "root": {"path": "r"}}))
    oci_runtime.amend(path, {"CAP_SYS_RESOURCE"})
    document = json.loads(path.read_text())
    assert document["process"]["capabilities"] == {"bounding": ["CAP_KILL"], "effective": []}
    assert document["root"] == {"path": "r"}


@pytest.mark.parametrize(
    "arguments", [["-b", "/x", "id"], ["--bundle", "/x"], ["create", "--bundle=/x", "id"]]
)
def test_options_of_the_runtime(arguments: list[str]) -> None:
    assert oci_runtime.option(arguments, "--bundle", "-b") == "/x"
    assert oci_runtime.option(["create", "id"], "--bundle", "-b") is None


def test_only_the_gateway_of_s3_is_seen_from_nodes(tmp_path: Path) -> None:
    words = s3server.options(tmp_path, tmp_path, "10.213.0.1", 8333, list(range(1, 9)))
    assert [word for word in words if "10.213.0.1" in word] == ["-s3.ip.bind=10.213.0.1"]
    assert "-ip.bind=127.0.0.1" in words
    assert "-master.telemetry=false" in words


def test_others_may_read_the_public_bucket_only() -> None:
    document = s3server.identities("key", "secret")
    anonymous = next(one for one in document["identities"] if one["name"] == "anonymous")
    assert anonymous == {"name": "anonymous", "actions": ["Read:mayfly-public"]}


def test_keys_are_made_once_and_kept_private(tmp_path: Path) -> None:
    first = s3server._keys(tmp_path, {})
    assert s3server._keys(tmp_path, KEYS) == first
    assert stat.S_IMODE((tmp_path / "identities.json").stat().st_mode) == 0o600


def test_keys_of_the_environment_are_taken_at_first_start(tmp_path: Path) -> None:
    assert s3server._keys(tmp_path, KEYS) == ("given", "given-secret")


@pytest.mark.parametrize("name", list(KEYS))
def test_half_a_pair_of_keys_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match=f"{name} is empty"):
        s3server._keys(tmp_path, {**KEYS, name: ""})


def test_the_secret_does_not_show_in_a_repr(tmp_path: Path) -> None:
    s3server._keys(tmp_path, KEYS)
    server = s3server._server(tmp_path, "http://10.213.0.1:8333", reused=False)
    assert "given-secret" not in repr(server)
    assert server.secret_access_key.reveal() == "given-secret"


def test_im_listens_on_loopback_and_logs_no_payloads(tmp_path: Path) -> None:
    text = imservice.config(tmp_path, 8800)
    assert "REST_ADDRESS = 127.0.0.1\n" in text
    assert "LOG_LEVEL = INFO\n" in text
    assert f"DATA_DB = sqlite:///{tmp_path}/im.sqlite\n" in text


def test_the_auth_file_names_engine_and_network() -> None:
    engine = ("unix:///run/x/docker.sock", "mayfly-1")
    lines = imservice.auth_lines("pw", engine).splitlines()
    assert lines[0].endswith("username = mayfly; password = pw")
    assert "host = unix://localhost/run/x/docker.sock; network = mayfly-1" in lines[1]


def test_the_password_stays_and_is_private(tmp_path: Path) -> None:
    assert imservice._password(tmp_path) == imservice._password(tmp_path)
    assert stat.S_IMODE((tmp_path / "password").stat().st_mode) == 0o600


def test_wiping_leaves_nothing_of_one_infrastructure_in_the_file(paths: Paths) -> None:
    database = paths.of("im") / "im.sqlite"
    with sqlite3.connect(database) as connection:
        connection.execute("CREATE TABLE inf_list(id VARCHAR(255) PRIMARY KEY, data TEXT)")
        rows = [("one", "canary-of-one" * 900), ("two", "canary-of-two")]
        connection.executemany("INSERT INTO inf_list VALUES (?, ?)", rows)
    connection.close()
    assert b"canary-of-one" in database.read_bytes()
    assert imservice.wipe(imservice.LOCAL, paths, "one") is True
    assert b"canary-of-one" not in database.read_bytes()
    assert b"canary-of-two" in database.read_bytes()
    assert imservice.wipe(imservice.LOCAL, paths, "one") is False


@pytest.mark.parametrize("variable", ["MAYFLY_IM_PORT", "MAYFLY_S3_PORT"])
def test_a_taken_port_is_told_before_anything_is_made(tmp_path: Path, variable: str) -> None:
    state, (other,) = tmp_path / "state", ports.free_ports(1)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        environ = {
            "MAYFLY_STATE_DIR": str(state),
            "MAYFLY_CACHE_DIR": str(tmp_path),
            "MAYFLY_IM_PORT": str(other),
            "MAYFLY_S3_PORT": str(other),
            variable: str(server.getsockname()[1]),
        }
        here = re.escape(str(Path.cwd()))
        told = rf"is taken: held by .*, in {here}\).* set {variable}"
        with pytest.raises(UserError, match=told):
            platform.up(print, environ=environ)
    assert not state.exists()


def test_down_of_what_was_never_up_removes_nothing(tmp_path: Path) -> None:
    environ = {"MAYFLY_STATE_DIR": str(tmp_path / "none"), "MAYFLY_CACHE_DIR": str(tmp_path)}
    assert platform.down(print, environ) == []
