"""Which part may know which: imports go one way, and nothing shadows the RADL parser."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CONTROL = ROOT / "scripts/mayfly"
TRAINING = ROOT / "training"

# The lower layers: what each may import of the package. Modules not named here sit above them.
BASE = {"errors", "redact", "engines", "unresolved", "run_lock", "recipe.elastic"}
CLOUDS = {"aws", "azure", "egi", "google", "opennebula", "openstack"}
AUTH = {f"auth.{name}" for name in {"credential", "entry", "find", "token", "web"} | CLOUDS}
LAYERS = [
    BASE,
    {"spec"},
    {"steps", "clouds", "run", "inputs", "radl_lint", "ledger", "credentials", "prices"}
    | {"juicefs"}
    | AUTH,
    {"role_vars", "first_boot", "radl_render", "collection", "im", "im_server"}
    | {"node_types", "places", "images"},
    {
        "failover",
        "choices",
        "cost",
        "spending",
        "planning",
        "inventory",
        "dry_run",
        "providers.aws",
        "providers.azure",
    },
]


def imported(path: Path) -> Iterator[str]:
    """Every dotted name that a file imports, inner imports too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide who knows whom"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def module_name(path: Path) -> str:
    parts = path.relative_to(CONTROL).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


MODULES = {module_name(path): path for path in sorted(CONTROL.rglob("*.py"))}


def own_imports(path: Path) -> set[str]:
    """The modules of our own package that a file imports, by their names inside it."""
    found = set()
    for name in imported(path):
        parts = name.split(".")
        if parts[0] != "mayfly":
            continue
        inside = parts[1:]
        while inside and ".".join(inside) not in MODULES:
            inside = inside[:-1]
        found.add(".".join(inside))
    return found - {""}


def test_the_walk_sees_imports():
    assert "spec" in own_imports(MODULES["clouds"])
    assert "inputs" in own_imports(MODULES["role_vars"])


@pytest.mark.parametrize("level", range(len(LAYERS)))
def test_a_layer_knows_only_those_below_and_beside_it(level: int):
    allowed = set().union(*LAYERS[: level + 1])
    for name in LAYERS[level] & set(MODULES):
        assert own_imports(MODULES[name]) - allowed == set(), name


def test_every_layer_is_there():
    assert {"errors", "spec", "steps", "clouds", "ledger", "radl_render"} <= set(MODULES)


def test_errors_and_spec_have_nothing_beside_them():
    assert own_imports(MODULES["errors"]) == set()
    assert own_imports(MODULES["engines"]) == set()
    assert own_imports(MODULES["spec"]) == {"errors", "engines"}


def test_nobody_imports_the_command_line():
    users = {name for name, path in MODULES.items() if "cli" in own_imports(path)}
    assert users - {"__main__"} == set()


def test_there_is_no_circle():
    graph = {name: own_imports(path) - {name} for name, path in MODULES.items()}
    while graph:
        leaves = {name for name, uses in graph.items() if not uses & set(graph)}
        assert leaves, f"these import each other in a circle: {sorted(graph)}"
        graph = {name: uses for name, uses in graph.items() if name not in leaves}


@pytest.mark.parametrize("path", sorted(TRAINING.rglob("*.py")), ids=lambda path: path.name)
def test_what_runs_on_nodes_knows_nothing_of_the_control_side(path: Path):
    assert {name.split(".")[0] for name in imported(path)} & {
        "mayfly",
        "IM",
        "radl",
        "imclient",
    } == set()


@pytest.mark.parametrize(
    "path", sorted((TRAINING / "mayfly_train").rglob("*.py")), ids=lambda path: path.name
)
def test_the_node_library_needs_no_tensorflow(path: Path):
    """The control side and the supervisor's environment use it, and have none."""
    assert "tensorflow" not in {name.split(".")[0] for name in imported(path)}


def test_roles_know_neither():
    for path in sorted((ROOT / "roles").rglob("*.py")):
        names = {name.split(".")[0] for name in imported(path)}
        assert names & {"mayfly", "mayfly_train"} == set(), path


def test_no_python_beside_the_templates():
    """A package named radl here would shadow the parser of that name."""
    assert list((ROOT / "radl").rglob("*.py")) == []
