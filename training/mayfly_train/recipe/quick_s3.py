"""Small objects in S3 at a tenth of the cost: botocore signs, http.client asks, nothing else.

Each task reads one marker and writes another; through boto3 that would cost more than starting its
process. Whatever is not the plain case is left to boto3, which retries and explains.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import ssl
import threading
import time
from urllib.parse import quote, urlsplit

from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from mayfly_train.s3 import S3Settings, S3Uri

TIMEOUT_S = 10.0
REST_S = 30.0  # after a failure, boto3 alone is asked for so long
OK, NOT_FOUND, PRECONDITION_FAILED = 200, 404, 412


class QuickS3:
    """One bucket. Methods return None when boto3 is to be asked instead."""

    def __init__(self, settings: S3Settings, bucket: str) -> None:
        endpoint = settings.endpoint_url
        base = f"{endpoint.rstrip('/')}/{bucket}" if endpoint else ""
        self._base = base or f"https://{bucket}.s3.{settings.region}.amazonaws.com"
        parts = urlsplit(self._base)
        self._host, self._secure, self._path = parts.netloc, parts.scheme == "https", parts.path
        keys = (settings.access_key_id, settings.secret_access_key, settings.session_token)
        self._auth = S3SigV4Auth(Credentials(*keys), "s3", settings.region)
        self._context = ssl.create_default_context(cafile=os.environ.get("AWS_CA_BUNDLE") or None)
        self._own = threading.local()
        self._rest_until = 0.0

    def read(self, uri: S3Uri) -> tuple[bool, bytes] | None:
        """Whether there is an object, and its content."""
        answer = self._ask("GET", uri.key, b"", {})
        if answer is None or answer[0] not in (OK, NOT_FOUND):
            return None
        if answer[0] == NOT_FOUND and b"NoSuchKey" not in answer[1]:
            return None  # no such bucket, say
        return answer[0] == OK, answer[1]

    def create(self, uri: S3Uri, data: bytes) -> bool | None:
        """Whether the object is new and written; False when there is one already."""
        headers = {"If-None-Match": "*", "Content-Type": "application/json"}
        answer = self._ask("PUT", uri.key, data, headers)
        if answer is None or answer[0] not in (OK, PRECONDITION_FAILED):
            return None
        return answer[0] == OK

    def _ask(
        self, method: str, key: str, data: bytes, headers: dict[str, str]
    ) -> tuple[int, bytes] | None:
        if time.monotonic() < self._rest_until:
            return None
        place = quote(f"/{key}", safe="/-_.~")
        request = AWSRequest(method=method, url=self._base + place, data=data, headers=headers)
        request.headers["X-Amz-Content-SHA256"] = hashlib.sha256(data).hexdigest()
        self._auth.add_auth(request)
        for find in (self._kept, self._new):  # a kept one may have been closed by the server
            connection = find()
            if connection is None:
                continue
            try:
                connection.request(method, self._path + place, data, dict(request.headers.items()))
                answer = connection.getresponse()
                return answer.status, answer.read()
            except (OSError, http.client.HTTPException):
                connection.close()
                self._own.connection = None
        self._rest_until = time.monotonic() + REST_S
        return None

    def _kept(self) -> http.client.HTTPConnection | None:
        """This thread's open connection, None without one."""
        return getattr(self._own, "connection", None)

    def _new(self) -> http.client.HTTPConnection:
        connection = (
            http.client.HTTPSConnection(self._host, timeout=TIMEOUT_S, context=self._context)
            if self._secure
            else http.client.HTTPConnection(self._host, timeout=TIMEOUT_S)
        )
        self._own.connection = connection
        return connection
