"""The reference: what is public, with its parameters and its docstring, as Markdown.

Docstrings are of Google's form: sections such as ``Args`` with indented entries, and examples after ``>>>``.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset

import trainpipes as tp
import trainpipes_recipes
from trainpipes import errors, samplers
from trainpipes.pipeline.chain import Pipeline

__all__ = ["pages"]

SECTIONS = ("Args", "Attributes", "Returns", "Raises", "Yields")
ENTRY = re.compile(r"^([\w*, ]+?(?:\[\w+\])?): ?(.*)$")
#: What a pipeline's methods that add no stage are called after, in the order of the class.
KINDS = (
    "RowStage",
    "TableStage",
    "BatchStage",
    "StatefulStage",
    "Source",
    "RowSource",
    "RowStream",
    "StreamReader",
    "Format",
    "Layout",
    "Place",
    "Rows",
)
FUNCTIONS = (
    "load", "locate", "find", "recipe", "recipes", "merge_states", "read_memmap", "write_memmap",
    "pad_sequences", "profile", "show",
)  # fmt: skip


def pages() -> Iterator[tuple[str, str, str]]:
    """File name, title and text of each page."""
    methods = {n: m for n, m in inspect.getmembers(Pipeline, callable) if not n.startswith("_")}
    inherited = set(dir(IterableDataset))
    stages = {n: m for n, m in methods.items() if m.__module__.startswith("trainpipes.stages")}
    own = {
        name: method
        for name, method in methods.items()
        if name not in stages and name not in inherited and not name.startswith("read_")
    }
    what = "Functions that start a pipeline."
    yield (
        "sources",
        "Sources",
        _page(what, "tp.", {n: getattr(tp, n) for n in tp._NAMES["pipeline.starts"].split()}),
    )
    what = "Methods of a pipeline that add a stage."
    yield "stages", "Stages", _page(what, "", stages)
    yield "pipeline", "Pipeline", _page(described(Pipeline), "", own)
    functions = inspect.getmembers(tp.Loader, inspect.isfunction)
    public = {name: function for name, function in functions if not name.startswith("_")}
    yield "loader", "Loader", _page(described(tp.Loader), "", public)
    what = "Other functions of `import trainpipes as tp`."
    found = {name: getattr(tp, name) for name in FUNCTIONS if hasattr(tp, name)}
    yield "functions", "Functions", _page(what, "tp.", found)
    found = {name: getattr(samplers, name) for name in samplers.__all__}
    what = "For `tp.from_dataset(dataset, sampler=...)` and `.shuffle(sampler=...)`."
    yield "samplers", "Samplers", _page(what, "tp.samplers.", found)
    found = {name: getattr(trainpipes_recipes, name) for name in trainpipes_recipes.__all__}
    what = "Ready-made pipelines: `tp.recipe(name, ...)`."
    yield "recipes", "Recipes", _page(what, "", found)
    found = {name: getattr(errors, name) for name in errors.__all__}
    yield "errors", "Errors", _page(markdown(errors.__doc__ or ""), "tp.", found)
    what = "Base classes for [your own stages, sources and formats](../extend.md)."
    yield "extend", "Base classes", _page(what, "tp.", {n: getattr(tp, n) for n in KINDS})


def _page(what: str, home: str, objects: dict[str, Any]) -> str:
    parts = [what]
    for name, one in sorted(objects.items()):
        parts += [f"## {home}{name} {{ #{name.lower()} }}", described(one)]
    return "\n\n".join(parts) + "\n"


def described(one: Any) -> str:
    """Parameters and docstring of a function or class."""
    parts = [] if isinstance(one, type) and issubclass(one, Exception) else [signature(one)]
    return "\n\n".join([*parts, markdown(inspect.getdoc(one) or "")])


def signature(one: Any) -> str:
    """The call, as Python; a parameter a line where it is long."""
    name = getattr(one, "__name__", "")
    try:
        found = inspect.signature(one)
    except (TypeError, ValueError):
        return ""
    parts: list[str] = []
    for parameter in found.parameters.values():
        text = re.sub(r": '([^']*)'", r": \1", str(parameter))  # types as text
        if parameter.kind is parameter.KEYWORD_ONLY and not any(p.startswith("*") for p in parts):
            parts.append("*")
        if parameter.name != "self":
            parts.append(text)
    line = f"{name}({', '.join(parts)})"
    if len(line) > 88:
        line = f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + ")"
    return f"```python\n{line}\n```"


def markdown(text: str) -> str:
    """A docstring as Markdown."""
    out: list[str] = []
    lines = text.splitlines()
    number = 0
    while number < len(lines):
        line = lines[number]
        section = line.rstrip(":")
        if line.endswith(":") and section in SECTIONS:
            stop = _indented(lines, number + 1)
            out += [
                "",
                *_entries(
                    section, textwrap.dedent("\n".join(lines[number + 1 : stop])).splitlines()
                ),
                "",
            ]
            number = stop
        elif line.startswith(">>>"):
            stop = number
            while stop < len(lines) and lines[stop]:
                stop += 1
            out += ["", "```pycon", *lines[number:stop], "```", ""]
            number = stop
        elif line.startswith("    ") and (not out or not out[-1]):
            stop = _indented(lines, number)
            out += [
                "```text",
                *textwrap.dedent("\n".join(lines[number:stop])).rstrip().splitlines(),
                "```",
                "",
            ]
            number = stop
        else:
            out.append(line)
            number += 1
    return _ticks(out)


def _ticks(lines: list[str]) -> str:
    """Double backquotes as single ones, outside of blocks of code."""
    inside, found = False, []
    for line in lines:
        if line.lstrip().startswith("```"):
            inside = not inside
        found.append(line if inside or line.lstrip().startswith("```") else line.replace("``", "`"))
    return "\n".join(found)


def _indented(lines: list[str], first: int) -> int:
    """The line after an indented block."""
    stop = first
    while stop < len(lines) and (not lines[stop].strip() or lines[stop].startswith("    ")):
        stop += 1
    return stop


def _entries(section: str, lines: list[str]) -> list[str]:
    title = {"Args": "Parameters"}.get(section, section)
    if section in ("Returns", "Yields"):
        return [f"**{title}:** {' '.join(lines)}"]
    out = [f"**{title}**", ""]
    for line in lines:
        entry = ENTRY.match(line)
        if entry and not line.startswith(" "):
            out.append(f"- `{entry[1]}`: {entry[2]}" if entry[2] else f"- `{entry[1]}`:")
        elif line.strip().startswith("- "):
            out += [
                *([""] if out[-1].strip() and not out[-1].lstrip().startswith("- ") else []),
                f"    {line.strip()}",
            ]
        else:
            out.append(f"    {line.strip()}" if line.strip() else "")
    return out
