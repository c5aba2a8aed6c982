"""The list of private names of other packages, and what the sources use of these.

``test_private_names.py`` enters each name with a test of the installed version.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest

import trainpipes
import trainpipes_recipes

ROOTS = [Path(one.__file__).parent for one in (trainpipes, trainpipes_recipes)]
PINNED = Path(__file__).parents[2] / "constraints.txt"

PRIVATE = re.compile(r"_(?!_)\w+")
#: With an underscore, and in the documentation of Python or IPython.
DOCUMENTED = {"_exit", "_replace", "_asdict", "_fields", "_make", "_fields_", "_repr_mimebundle_"}
#: Names of ours that modules use of objects whose class they don't import; and that errors carry.
OURS = {
    "_iteration",
    "_plan",
    "_ranks",
    "_members",
    "_dataset",
    "_trainpipes",
    "_place",
    "_of_rows",
}
OURS |= {"_replaced", "_inputs", "_runs_user_code", "_draw_watch", "_writable"}  # of a stage
#: Texts that name no attribute: files, a variable of the environment, what datasets before 2.0 wrote, and a
#: tag of mkvmerge.
TEXTS = {
    "_manifest.json",
    "_unfinished",
    "_TRAINPIPES_COMPLETE",
    "_indices_data_files",
    "_delta_log",
}
TEXTS |= {"_STATISTICS_TAGS"}
#: What a class or a function is compared by.
BY_NAME = {"__name__", "__qualname__", "co_name", "co_qualname"}


@dataclass(frozen=True)
class Private:
    """Names of a package ("python" for its library), and the files that use them."""

    package: str
    names: tuple[str, ...]
    files: tuple[str, ...]


LIST: list[Private] = []


def private(package: str, names: str, files: str) -> Callable[..., Any]:
    """Enter names in the list, with a test that fails where the installed package has them no more. Its
    docstring says what they are for."""
    one = Private(package, tuple(names.split()), tuple(files.split()))
    LIST.append(one)

    def entered(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(*args: Any, **options: Any) -> None:
            if package != "python":
                pytest.importorskip(package)
            try:
                test(*args, **options)
            except Exception as error:
                raise AssertionError(
                    f"{package} {_version(package)} lacks one of {', '.join(one.names)} ({error!r}), "
                    f"which are there so that: {test.__doc__} It was there in {package} {_pinned(package)}"
                ) from error

        return run

    return entered


def _version(package: str) -> str:
    return sys.version.split()[0] if package == "python" else version(package)


def _pinned(package: str) -> str:
    lines = [line.partition("==") for line in PINNED.read_text().splitlines()]
    return {name: number for name, _, number in lines}.get(package, "3.11 to 3.13")


def written(place: str, text: str) -> bool:
    """Whether a class or function has a text in its source."""
    return text in inspect.getsource(resolve_name(place))


def name_of(path: Path) -> str:
    """A file's name; of the main file of a folder, also the folder's."""
    return f"{path.parent.name}/{path.name}" if path.stem == "__init__" else path.name


def parsed(code: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(code)))


def defined(nodes: list[ast.AST]) -> set[str]:
    """The names of a module's functions, classes, attributes and fields."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                found.add(node.attr)
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
        elif isinstance(node, ast.Assign):
            found |= {one.id for one in node.targets if isinstance(one, ast.Name)}
    return found


def module_of(path: Path) -> str:
    """A module's name."""
    root = next(root for root in ROOTS if root in path.parents)
    parts = path.relative_to(root.parent).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


def foreign(nodes: list[ast.AST], known: set[str], inherited: set[str]) -> Iterator[str]:
    """Private names that code uses and that are not ``known``, nor ``inherited`` by self; names that
    classes and functions are compared with; and reading of frames.
    """
    known = known | OURS | DOCUMENTED
    pieces = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in nodes:
        names: list[str] = []
        if isinstance(node, ast.Attribute):
            is_self = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            names = [] if is_self and node.attr in inherited else [node.attr]
        elif isinstance(node, ast.Import):
            names = [part for one in node.names for part in one.name.split(".")]
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("trainpipes"):
            names = [*(node.module or "").split("."), *(one.name for one in node.names)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            is_name = re.fullmatch(r"[\w.:]+", node.value) and id(node) not in pieces
            names = re.split(r"[.:]", node.value) if is_name and node.value not in TEXTS else []
        elif isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            if any(isinstance(one, ast.Attribute) and one.attr in BY_NAME for one in sides):
                parts = [part for one in sides for part in ast.walk(one)]
                yield from (
                    part.value
                    for part in parts
                    if isinstance(part, ast.Constant) and isinstance(part.value, str)
                )
        yield from (
            name
            for name in names
            if name == "f_locals" or (PRIVATE.fullmatch(name) and name not in known)
        )


def used() -> set[tuple[str, str]]:
    """Each file of the sources, with a private name that it uses."""
    sources = {path: parsed(path.read_text()) for root in ROOTS for path in root.rglob("*.py")}
    by_module = {module_of(path): defined(nodes) for path, nodes in sources.items()}
    ours, found = set().union(*by_module.values()), set()
    for path, nodes in sources.items():
        known = set(by_module[module_of(path)])
        for node in nodes:
            if isinstance(node, ast.ImportFrom) and node.module in by_module:
                for name in (node.module, *(f"{node.module}.{one.name}" for one in node.names)):
                    known |= by_module.get(name, set())
        found |= {(name_of(path), name) for name in foreign(nodes, known, ours)}
    return found
