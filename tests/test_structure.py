"""The folder tree keeps its promises."""

import ast
import importlib
import pkgutil
from pathlib import Path

import pytest

import trainpipes

ROOT = Path(trainpipes.__file__).parent
SOURCES = sorted(ROOT.rglob("*.py"))

#: Rooms from the bottom up: a module imports from its own floor or from below.
FLOORS = {
    "amount": 0,
    "errors": 0,
    "fair_queue": 0,
    "checks": 0,
    "checksum": 0,
    "cursor": 0,
    "identity": 0,
    "naming": 0,
    "shown": 0,
    "cache": 0,
    "order": 0,
    "permute": 0,
    "samplers": 0,
    "state": 0,
    "merge": 0,
    "topology": 0,
    "byte_rows": 0,
    "rectangles": 0,
    "padding": 0,
    "runtime": 1,
    "resharding": 1,
    "tokenizers": 2,
    "stages": 2,
    "sources": 2,
    "nodes": 3,
    "pipeline": 3,
    "start": 4,
    "explain": 4,
    "map_dataset": 4,
    "memmap": 4,
    "loader": 4,
    "recipes": 4,
    "shuffle_quality": 5,
    "testing": 5,
    "integrations": 5,
    "cli": 5,
}
#: The same within ``runtime``.
ROOMS = {
    "pool": 0,
    "drought": 0,
    "progress": 0,
    "warn_once": 0,
    "rows": 1,
    "run": 2,
    "source": 2,
    "made_once": 0,
    "stage": 2,
    "blame": 3,
    "kinds": 3,
    "calling": 3,
    "caching": 3,
    "reading": 4,
    "planning": 5,
    "shards": 6,
    "mixing": 7,
    "iterating": 7,
    "forecast": 8,
}
#: Imported where it is used, so as not to go up: a node runs what it is the end of, and a pipeline
#: offers what is built upon it.
LATE = {("pipeline", "explain"), ("pipeline", "map_dataset"), ("stage", "iterating")}


def imports_of(path: Path) -> list[tuple[str, bool]]:
    """Modules that a file imports, and whether at its top; what is for types alone is left out."""
    found = []
    tree = ast.parse(path.read_text())
    top = {id(node) for node in tree.body}
    for_types = {
        id(node)
        for branch in tree.body
        if isinstance(branch, ast.If) and ast.unparse(branch.test) == "TYPE_CHECKING"
        for node in ast.walk(branch)
    }
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.ImportFrom) and node.module:
            found.append((node.module, id(node) in top))
        elif isinstance(node, ast.Import):
            found += [(alias.name, id(node) in top) for alias in node.names]
    return found


def in_order(path: Path, module: str, top: bool, depth: int, floors: dict[str, int]) -> bool:
    """Whether a file may import a module: by the floors of the rooms at a depth of the tree."""
    own = path.relative_to(ROOT).with_suffix("").parts[depth - 1]
    target = module.split(".")[depth]
    return floors[target] <= floors[own] or (not top and (own, target) in LATE)


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_one_way(path):
    parts = path.relative_to(ROOT).parts
    if parts == ("__init__.py",):
        return
    for module, top in imports_of(path):
        if module.startswith("trainpipes."):
            assert in_order(path, module, top, 1, FLOORS), f"{path.name} imports {module}"
        if module.startswith("trainpipes.runtime.") and parts[0] == "runtime":
            assert in_order(path, module, top, 2, ROOMS), f"{path.name} imports {module}"


def test_every_room_has_its_floor_and_its_line():
    import trainpipes.runtime

    found = {path.stem for path in (ROOT / "runtime").iterdir()}
    assert found - {"__pycache__", "__init__"} == set(ROOMS)
    told = [line.split()[0] for line in trainpipes.runtime.__doc__.splitlines()[1:] if line]
    assert sorted(told) == sorted(ROOMS)


def test_the_library_imports_no_optional_package_at_its_top():
    required = {"torch", "torchdata", "pyarrow", "numpy", "fsspec", "trainpipes"}
    import sys

    known = required | set(sys.stdlib_module_names)
    for path in SOURCES:
        for module, top in imports_of(path):
            assert not top or module.split(".")[0] in known, f"{path.name} imports {module}"


def test_source_roots_hold_no_init_file():
    top = Path(__file__).resolve().parents[1]
    assert not (top / "pipes" / "__init__.py").exists()
    assert not (top / "recipes" / "__init__.py").exists()


def test_public_names_are_sorted_and_there():
    assert trainpipes.__all__ == sorted(trainpipes.__all__)
    for name in trainpipes.__all__:
        assert getattr(trainpipes, name) is not None


@pytest.mark.parametrize(
    "name", sorted(m.name for m in pkgutil.walk_packages(trainpipes.__path__, "trainpipes."))
)
def test_every_module_exports_what_it_has(name):
    module = importlib.import_module(name)
    for exported in getattr(module, "__all__", []):
        assert hasattr(module, exported), exported


def test_no_module_is_named_after_nothing():
    names = {part for path in SOURCES for part in path.relative_to(ROOT).with_suffix("").parts}
    assert not names & {"utils", "helpers", "common", "base", "manager", "misc"}


def test_all_stages_can_be_had_as_nodes():
    from every_stage import public_stages
    from trainpipes import nodes

    assert nodes.__all__ == sorted(nodes.__all__)
    stages = {getattr(nodes, name) for name in nodes.__all__}
    named = {"".join(part.title() for part in name.split("_")) for name in public_stages()}
    assert {stage.__name__ for stage in stages} == named | {"Stage"}
