"""Everything that users can name, as text: functions, methods, options with their defaults, commands, keys.

It is read from the code, by the ways that users have: ``__all__``, signatures, ``--help``, the docs' table of
YAML tags, ``pyproject.toml``. Where a package is not installed, from the source. No private name is in it.
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
from pathlib import Path
from typing import Any

__all__ = ["FILE", "text"]

FILE = Path(__file__).parent / "public.txt"
ROOT = FILE.parents[2]

#: Modules that users import, with all that their ``__all__`` names. Those that are no more just go.
MODULES = [
    "trainpipes",
    "trainpipes.nodes",
    "trainpipes.testing",
    "trainpipes.samplers",
    "trainpipes.writers",
    "trainpipes.cache",
    "trainpipes.prepare",
    "trainpipes.config",
    "trainpipes.look",
    "trainpipes.writers.memmap",
    "trainpipes_recipes",
    "trainpipes_recipes.inputs",
]
#: Of these only what the docs speak of: their ``__all__`` is for other modules, too.
DOCUMENTED = {
    "trainpipes.cache",
    "trainpipes.config",
    "trainpipes.writers.memmap",
}
#: Bases of users' own classes: of their members only those that docs/extend.md speaks of.
TO_DERIVE_FROM = {"Stage", "RowSource", "RowStream", "StreamReader"}
#: Read from the source: they need packages that may not be there.
INTEGRATIONS = "trainpipes.integrations"


def text() -> str:
    """All of it, one thing a line."""
    head = "# What users can name. Written by: python tests/frozen public\n"
    return head + "".join(f"\n[{title}]\n{_lines(find)}" for title, find in PARTS.items())


def _lines(find: Callable[[], Iterator[str]]) -> str:
    return "".join(f"{line}\n" for line in find())


def _modules() -> Iterator[str]:
    docs = _docs()
    for name in MODULES:
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError:
            continue
        names = sorted(getattr(module, "__all__", []))
        if name in DOCUMENTED:
            last = name.rpartition(".")[2]
            said = rf"{last}\.{{0}}\b|from {name} import [^\n]*\b{{0}}\b"
            names = [one for one in names if re.search(said.format(one), docs)]
        for one in names:
            yield from _said(f"{name}.{one}", getattr(module, one))


def _said(name: str, value: Any) -> Iterator[str]:
    if isinstance(value, types.ModuleType):
        yield f"{name}: module"
    elif inspect.isclass(value):
        bases = ", ".join(
            base.__name__ for base in value.__bases__ if not base.__name__.startswith("_")
        )
        yield f"{name}: class({bases}){_call(value)}"
        yield from _members(name, value)
    elif callable(value):
        yield f"{name}{_call(value)}"
    else:
        yield f"{name}: {type(value).__name__}"


def _members(name: str, kind: type) -> Iterator[str]:
    """What a class, or one of its bases of ours, has itself."""
    ours = [
        base for base in kind.__mro__ if base.__module__.partition(".")[0].startswith("trainpipes")
    ]
    if ".nodes." in name and not name.endswith("StageNode"):
        return  # nodes have the methods of the one that is listed
    found = {}
    for base in reversed(ours):
        found |= {one: value for one, value in vars(base).items() if not one.startswith("_")}
        annotated = inspect.get_annotations(base)
        found |= {
            one: vars(base).get(one, inspect.Parameter.empty) for one in annotated if one[0] != "_"
        }
    if {base.__name__ for base in kind.__mro__} & TO_DERIVE_FROM:
        told = (ROOT / "docs/extend.md").read_text()
        found = {one: value for one, value in found.items() if re.search(rf"\b{one}\b", told)}
    for one, value in sorted(found.items()):
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
        parameters = list(inspect.signature(value).parameters.values())
    except (TypeError, ValueError):
        return "(...)"
    if parameters and bound:  # called at the class, where the first one is the object
        parameters = parameters[1:]
    parameters = [one for one in parameters if not one.name.startswith("_")]
    shown, named = [], False
    for one in parameters:
        if one.kind is one.VAR_POSITIONAL:
            shown.append(f"*{one.name}")
            named = True
            continue
        if one.kind is one.VAR_KEYWORD:
            shown.append(f"**{one.name}")
            continue
        if one.kind is one.KEYWORD_ONLY and not named:
            shown.append("*")
            named = True
        values = _values(str(one.annotation))
        default = "" if one.default is one.empty else f"={_default(one.default)}"
        shown.append(f"{one.name}{values}{default}")
    return f"({', '.join(shown)})"


def _values(annotation: str) -> str:
    """The values that an option may have, where its type lists them."""
    found = re.search(r"Literal\[([^]]*)\]", annotation)
    return f": {' | '.join(part.strip() for part in found[1].split(','))}" if found else ""


def _default(value: Any) -> str:
    found = value.__name__ if callable(value) and hasattr(value, "__name__") else repr(value)
    return re.sub(r" at 0x[0-9a-f]+", "", found)


def _results() -> Iterator[str]:
    """What the objects have that methods return."""
    import pyarrow as pa

    import trainpipes as tp

    rows = pa.table({"x": range(8), "input_ids": [[1] * (n % 3 + 1) for n in range(8)]})
    pipe = tp.from_arrow(rows)

    def batches() -> Any:
        return pipe.batch(2).pad_collate()

    def packed() -> Any:
        return pipe.select("input_ids").pack(4)

    def mixed() -> Any:
        return tp.mix({"a": pipe, "b": pipe}, weights={"a": 1, "b": 1})

    def located() -> Any:
        return tp.locate(batches(), 1)

    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        makes: dict[str, Callable[[], Any]] = {
            "pipe.explain()": lambda: batches().explain(),
            "pipe.show()": lambda: batches().show(),
            "pipe.stats()": lambda: batches().stats(),
            "pipe.stats().packing": lambda: packed().stats().packing,
            "pipe.stats().mixture": lambda: mixed().stats().mixture,
            "pipe.write_parquet()": lambda: pipe.write_parquet(f"{folder}/parquet"),
            "pipe.write_memmap()": lambda: pipe.select("x").write_memmap(f"{folder}/map"),
            "pipe.to_map_dataset()": lambda: pipe.to_map_dataset(f"{folder}/rows.arrow"),
            "iter(pipe)": lambda: iter(batches()),
            "iter(loader)": lambda: iter(tp.Loader(batches())),
            "loader.progress()": lambda: tp.Loader(batches()).progress(),
            "tp.locate()": located,
            "tp.recipes()": tp.recipes,
            "tp.cache.info()": lambda: tp.cache.info(f"{folder}/kept"),
        }
        for name, make in makes.items():
            try:
                value = make()
            except Exception:
                continue  # it is no more, or is called otherwise: its lines go
            yield f"{name}: an object"
            yield from _members(name, type(value))


def _recipes() -> Iterator[str]:
    import trainpipes_recipes

    for name in sorted(trainpipes_recipes.__all__):
        for one in inspect.signature(getattr(trainpipes_recipes, name)).parameters.values():
            default = "" if one.default is one.empty else f"={_default(one.default)}"
            yield f"{name}.{one.name}{_values(str(one.annotation))}{default}"


def _integrations() -> Iterator[str]:
    """From the source: the names in ``__all__`` of each module that has no leading underscore."""
    folder = ROOT / "pipes" / INTEGRATIONS.replace(".", "/")
    docs = _docs()
    paths = [*folder.glob("*.py"), *folder.glob("*/__init__.py")]
    for path in sorted(paths):
        parts = [
            part for part in path.relative_to(folder).with_suffix("").parts if part != "__init__"
        ]
        name = ".".join([INTEGRATIONS, *parts])
        if f"from {name} import" not in docs:
            continue
        for one in _exported(ast.parse(path.read_text())):
            found = _definition(path, one)
            yield from _of_source(f"{name}.{one}", found)


def _exported(tree: ast.Module) -> list[str]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return sorted(ast.literal_eval(node.value))
    return []


def _definition(path: Path, name: str) -> ast.stmt | None:
    """Where a name is defined: there, or in the module that it is imported from."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return node
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.ImportFrom)
            and node.module
            and any(a.name == name for a in node.names)
        ):
            other = ROOT / "pipes" / (node.module.replace(".", "/") + ".py")
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
    given = node.args
    given.args = [one for one in given.args if one.arg not in ("self", "cls")]
    for one in ast.walk(given):
        if isinstance(one, ast.arg):
            one.annotation = None
    return f"({ast.unparse(given)})"


