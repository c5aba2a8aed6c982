"""What our tags stand for: values that YAML has no form for."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import torch

from trainpipes import samplers
from trainpipes._internal.naming import nearest
from trainpipes._internal.shown import shown
from trainpipes.config.arrow_types import parse_type
from trainpipes.config.expressions import parse_expression
from trainpipes.config.nodes import Items, Keyed, Node, Text, kind_of
from trainpipes.config.origin import joined
from trainpipes.errors import TrainpipesError

if TYPE_CHECKING:
    from trainpipes.config.read_values import Reader, Wanted

__all__ = ["READERS"]


def _kind(node: Node) -> str:
    return kind_of(dataclasses.replace(node, tag=None))


def _text(reader: Reader, node: Node, wanted: Wanted, example: str) -> str:
    if not isinstance(node, Text):
        raise reader.origin.error(
            node,
            wanted.path,
            f"{example.split()[0]} stands before a text, such as {example}; got {_kind(node)}",
        )
    return reader.text(node, wanted.path)


def _keyed(reader: Reader, node: Node, wanted: Wanted, example: str) -> Keyed:
    if not isinstance(node, Keyed):
        raise reader.origin.error(
            node,
            wanted.path,
            f"{example.split()[0]} stands before a mapping, such as {example}; got {_kind(node)}",
        )
    return node


def _items(reader: Reader, node: Node, wanted: Wanted, tag: str) -> list[Any]:
    if not isinstance(node, Items):
        raise reader.origin.error(
            node,
            wanted.path,
            f"{tag} stands before a list, such as {tag} [1, 2]; got {_kind(node)}",
        )
    return [
        reader.read(one, wanted.within(f"{wanted.path}[{n}]", f"[{n}]", Any))
        for n, one in enumerate(node.items)
    ]


def _parts(
    reader: Reader, node: Node, wanted: Wanted, example: str, names: dict[str, bool]
) -> dict[str, Node]:
    """The values of a mapping's keys, all of which are known."""
    found: dict[str, Node] = {}
    tag = example.split()[0]
    for key, value in _keyed(reader, node, wanted, example):
        if key.text not in names:
            raise reader.origin.error(
                key,
                joined(wanted.path, key.text),
                f"{tag} has no {shown(key.text)}{nearest(key.text, list(names))}; it is {example}",
            )
        found[key.text] = value
    missing = [name for name, needed in names.items() if needed and name not in found]
    if missing:
        raise reader.origin.error(node, wanted.path, f"{tag} needs {missing[0]}; it is {example}")
    return found


def _function(reader: Reader, node: Node, wanted: Wanted) -> Any:
    name = _text(reader, node, wanted, "!function package.module:name")
    return reader.function(node, wanted.path, name, wanted.asker)


def _partial(reader: Reader, node: Node, wanted: Wanted) -> Any:
    example = "!partial {function: package.module:name, arguments: [1], keywords: {x: 2}}"
    names = {"function": True, "arguments": False, "keywords": False}
    parts = _parts(reader, node, wanted, example, names)
    within = wanted.within(joined(wanted.path, "function"), "", Any)
    function = _function(reader, parts["function"], within)
    arguments: list[Any] = []
    if "arguments" in parts:
        within = wanted.within(joined(wanted.path, "arguments"), "", Any)
        arguments = _items(reader, parts["arguments"], within, "arguments")
    keywords: dict[str, Any] = {}
    if "keywords" in parts:
        within = wanted.within(joined(wanted.path, "keywords"), "", Any)
        given = _keyed(reader, parts["keywords"], within, "keywords {x: 2}")
        keywords = {str(name): value for name, value in reader.mapping(given, within).items()}
    if not callable(function):
        raise reader.origin.error(
            node, wanted.path, f"{wanted.asker} is a function, got {shown(function)}"
        )
    return functools.partial(function, *arguments, **keywords)


def _object(reader: Reader, node: Node, wanted: Wanted) -> Any:
    example = "!object {package.module:Class: {x: 1}}"
    given = _keyed(reader, node, wanted, example)
    if len(given.pairs) != 1:
        raise reader.origin.error(node, wanted.path, f"!object names one class: {example}")
    key, options = given.pairs[0]
    kind = reader.function(key, wanted.path, key.text, wanted.asker)
    if not inspect.isclass(kind):
        raise reader.origin.error(
            key, wanted.path, f"!object names a class, and {key.text} is none"
        )
    within = wanted.within(wanted.path, "", Any)
    keywords: dict[str, Any] = {}
    if not (isinstance(options, Text) and options.text == "" and options.plain):
        fields = _keyed(reader, options, within, example)
        keywords = {str(name): value for name, value in reader.mapping(fields, within).items()}
    try:
        return kind(**keywords)
    except Exception as error:
        raise reader.origin.error(
            node,
            wanted.path,
            f"{wanted.asker}: {key.text} cannot be made ({type(error).__name__}: {error})",
        ) from error


def _dtype(reader: Reader, node: Node, wanted: Wanted) -> Any:
    text = _text(reader, node, wanted, "!dtype float32")
    found = vars(torch).get(text.removeprefix("torch."))  # getattr would import what is named
    if not isinstance(found, torch.dtype):
        known = [name for name, value in vars(torch).items() if isinstance(value, torch.dtype)]
        raise reader.origin.error(
            node,
            wanted.path,
            f"{wanted.asker} is a dtype of torch such as float32, got {shown(text)}{nearest(text, known)}",
        )
    return found


