"""The folder tree keeps its promises."""

import ast
import builtins
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import trainpipes

ROOT = Path(trainpipes.__file__).parent
SOURCES = sorted(ROOT.rglob("*.py"))

#: Rooms from the bottom up: a module imports from its own floor or from below. The longest name that
#: fits a module says where it is.
FLOORS = [
    ["errors", "_internal", "version"],
    ["engine.layout", "engine.permutation", "engine.topology", "columns", "state"],
    ["kinds", "samplers"],
    ["storage.caching", "storage.cache"],
    ["engine", "stages", "sources", "tokenizers", "storage", "stage_methods"],
    [
        "pipeline",
        "start",
        "loader",
        "nodes",
        "foreign_node",
        "recipe_registry",
        "storage.map_dataset",
        "storage.memmap",
    ],
    ["look", "testing", "prepare", "config", "integrations"],
    ["cli", "__main__"],
]
#: The same within ``engine``.
ROOMS = {
    "layout": 0,
    "permutation": 0,
    "topology": 0,
    "interrupts": 0,
    "calling": 0,
    "pool": 0,
    "planning": 1,
    "reading": 2,
    "shards": 3,
    "iterating": 4,
}
#: Imported where it is used, so as not to go up: a pipeline offers what is built upon it, and a
#: source of nodes refuses our own.
LATE = {
    ("pipeline", "config"),
    ("pipeline", "integrations"),
    ("pipeline", "look"),
    ("loader", "look"),
    ("sources", "nodes"),
}


MODULES = {
    ".".join(("trainpipes", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(
        ".__init__"
    ): path
    for path in SOURCES
}


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
            named = {f"{node.module}.{alias.name}" for alias in node.names}
            modules = named & MODULES.keys() or {node.module}
            found += [(module, id(node) in top) for module in modules]
        elif isinstance(node, ast.Import):
            found += [(alias.name, id(node) in top) for alias in node.names]
    return found


def floor_of(module: str) -> tuple[int, str]:
    """The floor of a module, and the name in ``FLOORS`` that says so."""
    fits = [
        (len(name), floor, name)
        for floor, names in enumerate(FLOORS)
        for name in names
        if f"{module}.".startswith(f"{name}.")
    ]
    assert fits, f"{module} has no floor"
    _, floor, name = max(fits)
    return floor, name


def test_imports_go_one_way():
    wrong = []
    for path in SOURCES:
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts == ("__init__",):
            continue
        floor, own = floor_of(".".join(parts))
        for module, top in imports_of(path):
            if not module.startswith("trainpipes."):
                continue
            target = module.removeprefix("trainpipes.")
            above, name = floor_of(target)
            late = not top and (own, name.split(".")[0]) in LATE
            if above > floor and not late:
                wrong.append(f"{path.relative_to(ROOT)} imports {module}")
            engine = target.startswith("engine.") and parts[0] == "engine"
            if engine and ROOMS[target.split(".")[1]] > ROOMS[parts[1]]:
                wrong.append(f"{path.relative_to(ROOT)} imports {module}")
    assert not wrong


@pytest.mark.parametrize("within", [False, True], ids=["at the top", "within a room, anywhere"])
def test_no_modules_import_each_other_in_a_circle(within):
    below = {
        name: {
            module
            for module, top in imports_of(path)
            if module in MODULES.keys() - {name}
            and (module.split(".")[:2] == name.split(".")[:2] if within else top)
        }
        for name, path in MODULES.items()
    }
    TopologicalSorter(below).prepare()  # raises CycleError, which names them


def test_the_library_imports_no_optional_package_at_its_top():
    required = {"torch", "torchdata", "pyarrow", "numpy", "fsspec", "trainpipes"}
    import sys

    known = required | set(sys.stdlib_module_names)
    # Those of a framework say in one sentence what is missing.
    frameworks = {"accelerate", "datasets", "lightning", "ray", "transformers", "trl"}
    for path in SOURCES:
        there = known | frameworks if "integrations" in path.parts else known
        there = there | {"click"} if "cli" in path.parts else there
        for module, top in imports_of(path):
            assert not top or module.split(".")[0] in there, f"{path.name} imports {module}"


def test_source_roots_hold_no_init_file():
    top = Path(__file__).resolve().parents[1]
    assert not (top / "pipes" / "__init__.py").exists()
    assert not (top / "recipes" / "__init__.py").exists()


def test_public_names_are_sorted_and_there():
    assert trainpipes.__all__ == sorted(trainpipes.__all__)
    for name in trainpipes.__all__:
        assert getattr(trainpipes, name) is not None


def test_importing_all_names_leaves_pythons_own_alone():
    found = {}
    exec("from trainpipes import *", found)
    assert not found.keys() - {"__builtins__"} & vars(builtins).keys()
    assert found["concat"] is trainpipes.concat
    assert trainpipes.zip is not zip


def test_no_module_is_named_after_nothing():
    names = {part for path in SOURCES for part in path.relative_to(ROOT).with_suffix("").parts}
    assert not names & {"utils", "helpers", "common", "base", "manager", "misc"}


def test_all_stages_can_be_had_as_nodes():
    from every_stage import public_stages
    from trainpipes import nodes

    assert nodes.__all__ == sorted(nodes.__all__)
    stages = {getattr(nodes, name) for name in nodes.__all__}
    named = {"".join(part.title() for part in name.split("_")) for name in public_stages()}
    assert {stage.__name__ for stage in stages} == named | {"StageNode"}
