"""Which types options of stages and recipes have, and what values stand for."""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Callable
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import pyarrow as pa
import torch

from trainpipes._internal.text import shown


def declared_kinds(make: Any) -> dict[str, list[Any]]:
    """The types of each option, without what these hold: ``[Sequence, NoneType]``."""
    try:
        types = get_type_hints(make)
    except Exception:  # of types that are only there for type checkers
        return {}
    found = {}
    for name, declared in types.items():
        union = get_origin(declared) in (Union, UnionType)
        parts = get_args(declared) if union else (declared,)
        found[name] = [get_origin(one) or one for one in parts]
    return found


def is_name(text: str) -> bool:
    name = r"[^\W\d]\w*(?:\.[^\W\d]\w*)*"
    return re.fullmatch(f"{name}:{name}", text) is not None


def imported(name: Any, allowed: bool) -> Any:
    """A function or class by its name; raises ValueError."""
    if not isinstance(name, str) or not is_name(name):
        raise ValueError(f"a function must be named package.module:function, got {shown(name)}")
    if not allowed:
        raise ValueError(
            f"{name} would be imported, and a config imports nothing by itself: if you trust it, "
            "tp.load(path, allow_imports=True), or --allow-imports in the shell"
        )
    module, _, inner = name.partition(":")
    try:
        if module == "__main__":
            raise ImportError("other programs cannot import what the script itself defines")
        return functools.reduce(getattr, inner.split("."), importlib.import_module(module))
    except Exception as error:  # a module may do anything when it is imported
        said = f"{type(error).__name__}: {error}"
        raise ValueError(f"{name} cannot be imported ({said})") from error


def _dtype(name: Any) -> torch.dtype:
    found = vars(torch).get(str(name).removeprefix("torch."))  # getattr would import what is named
    if not isinstance(found, torch.dtype):
        raise ValueError(f"a dtype must be one of torch such as float32, got {shown(name)}")
    return found


def _arrow_type(text: Any) -> pa.DataType:
    inner = re.fullmatch(r"list<(?:item: )?(.{1,200})>", str(text))
    if inner is not None:
        return pa.list_(_arrow_type(inner[1]))
    try:
        return pa.type_for_alias(str(text))
    except ValueError:
        rule = "an Arrow type must be int64, string, timestamp[us], list<int32> or the like"
        raise ValueError(f"{rule}, got {shown(text)}") from None


def arrow_schema(value: Any) -> pa.Schema:
    """The schema of a mapping of names to types as text; raises ValueError.

    >>> arrow_schema({"x": "list<list<int32>>"})
    x: list<item: list<item: int32>>
      child 0, item: list<item: int32>
          child 0, item: int32
    """
    if not isinstance(value, dict):
        raise ValueError(f"a schema must be a mapping such as {{x: int64}}, got {shown(value)}")
    return pa.schema([(str(name), _arrow_type(kind)) for name, kind in value.items()])


#: What the value of an option of such a type is made of.
MADE: dict[Any, Callable[[Any], Any]] = {torch.dtype: _dtype, pa.Schema: arrow_schema}