def _commands() -> Iterator[str]:
    """Each command with its arguments and options, as ``--help`` tells."""
    module, _, function = _project()["project"]["scripts"]["trainpipes"].partition(":")
    command = getattr(importlib.import_module(module), function)

    def told(words: list[str]) -> str:
        before, said = sys.argv, io.StringIO()
        sys.argv = ["trainpipes", *words, "--help"]
        try:
            with redirect_stdout(said), suppress(SystemExit):
                command()
        finally:
            sys.argv = before
        return said.getvalue()

    yield from _command([], told)


def _command(words: list[str], told: Callable[[list[str]], str]) -> Iterator[str]:
    said = told(words)
    name = " ".join(["trainpipes", *words])
    usage = re.search(r"Usage: (.*)", said)
    yield usage[1].strip() if usage else f"{name}: no help"
    options = said.partition("Options:")[2].partition("Commands:")[0]
    for entry in re.split(r"\n(?=  -)", options):
        option = re.match(r"\n?  (-\S.*?)(?:  |\n|$)", entry)
        if option is None:
            continue
        default = re.search(r"\[default: ([^]]*)\]", " ".join(entry.split()))
        yield f"{name} {option[1].strip()}" + (f" [default: {default[1]}]" if default else "")
    below = re.findall(r"^  (\w[\w-]*)", said.partition("Commands:")[2], re.M)
    for one in below:
        yield from _command([*words, one], told)


