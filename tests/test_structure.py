"""The folder tree keeps its promises."""

import ast
import builtins
import re
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import trainpipes

ROOT = Path(trainpipes.__file__).parent
SOURCES = sorted(ROOT.rglob("*.py"))

#: Rooms from the bottom up: a module imports from its own floor or from below.
FLOORS = [
    ["errors", "version"],
    ["_internal"],
    ["order", "cache", "columns", "filesystems", "media", "recipe_registry"],
    ["state", "samplers"],
    ["interfaces"],
    ["engine", "tokenizers"],
    ["stages", "sources"],
    ["look", "writers"],
    ["pipeline"],
    ["config", "loader", "nodes", "prepare"],
    ["integrations", "testing", "cli"],
    ["__main__"],
]
#: What a pipeline and a loader import in the methods that ask it, so that ``import`` is quick.
LATE = {"look"}
#: The same within ``engine``, from the bottom up.
ENGINE = ["calling", "planning", "processes", "reading", "shards", "iterating", "record"]
#: Modules, or rooms, that import something for types alone, and why. None of it closes a circle.
FOR_TYPES = {
    "__init__": "public names are loaded when they are first used",
    "_internal.locks": "a property without a lock has the types of functools.cached_property",
    "cli": "the command starts at once, and loads what it uses later",
    "engine.record": "what torch.distributed has is imported where it is used",
    "interfaces.stage": "a property made once has the types of functools.cached_property",
    "loader": "its methods lead upward",
    "nodes": "the class for each stage is made when the module is imported",
    "pipeline.chain": "its methods return what other packages have, and what it imports when asked",
    "sources.from_torchdata": "torchdata is slow to import",
    "writers.hf_dataset": "what is imported with the package",
}
#: Folders of tests that are about no single room; ``tests/README.md`` says what they are.
OTHER_TESTS = {
    "attacks", "benchmarks", "docs", "elastic", "faults", "frameworks", "frozen", "golden", "internal",
    "on_ray", "package", "recipes", "support", "tokenizing",
}  # fmt: skip
MODULES = {
    ".".join(("trainpipes", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(
        ".__init__"
    ): path
    for path in SOURCES
}


@cache
def imports_of(path: Path) -> list[tuple[str, bool, bool]]:
    """Modules that a file imports: whether at its top, and whether for types alone."""
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
        about = id(node) in top, id(node) in for_types
        if isinstance(node, ast.ImportFrom) and node.module:
            named = {f"{node.module}.{alias.name}" for alias in node.names}
            modules = named & MODULES.keys() or {node.module}
            found += [(module, *about) for module in modules]
        elif isinstance(node, ast.Import):
            found += [(alias.name, *about) for alias in node.names]
    return found


def room_of(module: str) -> str:
    """The package or module of ``trainpipes`` that a module is in."""
    return f"{module}.".split(".")[1]


@cache
def below() -> dict[str, dict[str, list[str]]]:
    """What each room imports of other rooms, anywhere and for types too: modules by the other room."""
    found: dict[str, dict[str, list[str]]] = {room_of(name): {} for name in MODULES}
    del found[""]  # ``__init__``, which only names things
    for name, path in MODULES.items():
        room = room_of(name)
        for module, *_ in imports_of(path) if room else ():
            other = room_of(module) if module.startswith("trainpipes.") else ""
            if other not in ("", room):
                found[room].setdefault(other, []).append(name)
    return found


def circles() -> list[set[str]]:
    """Rooms that lead to each other by their imports."""
    leads = {room: set(others) for room, others in below().items()}
    for middle in leads:
        for room in leads:
            if middle in leads[room]:
                leads[room] |= leads[middle]
    return [
        set(one) for one in {frozenset(o for o in leads[r] if r in leads[o]) for r in leads} if one
    ]


def floors() -> dict[str, int]:
    """The floor of each room: above all that it imports. Rooms of a circle are on one floor."""
    home = {room: frozenset({room}) for room in below()}
    home |= {room: frozenset(circle) for circle in circles() for room in circle}
    ground = {
        one: {home[other] for room in one for other in below()[room]} - {one}
        for one in home.values()
    }
    heights: dict[frozenset[str], int] = {}
    for one in TopologicalSorter(ground).static_order():
        heights[one] = 1 + max((heights[other] for other in ground[one]), default=0)
    return {room: heights[one] for room, one in home.items()}


def test_rooms_stand_on_each_other():
    height = floors()
    for floor in range(max(height.values()), 0, -1):
        print(f"{floor:3} {', '.join(sorted(room for room in height if height[room] == floor))}")  # noqa: T201
    found = circles()
    print(f"{len(height)} rooms, {max(height.values())} floors, circles: {found}")  # noqa: T201
    assert len(height) <= 27
    assert max(height.values()) <= 12
    assert not found
    assert height == {room: n for n, rooms in enumerate(FLOORS, start=1) for room in rooms}


def test_a_pipeline_imports_what_looks_at_it_when_it_is_asked():
    for name, path in MODULES.items():
        for module, top, _ in imports_of(path) if room_of(name) in ("pipeline", "loader") else ():
            assert not (top and room_of(module) in LATE), f"{name} imports {module}"


def test_the_engine_stands_on_itself():
    for name, path in MODULES.items():
        parts = name.split(".")
        for module, *_ in imports_of(path) if parts[1:2] == ["engine"] and parts[2:] else ():
            other = module.split(".")
            if other[:2] == parts[:2] and other[2:]:
                assert ENGINE.index(other[2]) <= ENGINE.index(parts[2]), f"{name} imports {module}"


def test_imports_for_types_alone_have_a_reason():
    found = {
        name.removeprefix("trainpipes.") if "." in name else "__init__"
        for name, path in MODULES.items()
        if "if TYPE_CHECKING" in path.read_text()
    }
    assert {"cli" if name.startswith("cli.") else name for name in found} == FOR_TYPES.keys()


def test_no_modules_import_each_other_in_a_circle():
    """Nor in the methods that import when they are called, nor for types."""
    leads = {
        name: {module for module, *_ in imports_of(path) if module in MODULES.keys() - {name}}
        for name, path in MODULES.items()
        if name != "trainpipes"  # which only names things
    }
    TopologicalSorter(leads).prepare()  # raises CycleError, which names them


def test_the_library_imports_no_optional_package_at_its_top():
    required = {"torch", "torchdata", "pyarrow", "numpy", "fsspec", "trainpipes"}
    import sys

    known = required | set(sys.stdlib_module_names)
    # Those of a framework say in one sentence what is missing.
    frameworks = {"accelerate", "datasets", "lightning", "ray", "transformers", "trl"}
    for path in SOURCES:
        by_name = "integrations" in path.parts or path.stem in ("hf_dataset", "ray_dataset")
        there = known | frameworks if by_name else known
        there = there | {"click"} if "cli" in path.parts else there
        for module, top, _ in imports_of(path):
            assert not top or module.split(".")[0] in there, f"{path.name} imports {module}"


#: What is Python code that holds a lock, in which Ctrl-C may leave it held.
PYTHONS_LOCKS = {
    "Condition", "Event", "Semaphore", "BoundedSemaphore", "Barrier", "Timer", "Queue", "LifoQueue",
    "PriorityQueue",
}  # fmt: skip
#: Where it runs in a thread that gets no signals.
WITHOUT_SIGNALS = {
    "engine.processes.executors": "a pool of processes is run by a thread of its own",
}


def test_no_thread_that_gets_signals_waits_by_python_code():
    for name, path in MODULES.items():
        text, short = path.read_text(), name.removeprefix("trainpipes.")
        for module, *_ in imports_of(path):
            if short not in WITHOUT_SIGNALS:
                assert not module.startswith("concurrent"), f"{name} imports {module}"
        for node in ast.walk(ast.parse(text)) if "thread" in text or "queue" in text else ():
            if isinstance(node, ast.ImportFrom) and node.module in ("threading", "queue"):
                names = {alias.name for alias in node.names} & PYTHONS_LOCKS
                assert not names, f"{name} imports {names}: see _internal.locks"
            elif isinstance(node, ast.Attribute) and node.attr in {*PYTHONS_LOCKS, "start"}:
                said = ast.unparse(node)
                bad = {
                    f"{module}.{one}" for one in PYTHONS_LOCKS for module in ("threading", "queue")
                }
                assert said not in bad, f"{name} has {said}: see _internal.locks"
                starts = said in ("thread.start", "self._thread.start") or (
                    node.attr == "start" and ast.unparse(node.value).startswith("threading.Thread(")
                )
                assert not starts or short == "_internal.locks", f"{name} has {said}: locks.start"


def test_source_roots_hold_no_init_file():
    top = Path(__file__).resolve().parents[1]
    assert not (top / "pipes" / "__init__.py").exists()
    assert not (top / "recipes" / "__init__.py").exists()


def test_tests_are_in_folders_named_as_the_rooms():
    tests = Path(__file__).parent
    names = {path.name for path in tests.iterdir()} - {"__pycache__"}
    assert {one for one in names if "." in one} == {"README.md", "conftest.py", "test_structure.py"}
    folders = {one for one in names if "." not in one and any((tests / one).rglob("*.*"))}
    assert folders - {room_of(name) for name in MODULES} == OTHER_TESTS
    assert not list((tests / "support").rglob("test_*"))


def test_each_test_that_needs_a_framework_is_run_by_make_test_frameworks():
    tests = Path(__file__).parent
    needed = re.compile(r"importorskip\(\"(accelerate|datasets|keras|lightning|torchft|trl)\b")
    files = [path for path in sorted(tests.rglob("test_*.py")) if needed.search(path.read_text())]
    elsewhere = [path for path in files if path.parent != tests / "frameworks"]
    assert elsewhere
    makefile = (tests.parent / "Makefile").read_text()
    for path in elsewhere:
        assert str(path.relative_to(tests.parent)) in makefile


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
