"""The types that options are declared with: of which a value is, and how they are called."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import numpy as np
import pyarrow as pa
import torch

from trainpipes.kinds.options import either

__all__ = ["fits", "members", "parameters_of", "said", "types_of"]


@functools.cache
def types_of(kind: Any) -> dict[str, Any]:
    """The declared types of a dataclass's fields, or of a function's parameters; ``Any`` where a type is only
    there for type checkers."""
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        found = {}
        for field in dataclasses.fields(kind):
            owner = next(
                base for base in kind.__mro__ if field.name in vars(base).get("__annotations__", {})
            )
            found[field.name] = _evaluated(field.type, owner)
        return found
    inner = inspect.unwrap(kind)
    parameters = inspect.signature(kind).parameters.values()
    return {p.name: _evaluated(p.annotation, inner) for p in parameters}


def parameters_of(kind: Any) -> dict[str, bool]:
    """Names of what a class or function takes by name, in order, and whether each is needed."""
    found = {}
    for one in inspect.signature(kind).parameters.values():
        if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY):
            found[one.name] = one.default is one.empty
    return found


def _evaluated(declared: Any, owner: Any) -> Any:
    if declared is inspect.Parameter.empty:
        return Any
    if not isinstance(declared, str):
        return declared
    try:
        return eval(declared, vars(sys.modules[owner.__module__]))
    except Exception:  # a type that is not there when it runs
        return Any


def members(declared: Any) -> tuple[Any, ...]:
    """The types of a union; a type alone by itself."""
    if get_origin(declared) in (Union, UnionType):
        return tuple(inner for part in get_args(declared) for inner in members(part))
    return (declared,)


def fits(value: Any, declared: Any) -> bool:
    """Whether a value is of a declared type, as far as one can tell without calling it.

    >>> fits(3, float), fits(True, int), fits(["a"], Sequence[str]), fits(None, int | None)
    (True, False, True, True)
    """
    return any(_fits(value, member) for member in members(declared))


def _fits(value: Any, declared: Any) -> bool:
    if declared is Any or declared is object:
        return True
    if declared is None or declared is NoneType:
        return value is None
    origin, parts = get_origin(declared), get_args(declared)
    if origin is Literal:
        return any(type(value) is type(one) and value == one for one in parts)
    kind = origin or declared
    if not isinstance(kind, type):  # a type variable, a new type
        return True
    if kind is bool:
        return isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind is os.PathLike:
        return isinstance(value, str | os.PathLike)
    if isinstance(value, str):  # text where several names may stand is one of them
        inner = parts[0] if parts else Any
        one = kind in (Sequence, Iterable) and fits(value, inner)
        return kind is str or one
    if isinstance(value, np.ndarray | torch.Tensor) and kind in (Sequence, Iterable):
        return True
    if kind is tuple:
        if not isinstance(value, tuple | list):
            return False
        each = parts[:1] * len(value) if parts[1:] == (...,) else parts
        return not parts or (len(each) == len(value) and all(map(fits, value, each)))
    if issubclass(kind, Mapping):
        return isinstance(value, Mapping) and (
            not parts or all(fits(k, parts[0]) and fits(v, parts[1]) for k, v in value.items())
        )
    if kind in (Sequence, Iterable, list):
        good = isinstance(value, list | tuple)
        return good and (not parts or all(fits(one, parts[0]) for one in value))
    if declared is Callable or origin is Callable or kind.__name__ == "Callable":
        return callable(value)
    try:
        return isinstance(value, kind)
    except TypeError:  # a protocol that can't be asked
        return True


#: What types are called.
_WORDS: dict[Any, str] = {
    int: "an integer", float: "a number", str: "text", bool: "true or false", bytes: "bytes (!!binary)",
    os.PathLike: "a path", pa.Schema: "an Arrow schema (!schema {x: int64})",
    pa.DataType: "an Arrow type (!type int64)", torch.dtype: "a dtype (!dtype float32)",
    NoneType: "null",
}  # fmt: skip


def said(declared: Any) -> str:
    """A declared type in words.

    >>> said(int | None), said(Literal["rows", "bytes"]), said(Sequence[str] | None)
    ('an integer or null', '"rows" or "bytes"', 'a list of text or null')
    """
    words = [_said(one) for one in members(declared)]
    words = [word for word in dict.fromkeys(words) if word != "null"] + ["null"] * ("null" in words)
    return " or ".join(words)


def _said(declared: Any) -> str:
    origin, parts = get_origin(declared), get_args(declared)
    if declared is None:
        return "null"
    if origin is Literal:
        return either(parts) if len(parts) > 1 else f'"{parts[0]}"'
    kind = origin or declared
    if kind in _WORDS:
        return _WORDS[kind]
    name = getattr(kind, "__name__", str(kind))
    if name == "Callable":
        return "a function (!function package.module:name)"
    if name == "Expression":
        return "an expression (!expression x > 20)"
    if isinstance(kind, type) and issubclass(kind, Mapping):
        inner = f" of {said(parts[1])}" if parts and parts[1] is not Any else ""
        return f"a mapping{inner}"
    if kind in (Sequence, Iterable, list, tuple):
        inner = f" of {said(parts[0])}" if parts and parts[0] is not Any else ""
        return f"a list{inner}"
    return f"a {name}"