def _yaml() -> Iterator[str]:
    docs = (ROOT / "docs/yaml.md").read_text()
    for tag in sorted(set(re.findall(r"`(!!?\w+)", docs)) - {"!!python"}):  # which is refused
        yield f"tag {tag}"
    for key in sorted({"options", "recipe", "stages"} & set(re.findall(r"^(\w+):", docs, re.M))):
        yield f"key {key}"


def _environment() -> Iterator[str]:
    """Variables that users may set: those that the docs name."""
    yield from sorted(set(re.findall(r"\bTRAINPIPES_[A-Z_]+\b", _docs())))


def _extras() -> Iterator[str]:
    project = _project()["project"]
    yield f"python {project['requires-python']}"
    yield f"requires {', '.join(sorted(_name(one) for one in project['dependencies']))}"
    for extra, needs in sorted(project["optional-dependencies"].items()):
        yield f"extra {extra}: {', '.join(sorted(_name(one) for one in needs))}"
    for group, names in sorted(project["entry-points"].items()):
        yield f"entry points {group}: {', '.join(sorted(names))}"


def _name(requirement: str) -> str:
    return (
        re.split(r"[<>=;, ]", requirement)[0] if "trainpipes[" not in requirement else requirement
    )


def _project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def _docs() -> str:
    pages = [
        ROOT / "README.md",
        *sorted((ROOT / "docs").rglob("*.md")),
        *sorted((ROOT / "docs").rglob("*.py")),
    ]
    return "\n".join(page.read_text() for page in pages)


PARTS: dict[str, Callable[[], Iterator[str]]] = {
    "modules": _modules,
    "results": _results,
    "recipes": _recipes,
    "integrations": _integrations,
    "commands": _commands,
    "yaml": _yaml,
    "environment": _environment,
    "extras": _extras,
}
