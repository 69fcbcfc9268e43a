"""What a run wrote about itself below its URI, read from S3 by any machine that has the keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mayfly.watch import Status
from mayfly_train import s3
from mayfly_train.errors import NodeError


class RunStore:
    """Reads (and, for the job file, writes) the objects of one run."""

    def __init__(self, client: Any, uri: str) -> None:
        self._client = client
        self.uri = s3.parse_uri(uri)

    def write_job(self, spec: Mapping[str, Any]) -> None:
        """Put the resolved job file: the first object of a run, and a test of the keys."""
        s3.write_json(self._client, self.uri.join("job.json"), spec)

    def write_proof(self, proof: Mapping[str, Any]) -> None:
        """Put the proof of what is left of the run, which replaces the one before."""
        s3.write_json(self._client, self.uri.join("clean.json"), proof)

    def write_log(self, name: str, text: str) -> None:
        """Put a log beside those that the nodes upload."""
        uri = self.uri.join("logs", name)
        s3.write_bytes(self._client, uri, text.encode(), "text/plain; charset=utf-8")

    def status(self) -> Status | None:
        """Return the run's status.

        None when there is none yet, or when it cannot be read at the moment: the run goes on
        without us, and whoever waits decides how long a silence is too long.
        """
        try:
            return Status.of(s3.read_json(self._client, self.uri.join("status.json")))
        except (NodeError, TypeError):
            return None

    def staging(self) -> list[Mapping[str, Any]]:
        """Return the reports of the nodes that copy the data, possibly none."""
        return self._reports("staging-")

    def preprocessing(self) -> list[Mapping[str, Any]]:
        """Return the reports of the nodes that convert the data, possibly none."""
        return self._reports("preprocess-")

    def _reports(self, prefix: str) -> list[Mapping[str, Any]]:
        try:
            directory = self.uri.join("status")
            names = s3.list_sizes(self._client, directory)
            wanted = sorted(name for name in names if name.startswith(prefix))
            return [s3.read_json(self._client, directory.join(name)) for name in wanted]
        except NodeError:
            return []

    def logs(self) -> dict[str, s3.S3Uri]:
        """Return the uploaded log files: name → address."""
        directory = self.uri.join("logs")
        names = s3.list_sizes(self._client, directory)
        return {name: directory.join(name) for name in sorted(names)}

    def read_text(self, uri: s3.S3Uri) -> str:
        """Return a small object as text."""
        return s3.read_bytes(self._client, uri).decode(errors="replace")


def staging_progress(reports: list[Mapping[str, Any]]) -> tuple[str, float | None]:
    """Return a text and the fraction done for the data that all nodes together have copied."""
    done = sum(int(report.get("bytes_done") or 0) for report in reports)
    total = sum(int(report.get("bytes_total") or 0) for report in reports)
    if not total:
        return "", None
    return f"{done / 2**20:,.0f} of {total / 2**20:,.0f} MiB into HDFS", min(1.0, done / total)


def preprocess_progress(reports: list[Mapping[str, Any]]) -> tuple[str, float | None]:
    """Return a text and the fraction done of preprocessing, whose nodes each know the whole."""
    done = max((int(report.get("files_done") or 0) for report in reports), default=0)
    total = max((int(report.get("files_total") or 0) for report in reports), default=0)
    return (f"{done} of {total} shards", done / total) if total else ("", None)
