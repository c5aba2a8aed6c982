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


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_one_way(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    if parts == ("__init__",):
        return
    floor, own = floor_of(".".join(parts))
    for module, top in imports_of(path):
        if not module.startswith("trainpipes."):
            continue
        target = module.removeprefix("trainpipes.")
        above, name = floor_of(target)
        late = not top and (own, name.split(".")[0]) in LATE
        assert above <= floor or late, f"{path.relative_to(ROOT)} imports {module}"
        if target.startswith("engine.") and parts[0] == "engine":
            assert ROOMS[target.split(".")[1]] <= ROOMS[parts[1]], f"{path.name} imports {module}"


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


def test_every_room_has_its_floor_and_its_line():
    import trainpipes.engine

    found = {path.stem for path in (ROOT / "engine").iterdir()}
    assert found - {"__pycache__", "__init__"} == set(ROOMS)
    told = [line.split()[0] for line in trainpipes.engine.__doc__.splitlines()[1:] if line]
    assert sorted(told) == sorted(ROOMS)


def lines_of(room: str) -> list[str]:
    """What a room's text names, line by line."""
    tree = ast.parse((ROOT / room / "__init__.py").read_text())
    body = (ast.get_docstring(tree) or "").split("\n\n", 1)[1]
    return [line.split()[0] for line in body.splitlines() if line]


def rooms_of(room: str) -> list[str]:
    return [f"{room}/{path.name}" for path in (ROOT / room).glob("[a-z]*") if path.is_dir()]


SOURCE_ROOMS = ["sources", *rooms_of("sources")]


@pytest.mark.parametrize("room", [*SOURCE_ROOMS, *rooms_of("engine"), "storage/caching", "kinds"])
def test_rooms_tell_what_is_in_them(room):
    there = {path.stem for path in (ROOT / room).iterdir()} - {"__pycache__", "__init__"}
    assert sorted(lines_of(room)) == sorted(there)


@pytest.mark.parametrize("room", SOURCE_ROOMS)
def test_rooms_of_sources_stand_on_each_other_from_the_bottom_up(room):
    told, depth = lines_of(room), room.count("/") + 2
    home = ["trainpipes", *room.split("/")]
    for path in (ROOT / room).rglob("*.py"):
        for module, _ in imports_of(path):
            parts = module.split(".")
            if parts[:depth] == home:
                assert len(parts) == 4, f"{path.name} imports {module}, not a module of it"
                own = path.relative_to(ROOT / room).with_suffix("").parts[0]
                below = told.index(parts[depth]) <= told.index(own)
                assert below, f"{path.name} imports {module}, which is above it"


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


#: Where rows are Python objects, or are to become some, or a filter holds Python values: pyarrow may import
#: pandas there.
PYTHON_ROWS = {
    "columns/columns.py",
    "columns/value_column.py",
    "columns/row_types.py",
    "sources/parquet/filter.py",
    "stages/row_hash.py",
}
MAKERS = {"array", "scalar", "repeat", "infer_type"}
METHODS = {"to_numpy", "to_pandas", "to_pandas_dtype", "from_pylist", "from_pydict", "empty_table"}
#: Functions of ``pyarrow.compute`` that make a scalar of a Python value.
OF_VALUES = {
    "add", "and_", "coalesce", "divide", "equal", "fill_null", "greater", "greater_equal", "if_else",
    "index", "is_in", "less", "less_equal", "multiply", "not_equal", "or_", "subtract",
}  # fmt: skip


def pandas_calls(source: str) -> list[str]:
    """Calls for which pyarrow imports pandas, as far as can be told without types."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name == "pyarrow.dataset"]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found += [name for name in names if name.startswith("pyarrow.dataset")]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner, name = ast.unparse(node.func.value), node.func.attr
            given = [*node.args, *(keyword.value for keyword in node.keywords)]
            first = node.args[0] if node.args else node
            if (
                (owner == "pa" and name in MAKERS)
                or name in METHODS
                or (owner == "pa" and name in ("table", "record_batch") and _holds_python(first))
                or (owner == "pc" and name in OF_VALUES and any(map(_is_literal, given)))
                or (name == "from_arrays" and any(map(_is_numpy, given)))
                or (name == "take" and isinstance(first, ast.List | ast.ListComp))
                or (name in ("index", "fill_null") and "is_null" in owner)
                or (owner == "np" and name in ("array", "asarray") and _is_column(first))
            ):
                found.append(ast.unparse(node))
    return found


def _holds_python(given: ast.expr) -> bool:
    values = given.values if isinstance(given, ast.Dict) else [given]
    values = [given.value] if isinstance(given, ast.DictComp) else values
    return any(isinstance(v, ast.List | ast.ListComp) or _is_numpy(v) for v in values)


def _is_numpy(given: ast.expr) -> bool:
    text = ast.unparse(given)
    return isinstance(given, ast.Call) and (text.startswith("np.") or ".astype(" in text)


def _is_literal(given: ast.expr) -> bool:
    return isinstance(given, ast.Constant)


def _is_column(given: ast.expr) -> bool:
    called = isinstance(given, ast.Call) and isinstance(given.func, ast.Attribute)
    return called and given.func.attr in ("column", "chunk", "combine_chunks", "flatten", "is_null")


def test_only_where_rows_are_python_objects_may_pyarrow_import_pandas():
    found = {
        str(path.relative_to(ROOT)): calls
        for path in SOURCES
        if (calls := pandas_calls(path.read_text())) and path != ROOT / "columns/arrays.py"
    }
    assert {name: calls for name, calls in found.items() if name not in PYTHON_ROWS} == {}
    assert set(found) == PYTHON_ROWS, "the list names files that need not be in it"


IMPORTING = """
pa.array([1])
pa.scalar('')
pa.table({'x': [1, 2]})
pa.table({name: [f(row) for row in rows] for name in names}, schema=schema)
pa.table({'x': np.arange(3)})
pa.Table.from_pylist(rows)
pa.ListArray.from_arrays(offsets.astype(np.int32), values)
table.take([0])
column.to_numpy(zero_copy_only=False)
np.asarray(table.column('x'))
pc.equal(column, 1)
column.is_null().index(True)
schema.empty_table()
import pyarrow.dataset
import pyarrow.dataset as ds
from pyarrow import dataset
from pyarrow.dataset import field
"""
IMPORTING_NOTHING = """
to_numpy(column)
pa.table({'x': to_arrow(values)})
pa.table(columns, schema=schema)
table.take(to_arrow(index))
np.array([1, 2])
pc.binary_slice(strings, 0, 3)
column.cast(pa.int64())
"""


@pytest.mark.parametrize("calls", [IMPORTING, IMPORTING_NOTHING], ids=["some", "none"])
def test_calls_that_import_pandas_are_seen(calls):
    for call in calls.strip().splitlines():
        assert bool(pandas_calls(call)) == (calls == IMPORTING), call
