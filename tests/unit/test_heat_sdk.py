"""`mayfly heat delete` by the real openstacksdk, against a server that stands for OpenStack."""

from __future__ import annotations

import http.server
import json
import threading
from typing import Any

import pytest

from mayfly.errors import RemoteError, UserError
from mayfly.heat import stack

PROJECT, STACK, SERVER = "p" * 32, "5" * 32, "9" * 32


class Cloud(http.server.ThreadingHTTPServer):
    """Keystone, Heat, Nova and Neutron with one stack, which is gone two looks after its DELETE."""

    def __init__(self) -> None:
        self.deleted = False
        self.looks = 0
        self.asked: list[str] = []
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def token(self) -> dict[str, Any]:
        def service(kind: str, path: str) -> dict[str, Any]:
            endpoint = {"interface": "public", "region": "R", "region_id": "R", "id": kind}
            return {
                "type": kind,
                "name": kind,
                "id": kind,
                "endpoints": [{**endpoint, "url": self.url + path}],
            }

        return {
            "token": {
                "methods": ["password"],
                "user": {"id": "u", "name": "me", "domain": {"id": "default", "name": "Default"}},
                "project": {"id": PROJECT, "name": "p", "domain": {"id": "default", "name": "D"}},
                "issued_at": "2026-11-28T00:00:00.000000Z",
                "expires_at": "2036-11-28T00:00:00.000000Z",
                "roles": [],
                "catalog": [
                    service("orchestration", f"/heat/v1/{PROJECT}"),
                    service("compute", "/nova/v2.1"),
                    service("network", "/neutron"),
                ],
            }
        }

    def stack(self) -> dict[str, Any] | None:
        if self.deleted:
            self.looks += 1
        if self.looks > 2:
            return None
        status = "DELETE_IN_PROGRESS" if self.deleted else "CREATE_COMPLETE"
        return {
            "id": STACK,
            "stack_name": "digits",
            "description": "Mayfly: training",
            "stack_status": status,
            "links": [],
        }


class Handler(http.server.BaseHTTPRequestHandler):
    server: Cloud

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer(201, self.server.token())

    def do_DELETE(self) -> None:
        self.server.deleted = True
        self.answer(204, None)

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.server.asked.append(path)
        stacks = f"/heat/v1/{PROJECT}/stacks"
        if path.endswith("/resources"):
            known = {"resource_type": "OS::Nova::Server", "physical_resource_id": SERVER}
            self.answer(200, {"resources": [{**known, "resource_name": "main", "links": []}]})
        elif path.startswith(stacks) and path.rpartition("/")[2] in ("digits", STACK):
            found = self.server.stack()
            self.answer(200 if found else 404, {"stack": found} if found else {"message": "gone"})
        elif path.rstrip("/") == "/nova/v2.1":
            version = {"id": "v2.1", "status": "CURRENT", "version": "2.90", "min_version": "2.1"}
            link = {"rel": "self", "href": f"{self.server.url}/nova/v2.1/"}
            self.answer(200, {"version": {**version, "links": [link]}})
        elif path.startswith("/nova") and path.endswith(("/servers", "/servers/detail")):
            self.answer(200, {"servers": []})
        else:
            self.answer(404, {"itemNotFound": {"message": "not here", "code": 404}})

    def answer(self, code: int, document: Any) -> None:
        body = b"" if document is None else json.dumps(document).encode()
        self.send_response(code)
        self.send_header("X-Subject-Token", "token")
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def cloud(monkeypatch):
    server = Cloud()
    settings = {
        "OS_AUTH_URL": f"{server.url}/v3",
        "OS_USERNAME": "me",
        "OS_PASSWORD": "secret",
        "OS_PROJECT_NAME": "p",
        "OS_USER_DOMAIN_NAME": "Default",
        "OS_PROJECT_DOMAIN_NAME": "Default",
        "OS_REGION_NAME": "R",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    yield server
    server.shutdown()
    server.server_close()


def test_it_deletes_waits_and_looks_for_the_server(cloud: Cloud):
    done = stack.delete(stack.connect(), "digits", 60, sleep=lambda _: None)
    assert (done.found, done.resources) == (True, 1)
    assert cloud.deleted
    assert f"/nova/v2.1/servers/{SERVER}" in cloud.asked


def test_no_such_stack_is_no_error(cloud: Cloud):
    assert not stack.delete(stack.connect(), "other", 60, sleep=lambda _: None).found
    assert not cloud.deleted


def test_a_cloud_that_refuses_is_said_to(cloud: Cloud, monkeypatch):
    monkeypatch.setattr(Handler, "do_DELETE", lambda self: self.answer(403, {"message": "no"}))
    with pytest.raises(RemoteError, match="403"):
        stack.delete(stack.connect(), "digits", 60, sleep=lambda _: None)


def test_no_cloud_is_the_users_to_put_right(monkeypatch):
    monkeypatch.setenv("OS_CLOUD", "nowhere")
    with pytest.raises(UserError, match="OS_CLOUD"):
        stack.connect()
