"""The text of a config: YAML 1.2 with the line of each value, ``${NAME}``, paths to values, and types."""

from __future__ import annotations

import functools
import importlib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from types import NoneType
from typing import Any

import pyarrow as pa
import torch

from trainpipes._internal.checks import need
from trainpipes._internal.messages import nearest
from trainpipes.errors import ConfigError, shown
from trainpipes.interfaces import options
from trainpipes.interfaces.quarantine import Quarantine

#: Bytes of a document, values in it (those of aliases counted wherever they are used), and levels, at most.
LARGEST, MOST, DEEPEST = 1 << 20, 100_000, 64
_OF_YAML = ("!!map", "!!seq", "!!str", *(f"!!{name}" for name in options.SCALARS))
TAGS = ("!function", "!pipeline")


@dataclass
class Node:
    """A value of a document; one of a change has no line."""

    value: Any
    line: int | None = None
    tag: str = ""
    quoted: bool = False

    def __str__(self) -> str:
        kinds = {dict: "a mapping", list: "a list", NoneType: "nothing"}
        return f"{self.tag} {kinds.get(type(self.value)) or shown(self.value)}".strip()

    @classmethod
    def of(cls, value: Any) -> Node:
        if isinstance(value, dict):
            return cls({key: cls.of(inner) for key, inner in value.items()})
        return cls([cls.of(inner) for inner in value] if isinstance(value, list | tuple) else value)


@dataclass
class Document:
    """Reads a text, and says where in it something is."""

    name: str
    _count: int = field(default=0, init=False)

    def at(self, node: Node | None, path: str) -> str:
        """``train.yaml:7: stages[3].buffer_size: ``, with what there is of it."""
        place = "" if node is None else ", changes" if node.line is None else f":{node.line}"
        return f"{self.name}{place}: {path}: " if path else f"{self.name}{place}: "

    def error(self, node: Node | None, path: str, text: Any) -> ConfigError:
        return ConfigError(f"{self.at(node, path)}{text}", path=self.name)

    def need(self, good: Any, node: Node | None, path: str, text: str) -> None:
        """Raise unless something is good."""
        if not good:
            raise self.error(node, path, text)

    def parse(self, text: str) -> Node:
        """The nodes of a text; raises ConfigError where it is no YAML, or too much of it."""
        need("yaml", "tp.load")
        import yaml

        rule = f"a config must have at most {LARGEST:,} bytes"
        self.need(len(text) <= LARGEST, None, "", rule)
        try:
            root = yaml.compose(
                text, options.with_scalars(yaml.SafeLoader, yaml_implicit_resolvers={})
            )
        except (yaml.YAMLError, RecursionError) as error:
            mark, position = getattr(error, "problem_mark", None), getattr(error, "position", 0)
            number = text.count("\n", 0, position) if mark is None else mark.line
            parts = [getattr(error, name, None) for name in ("context", "problem", "reason")]
            said = " ".join(filter(None, parts)) or str(error)
            in_braces = "${" in "".join(text.split("\n")[number : number + 1])
            hint = "; within {} and [] put ${NAME} in quotes" if in_braces else ""
            raise self.error(Node(None, number + 1), "", f"this is no YAML: {said}{hint}") from None
        return Node(None, 1) if root is None else self._node(root)

    def _node(self, given: Any, depth: int = 1, line: int | None = None) -> Node:
        """PyYAML's node as ours, at the line of its key; an alias's comes once for each use."""
        self._count += 1
        tag, quoted = (
            given.tag.replace(options.STANDARD, "!!"),
            getattr(given, "style", None) is not None,
        )
        node = Node(None, given.start_mark.line + 1, tag, quoted)
        rule = f"a config must have at most {MOST:,} values and {DEEPEST} levels"
        self.need(self._count <= MOST and depth <= DEEPEST, node, "", rule)
        known = _OF_YAML if tag.startswith("!!") else TAGS
        if tag not in known:
            hint = f"{nearest(tag, known)}; there are {', '.join(known)}"
            raise self.error(node, "", f"there is no tag {shown(tag)}{hint}")
        if given.id == "sequence":
            node.value = [self._node(inner, depth + 1) for inner in given.value]
        elif given.id == "mapping":
            node.value = {}
            for name, value in given.value:
                key = self._node(name, depth)
                rule = "a key must be text or a number, without a tag of ours"
                self.need(name.id == "scalar" and not key.tag, key, "", rule)
                if key.value in node.value:
                    raise self.error(key, "", f"the key {shown(key.value)} stands here twice")
                node.value[key.value] = self._node(value, depth + 1, key.line)
        else:
            kind = tag.removeprefix("!!")
            try:
                node.value = (
                    options.SCALARS[kind][1](given.value)
                    if kind in options.SCALARS
                    else given.value
                )
            except ValueError as error:
                said = f"{shown(given.value)} is no {kind}: {error}"
                raise self.error(node, "", said) from None
        node.tag = "" if tag.startswith("!!") else tag
        node.line = line or node.line
        return node


