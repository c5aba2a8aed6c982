"""Everything that users can name, as text: functions, methods, options with their defaults, commands, keys.

It is read from the code, by the ways that users have: ``__all__``, signatures, ``--help``, the docs' table of
YAML tags, ``pyproject.toml``. Integrations need packages that may not be there: their source is read.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import io
import re
import sys
import tempfile
import tomllib
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout, suppress
from functools import cache
from pathlib import Path
from typing import Any

__all__ = ["FILE", "ROOT", "text"]

FILE = Path(__file__).parent / "public.txt"
ROOT = FILE.parents[2]

#: Modules that users import, with all that their ``__all__`` names.
ROOMS = ["nodes", "testing", "samplers", "writers", "cache", "prepare", "config", "look"]
MODULES = ["trainpipes", *(f"trainpipes.{room}" for room in [*ROOMS, "writers.memmap"])]
MODULES += ["trainpipes_recipes", "trainpipes_recipes.inputs"]
#: Of these only what the docs speak of: their ``__all__`` is for other modules, too.
DOCUMENTED = {"trainpipes.cache", "trainpipes.config", "trainpipes.writers.memmap"}
#: Bases of users' own classes: of their members only those that docs/extend.md speaks of.
TO_DERIVE_FROM = {"Stage", "RowSource", "RowStream", "StreamReader"}


def text() -> str:
    """All of it, one thing a line."""
    parts: dict[str, Callable[[], Iterator[str]]] = {
        "modules": _modules,
        "results": _results,
        "recipes": _recipes,
        "integrations": _integrations,
        "commands": lambda: _command([]),
        "yaml": _yaml,
        "environment": lambda: iter(sorted(set(re.findall(r"\bTRAINPIPES_[A-Z_]+\b", _docs())))),
        "extras": _extras,
    }
    lines = ["# What users can name. Written by: python tests/frozen public"]
    for title, find in parts.items():
        lines += ["", f"[{title}]", *find()]
    return "\n".join(lines) + "\n"


@cache
def _docs() -> str:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "docs").rglob("*.py")]
    return "\n".join(page.read_text() for page in pages)


def _modules() -> Iterator[str]:
    for name in MODULES:
        module = importlib.import_module(name)
        for one in sorted(getattr(module, "__all__", [])):
            last = name.rpartition(".")[2]
            said = rf"{last}\.{one}\b|from {name} import [^\n]*\b{one}\b"
            if name not in DOCUMENTED or re.search(said, _docs()):
                yield from _said(f"{name}.{one}", getattr(module, one))


def _said(name: str, value: Any) -> Iterator[str]:
    if isinstance(value, types.ModuleType):
        yield f"{name}: module"
    elif inspect.isclass(value):
        bases = [base.__name__ for base in value.__bases__ if base.__name__[0] != "_"]
        yield f"{name}: class({', '.join(bases)}){_call(value)}"
        yield from _members(name, value)
    elif callable(value):
        yield f"{name}{_call(value)}"
    else:
        yield f"{name}: {type(value).__name__}"


def _members(name: str, kind: type) -> Iterator[str]:
    """What a class, or one of its bases of ours, has itself."""
    if ".nodes." in name and not name.endswith("StageNode"):
        return  # nodes have the methods of the one that is listed
    found: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        if base.__module__.startswith("trainpipes"):
            found |= vars(base)
            annotated = inspect.get_annotations(base)
            found |= {one: vars(base).get(one, inspect.Parameter.empty) for one in annotated}
    names = sorted(one for one in found if not one.startswith("_"))
    if {base.__name__ for base in kind.__mro__} & TO_DERIVE_FROM:
        told = (ROOT / "docs/extend.md").read_text()
        names = [one for one in names if re.search(rf"\b{one}\b", told)]
    for one in names:
        value = found[one]
        if isinstance(value, property) or type(value).__name__ == "cached_property":
            yield f"{name}.{one}: property"
        elif callable(getattr(kind, one, None)) and not inspect.isclass(value):
            of_class = isinstance(value, staticmethod | classmethod)
            yield f"{name}.{one}{_call(getattr(kind, one), bound=not of_class)}"
        else:
            yield f"{name}.{one}: attribute"


def _call(value: Any, bound: bool = False) -> str:
    """Parameters and their defaults."""
    try:
        parameters = list(inspect.signature(value).parameters.values())[bound:]
    except (TypeError, ValueError):
        return "(...)"
    shown, named = [], False
    for one in parameters:
        if one.name.startswith("_"):
            continue
        if one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD):
            shown.append(("**" if one.kind is one.VAR_KEYWORD else "*") + one.name)
        else:
            if one.kind is one.KEYWORD_ONLY and not named:
                shown.append("*")
            shown.append(_parameter(one))
        named |= one.kind in (one.VAR_POSITIONAL, one.KEYWORD_ONLY)
    return f"({', '.join(shown)})"


def _parameter(one: inspect.Parameter) -> str:
    """A name, with the values that its type lists, and the default."""
    values = re.search(r"Literal\[([^]]*)\]", str(one.annotation))
    said = one.name + (f": {' | '.join(values[1].split(', '))}" if values else "")
    if one.default is one.empty:
        return said
    named = callable(one.default) and hasattr(one.default, "__name__")
    return f"{said}={one.default.__name__ if named else one.default!r}"


def _results() -> Iterator[str]:
    """What the objects have that methods return."""
    import pyarrow as pa

    import trainpipes as tp

    rows = pa.table({"x": range(8), "input_ids": [[1] * (n % 3 + 1) for n in range(8)]})
    pipe = tp.from_arrow(rows)
    batches = pipe.batch(2).pad_collate()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mixed = tp.mix({"a": pipe, "b": pipe}, weights={"a": 1, "b": 1})
        found = {
            "pipe.explain()": batches.explain(),
            "pipe.show()": batches.show(),
            "pipe.stats()": batches.stats(),
            "pipe.stats().packing": pipe.select("input_ids").pack(4).stats().packing,
            "pipe.stats().mixture": mixed.stats().mixture,
            "pipe.write_parquet()": pipe.write_parquet(f"{folder}/parquet"),
            "pipe.write_memmap()": pipe.select("x").write_memmap(f"{folder}/map"),
            "pipe.to_map_dataset()": pipe.to_map_dataset(f"{folder}/rows.arrow"),
            "iter(pipe)": iter(batches),
            "iter(loader)": iter(tp.Loader(batches)),
            "tp.locate()": tp.locate(batches, 1),
            "tp.find()": tp.find(batches, [0]),
            "tp.recipes()": tp.recipes(),
            "tp.cache.info()": tp.cache.info(f"{folder}/kept"),
        }
        for name, value in found.items():
            yield f"{name}: an object"
            yield from _members(name, type(value))


def _recipes() -> Iterator[str]:
    import trainpipes_recipes

    for name in sorted(trainpipes_recipes.__all__):
        for one in inspect.signature(getattr(trainpipes_recipes, name)).parameters.values():
            yield f"{name}.{_parameter(one)}"


def _integrations() -> Iterator[str]:
    """The names in ``__all__`` of each module that the docs import from."""
    folder = ROOT / "pipes/trainpipes/integrations"
    for path in sorted([*folder.glob("*.py"), *folder.glob("*/__init__.py")]):
        parts = path.relative_to(ROOT / "pipes").with_suffix("").parts
        name = ".".join(part for part in parts if part != "__init__")
        if f"from {name} import" in _docs():
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                    for one in sorted(ast.literal_eval(node.value)):
                        yield from _of_source(f"{name}.{one}", _definition(path, one))


def _definition(path: Path, name: str) -> ast.stmt | None:
    """Where a name is defined: there, or in the module that it is imported from."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    for node in nodes:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return node
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and name in [one.name for one in node.names]:
            other = ROOT / "pipes" / f"{(node.module or '').replace('.', '/')}.py"
            if other.exists():
                return _definition(other, name)
    return None