def _type(reader: Reader, node: Node, wanted: Wanted) -> pa.DataType:
    text = _text(reader, node, wanted, "!type list<int32>")
    try:
        return parse_type(text)
    except ValueError as error:
        raise reader.origin.error(node, wanted.path, f"{wanted.asker}: {error}") from None


def _schema(reader: Reader, node: Node, wanted: Wanted) -> pa.Schema:
    fields = []
    for key, value in _keyed(reader, node, wanted, "!schema {x: int64, y: list<int32>}"):
        within = wanted.within(joined(wanted.path, key.text), f"[{key.text!r}]", Any)
        text = _text(reader, value, within, "!type list<int32>")
        needed = text.endswith(" not null")
        plain = Text(value.line, text=text.removesuffix(" not null"), literal=True)
        fields.append(pa.field(key.text, _type(reader, plain, within), nullable=not needed))
    return pa.schema(fields)


def _expression(reader: Reader, node: Node, wanted: Wanted) -> Any:
    text = _text(reader, node, wanted, "!expression x > 20")
    try:
        return parse_expression(text)
    except ValueError as error:
        raise reader.origin.error(node, wanted.path, f"{wanted.asker}: {error}") from None


def _sampler(reader: Reader, node: Node, wanted: Wanted) -> Any:
    example = "!sampler {RandomSampler: {seed: 0}}"
    name, options = "", None
    if isinstance(node, Text):
        name = reader.text(node, wanted.path)
    else:
        given = _keyed(reader, node, wanted, example)
        if len(given.pairs) != 1:
            raise reader.origin.error(node, wanted.path, f"!sampler names one sampler: {example}")
        name, options = given.pairs[0][0].text, given.pairs[0][1]
    known = [one for one in samplers.__all__ if one not in ("RowSampler", "BatchSampler")]
    if name not in known:
        raise reader.origin.error(
            node,
            wanted.path,
            f"there is no sampler {shown(name)}{nearest(name, known)}; there are {', '.join(known)}",
        )
    within = wanted.within(wanted.path, "", Any)
    keywords = {}
    if options is not None:
        keywords = reader.mapping(_keyed(reader, options, within, example), within)
    kind = getattr(samplers, name)
    takes = list(inspect.signature(kind).parameters)
    for key in keywords:
        if key not in takes:
            raise reader.origin.error(
                options,
                wanted.path,
                f"{name} has no option {shown(key)}{nearest(str(key), takes)}; it takes {', '.join(takes)}",
            )
    try:
        return kind(**keywords)
    except (TrainpipesError, TypeError, ValueError) as error:
        raise reader.origin.error(node, wanted.path, error) from error


def _pipeline(reader: Reader, node: Node, wanted: Wanted) -> Any:
    given = _keyed(reader, node, wanted, "!pipeline {stages: [...]}")
    return reader.build(reader, given, wanted.path)


def _set(reader: Reader, node: Node, wanted: Wanted) -> Any:
    items = _items(reader, node, wanted, "!set")
    for number, one in enumerate(items):
        try:
            hash(one)
        except TypeError:
            raise reader.origin.error(
                node,
                f"{wanted.path}[{number}]",
                f"{wanted.asker}: a !set holds texts, numbers and tuples; got {shown(one)}",
            ) from None
    return set(items)


def _array(reader: Reader, node: Node, wanted: Wanted) -> Any:
    example = "!array {dtype: int64, values: [1, 2]}"
    parts = _parts(reader, node, wanted, example, {"dtype": True, "values": True})
    at = wanted.within(joined(wanted.path, "dtype"), "", str)
    dtype = reader.read(parts["dtype"], at)
    values = reader.read(parts["values"], wanted.within(joined(wanted.path, "values"), "", Any))
    if dtype not in _NUMBERS:
        raise reader.origin.error(
            parts["dtype"],
            at.path,
            f"{wanted.asker}: an array is of {', '.join(_NUMBERS)}; got {shown(dtype)}",
        )
    try:
        return np.array(values, dtype=dtype)
    except (TypeError, ValueError, OverflowError) as error:
        raise reader.origin.error(node, wanted.path, f"{wanted.asker}: {error}") from None


def _tensor(reader: Reader, node: Node, wanted: Wanted) -> Any:
    example = "!tensor {dtype: int64, values: [1, 2]}"
    parts = _parts(reader, node, wanted, example, {"dtype": True, "values": True})
    at = wanted.within(joined(wanted.path, "dtype"), "", Any)
    dtype = _dtype(reader, parts["dtype"], at)
    values = reader.read(parts["values"], wanted.within(joined(wanted.path, "values"), "", Any))
    try:
        return torch.tensor(values, dtype=dtype)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise reader.origin.error(node, wanted.path, f"{wanted.asker}: {error}") from None


#: Types of arrays.
_NUMBERS = [
    "bool", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
    *(f"float{bits}" for bits in (16, 32, 64)),
]  # fmt: skip

READERS: dict[str, Callable[[Reader, Node, Wanted], Any]] = {
    "!array": _array,
    "!dtype": _dtype,
    "!expression": _expression,
    "!function": _function,
    "!object": _object,
    "!partial": _partial,
    "!path": lambda reader, node, wanted: Path(_text(reader, node, wanted, "!path data")),
    "!pipeline": _pipeline,
    "!sampler": _sampler,
    "!schema": _schema,
    "!set": _set,
    "!tensor": _tensor,
    "!tuple": lambda reader, node, wanted: tuple(_items(reader, node, wanted, "!tuple")),
    "!type": _type,
}
