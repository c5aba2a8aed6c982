"""Every option that a docstring names exists, and the table of memory has the defaults."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

from trainpipes import Loader, recipes
from trainpipes._internal.checks import byte_count
from trainpipes.prepare import repack
from trainpipes.sources.files.list_files import ListFiles
from trainpipes.stages.cache import Cache
from trainpipes.stages.order import Shuffle

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(
    path
    for folder in ("pipes/trainpipes", "recipes/trainpipes_recipes")
    for path in (ROOT / folder).rglob("*.py")
)
Classes = dict[str, ast.ClassDef]


def documented() -> Iterator[tuple[str, set[str], set[str]]]:
    """What has an ``Args:``, with its file; the options named there; those that it takes."""
    nodes = [
        (path, node)
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    ]
    classes = {node.name: node for _, node in nodes if isinstance(node, ast.ClassDef)}
    for path, node in nodes:
        section = re.search(
            r"^Args:\n(.*?)(?=^\S|\Z)", ast.get_docstring(node) or "", re.DOTALL | re.MULTILINE
        )
        if section is not None:
            named = re.findall(r"^ {4}([\w*][\w, *]*):", section[1], re.MULTILINE)
            names = {name.strip(" *") for each in named for name in each.split(",")}
            is_class = isinstance(node, ast.ClassDef)
            taken = _fields(node, classes) if is_class else _taken(node)
            yield f"{node.name} in {path.relative_to(ROOT)}", names, taken


def _taken(function: ast.FunctionDef) -> set[str]:
    own = function.args
    plain = [*own.posonlyargs, *own.args, *own.kwonlyargs, own.vararg, own.kwarg]
    return {one.arg for one in plain if one is not None} - {"self", "cls"}


def _fields(kind: ast.ClassDef, classes: Classes) -> set[str]:
    """Options of a class: of its ``__init__``, or its fields and those of its bases."""
    for node in kind.body:
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            return _taken(node)
    fields = {
        node.target.id
        for node in kind.body
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and not ast.unparse(node.annotation).startswith("ClassVar")
    }
    for base in kind.bases:
        if isinstance(base, ast.Name) and base.id in classes:
            fields |= _fields(classes[base.id], classes)
    return fields


def test_options_that_a_docstring_names_exist() -> None:
    found = list(documented())
    assert not {name: named - taken for name, named, taken in found if named - taken}
    assert sum(len(named) for _, named, _ in found) > 700  # most are read


def test_the_table_of_memory_has_the_defaults() -> None:
    table = (ROOT / "docs" / "speed.md").read_text().split("\n## Memory\n")[1]
    rows = re.findall(r"^\| `(\w+)\((\w+)=\)` \| ([^|]+) \|", table, re.MULTILINE)
    owners = {
        "Loader": Loader,
        "repack": repack,
        "list_files": ListFiles,
        "cache": Cache,
        "shuffle": Shuffle,
    }
    assert len(rows) == 6
    for owner, option, said in rows:
        default = inspect.signature(owners[owner]).parameters[option].default
        if default is None:
            assert said == "none", option
        else:
            assert byte_count(default, option) == byte_count(said, option), option


def test_recipes_that_lack_a_common_option_are_named() -> None:
    table = (
        (ROOT / "docs" / "recipes.md")
        .read_text()
        .split("\n## Common options\n")[1]
        .split("\n## ")[0]
    )
    said = dict(re.findall(r"^\| `(\w+)[=`][^|]*\| [^|]*Not for ([^|]*) \|$", table, re.MULTILINE))
    takes = {
        recipe.name: {option.partition("=")[0] for option in recipe.options} for recipe in recipes()
    }
    assert said.keys() == {"drop_last", "on_error", "cache"}
    for option, names in said.items():
        lacking = {name for name, options in takes.items() if option not in options}
        assert set(re.findall(r"`(\w+)`", names)) == lacking, option
