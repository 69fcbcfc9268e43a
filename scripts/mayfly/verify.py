"""Prove that a model in S3 is whole, before the nodes that made it are destroyed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from mayfly.errors import RunFailed
from mayfly_train import manifest, s3
from mayfly_train.errors import BadInput
from mayfly_train.verify import read_manifest

CONNECTIONS = 8


def verify_model(client: Any, run_uri: str) -> manifest.Manifest:
    """Read a run's manifest back and ask for the size of every object that it lists.

    Returns the manifest. Raises RunFailed when it is missing, or an object is missing or has
    another size: then the model is not proven to be whole.
    """
    found = _read(client, s3.parse_uri(run_uri))
    paths = [entry.path for entry in found.files]
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        uri = s3.parse_uri(run_uri)
        sizes = list(pool.map(lambda path: s3.size_of(client, uri.join(path)), paths))
    there = {path: size for path, size in zip(paths, sizes, strict=True) if size is not None}
    wrong = manifest.differences(found, there)
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""  # noqa: PLR2004
        raise RunFailed(f"the model in {run_uri} is not whole: {'; '.join(wrong[:3])}{more}")
    return found


def _read(client: Any, run_uri: s3.S3Uri) -> manifest.Manifest:
    uri = run_uri.join(manifest.NAME)
    try:
        found = read_manifest(client, run_uri)
    except s3.NotFound as error:
        raise RunFailed(f"the model was not uploaded: {uri} does not exist") from error
    except BadInput as error:
        raise RunFailed(f"the model's manifest cannot be used: {error}") from error
    if found.kind != "model" or not found.files:
        raise RunFailed(f"the manifest lists no model: {uri}")
    return found
