"""Values in a config, as it is read and written: YAML 1.2's scalars, and the types that options have."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import pyarrow as pa

from trainpipes.errors.text import shown

#: How the names of YAML's own tags begin.
STANDARD = "tag:yaml.org,2002:"

#: YAML 1.2's core schema: `yes` and `12:30` are text, `1e-4` is a float, `010` is ten.
SCALARS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "null": (r"~|null|Null|NULL|", lambda _: None),
    "bool": (r"true|True|TRUE|false|False|FALSE", lambda text: text.lower() == "true"),
    "int": (
        r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+",
        lambda text: int(text, 0 if text[:2] in ("0o", "0x") else 10),
    ),
    "float": (
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?"
        r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        lambda text: float(text.lower().replace(".inf", "inf").replace(".nan", "nan")),
    ),
}


def with_scalars(kind: Any, **members: Any) -> Any:
    """PyYAML's loader or dumper, which takes for numbers, bools and null what ``SCALARS`` says, too."""
    made: Any = type(kind.__name__, (kind,), members)
    for name, (rule, _) in SCALARS.items():
        made.add_implicit_resolver(f"{STANDARD}{name}", re.compile(rf"(?:{rule})\Z"), None)
    return made


def declared_kinds(make: Any) -> dict[str, list[Any]]:
    """The types of each option, without what these hold: ``[Sequence, NoneType]``."""
    try:
        types = get_type_hints(make)
    except Exception:  # of types that are only there for type checkers
        return {}
    kinds = {}
    for name, declared in types.items():
        union = get_origin(declared) in (Union, UnionType)
        parts = get_args(declared) if union else (declared,)
        kinds[name] = [get_origin(part) or part for part in parts]
    return kinds


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