def resolved(text: str) -> Any:
    """What a text without quotes is; raises ValueError for a number of thousands of digits.

    >>> [resolved(text) for text in ("1e-4", "010", "0x10", "yes", "~", "1.", ".inf", "12:30")]
    [0.0001, 10, 16, 'yes', None, 1.0, inf, '12:30']
    """
    return next(
        (read(text) for rule, read in options.SCALARS.values() if re.fullmatch(rule, text)), text
    )


def expanded(text: str) -> str:
    """A text with what environment variables hold; raises ValueError for one that is not set.

    >>> expanded("${NO_SUCH_FOLDER:-data}/*.parquet $${x} $5")
    'data/*.parquet ${x} $5'
    """

    def put(place: re.Match[str]) -> str:
        name, default = place["name"], place["default"]
        if place[0] == "$$":
            return "$"
        if name is None:
            rule = "a variable is ${NAME} or ${NAME:-default}, and $${ stands for ${"
            raise ValueError(f"{rule}; got {shown(text)}")
        if (value := os.environ.get(name, default)) is None:
            way = f"set it, or write ${{{name}:-default}}"
            raise ValueError(f"the environment variable {name} is not set: {way}")
        return value or default or ""

    variable = r"\$\$(?=\{)|\$\{(?:(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>[^}]*))?\})?"
    return re.sub(variable, put, text)


_STEP = re.compile(r"""\.?([A-Za-z_][\w-]*)|\[(\d+)\]|\['([^']*)'\]|\["([^"]*)"\]""")


def path_steps(path: str) -> list[str | int]:
    """The names and numbers of a path.

    >>> path_steps("stages[2].columns['a b']")
    ['stages', 2, 'columns', 'a b']
    """
    parts = list(_STEP.finditer(path))
    if not parts or path[0] in ".[" or "".join(part[0] for part in parts) != path:
        example = "options.batch_size or stages[2].buffer_size"
        raise ConfigError(f"{shown(path)} is no path: it is written as {example}")
    return [int(part[2]) if part[2] else part[part.lastindex or 0] for part in parts]


def joined(path: str, name: Any) -> str:
    """The path of what is called ``name`` within ``path``."""
    if not str(name).replace("-", "_").isidentifier():
        return f"{path}[{name!r}]"
    return f"{path}.{name}" if path else str(name)


# What options are made of


def is_name(text: str) -> bool:
    name = r"[^\W\d]\w*(?:\.[^\W\d]\w*)*"
    return re.fullmatch(f"{name}:{name}", text) is not None


def imported(name: Any, allowed: bool) -> Any:
    """A function or class by its name; raises ValueError."""
    if not isinstance(name, str) or not is_name(name):
        raise ValueError(f"a function must be named package.module:function, got {shown(name)}")
    if not allowed:
        way = "if you trust it, tp.load(path, allow_imports=True), or --allow-imports in the shell"
        raise ValueError(f"{name} would be imported, and a config imports nothing by itself: {way}")
    module, _, inner = name.partition(":")
    try:
        if module == "__main__":
            raise ImportError("other programs cannot import what the script itself defines")
        return functools.reduce(getattr, inner.split("."), importlib.import_module(module))
    except Exception as error:  # a module may do anything when it is imported
        said = f"{type(error).__name__}: {error}"
        raise ValueError(f"{name} cannot be imported ({said})") from error


def _dtype(name: Any) -> torch.dtype:
    dtype = vars(torch).get(str(name).removeprefix("torch."))  # getattr would import what is named
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"a dtype must be one of torch such as float32, got {shown(name)}")
    return dtype


#: What the value of an option of such a type is made of.
MADE: dict[Any, Callable[[Any], Any]] = {
    torch.dtype: _dtype,
    pa.Schema: options.arrow_schema,
    Quarantine: Quarantine.of,
}
