"""Every option that a docstring names exists."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(
    path
    for folder in ("pipes/trainpipes", "recipes/trainpipes_recipes")
    for path in (ROOT / folder).rglob("*.py")
)

TREES = {path: ast.parse(path.read_text()) for path in SOURCES}
CLASSES = {
    node.name: node
    for tree in TREES.values()
    for node in ast.walk(tree)
    if isinstance(node, ast.ClassDef)
}
Documented = ast.FunctionDef | ast.ClassDef


def documented(path: Path) -> Iterator[tuple[str, set[str], set[str]]]:
    """What has an ``Args:``, the options named there, and those that it takes."""
    for node in ast.walk(TREES[path]):
        if isinstance(node, Documented):
            section = re.search(
                r"^Args:\n(.*?)(?=^\S|\Z)", ast.get_docstring(node) or "", re.DOTALL | re.MULTILINE
            )
            if section is not None:
                named = re.findall(r"^ {4}([\w*][\w, *]*):", section[1], re.MULTILINE)
                names = {name.strip(" *") for each in named for name in each.split(",")}
                taken = _fields(node) if isinstance(node, ast.ClassDef) else _taken(node)
                yield node.name, names, taken


def _taken(function: ast.FunctionDef) -> set[str]:
    own = function.args
    plain = [*own.posonlyargs, *own.args, *own.kwonlyargs, own.vararg, own.kwarg]
    return {one.arg for one in plain if one is not None} - {"self", "cls"}


def _fields(kind: ast.ClassDef) -> set[str]:
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
        if isinstance(base, ast.Name) and base.id in CLASSES:
            fields |= _fields(CLASSES[base.id])
    return fields


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_options_that_a_docstring_names_exist(path: Path) -> None:
    for name, named, taken in documented(path):
        assert not named - taken, f"{name} has no such option"


def test_most_docstrings_with_options_are_read() -> None:
    assert sum(len(named) for path in SOURCES for _, named, _ in documented(path)) > 700