def _of_source(name: str, node: ast.stmt | None) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef):
        yield f"{name}{_source_call(node)}"
    elif isinstance(node, ast.ClassDef):
        yield f"{name}: class({', '.join(ast.unparse(base) for base in node.bases)})"
        for one in node.body:
            if isinstance(one, ast.FunctionDef) and (one.name == "__init__" or one.name[0] != "_"):
                is_property = any("property" in ast.unparse(d) for d in one.decorator_list)
                yield f"{name}.{one.name}{': property' if is_property else _source_call(one)}"
    else:
        yield f"{name}: name"


def _source_call(node: ast.FunctionDef) -> str:
    node.args.args = [one for one in node.args.args if one.arg not in ("self", "cls")]
    for one in ast.walk(node.args):
        if isinstance(one, ast.arg):
            one.annotation = None
    return f"({ast.unparse(node.args)})"


def _command(words: list[str]) -> Iterator[str]:
    """A command and those below it, with their arguments and options, as ``--help`` tells."""
    module, _, function = _project()["scripts"]["trainpipes"].partition(":")
    before, out = sys.argv, io.StringIO()
    sys.argv = ["trainpipes", *words, "--help"]
    try:
        with redirect_stdout(out), suppress(SystemExit):
            getattr(importlib.import_module(module), function)()
    finally:
        sys.argv = before
    said = out.getvalue()
    yield said.partition("Usage: ")[2].partition("\n")[0].strip()
    options = said.partition("Options:")[2].partition("Commands:")[0]
    for entry in re.split(r"\n(?=  -)", options):
        if option := re.match(r"\n?  (-\S.*?)(?:  |\n|$)", entry):
            default = re.search(r"\[default: [^]]*\]", " ".join(entry.split()))
            name = " ".join(["trainpipes", *words, option[1].strip()])
            yield f"{name} {default[0]}" if default else name
    for one in re.findall(r"^  (\w[\w-]*)", said.partition("Commands:")[2], re.M):
        yield from _command([*words, one])


def _yaml() -> Iterator[str]:
    docs = (ROOT / "docs/yaml.md").read_text()
    for tag in sorted(set(re.findall(r"`(!!?\w+)", docs)) - {"!!python"}):  # which is refused
        yield f"tag {tag}"
    for key in sorted({"options", "recipe", "stages"} & set(re.findall(r"^(\w+):", docs, re.M))):
        yield f"key {key}"


def _extras() -> Iterator[str]:
    def name(one: str) -> str:
        return one if "trainpipes[" in one else re.split(r"[<>=;, ]", one)[0]

    def names(requirements: list[str]) -> str:
        return ", ".join(sorted(map(name, requirements)))

    project = _project()
    yield f"python {project['requires-python']}"
    yield f"requires {names(project['dependencies'])}"
    for extra, needs in sorted(project["optional-dependencies"].items()):
        yield f"extra {extra}: {names(needs)}"
    for group, found in sorted(project["entry-points"].items()):
        yield f"entry points {group}: {', '.join(sorted(found))}"


def _project() -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return found
