"""The head's and the workers' engine must be the same: they exchange objects, not documents."""

from __future__ import annotations

import sys
from importlib import metadata

from mayfly_train.errors import BadInput
from mayfly_train.recipe import names
from mayfly_train.recipe.store import Store, read_json, to_bytes

PACKAGES = ("distributed", "dask", "cloudpickle", "mayfly-train")


def here() -> dict[str, str]:
    """What this process has; of Python only the minor version counts. A package that is no
    distribution here (a bare checkout) has none."""
    found = {"python": f"{sys.version_info[0]}.{sys.version_info[1]}"}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def publish(store: Store) -> None:
    """Tell what the head has, for workers to compare."""
    store.write(names.ENGINE, to_bytes(here()))


def require_same(store: Store, node: str) -> None:
    """Raise BadInput, naming every difference, unless this node has what the head has."""
    head, own = read_json(store, names.ENGINE) or {}, here()
    different = [
        f"{name} {own[name]}, and the head {head[name]}"
        for name in sorted(head.keys() & own.keys())
        if head[name] != own[name]
    ]
    if different:
        raise BadInput(f"node {node} has {'; '.join(different)} — install the head's versions")
