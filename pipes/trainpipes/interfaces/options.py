from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import numpy as np
import pyarrow as pa
import torch

from trainpipes._internal.checks import require
from trainpipes.columns.content import table_digest, tensor_digest
from trainpipes.columns.row_types import written
from trainpipes.errors import ConfigError, TrainpipesError
from trainpipes.errors.text import (
    cut,
    hidden,
    is_secret,
    known_name,
    shown,
    stand_in,
    without_url_secrets,
)

#: Raises ConfigError unless a value is good for the option of a name.
Check = Callable[[Any, str], Any]


@functools.cache
def declared_checks(kind: Any) -> dict[str, Check]:
    """The checks of options declared as ``bool``, ``Literal`` or ``Annotated[..., check]``."""
    checks: dict[str, Check] = {}
    for field in dataclasses.fields(kind):
        owners = (c for c in kind.__mro__ if field.name in vars(c).get("__annotations__", {}))
        owner = next(owners)
        declared: Any = field.type
        if isinstance(declared, str):
            try:
                declared = eval(declared, vars(sys.modules[owner.__module__]))
            except Exception:  # of types that are not there when it runs, or are none
                continue
        union = get_origin(declared) in (Union, UnionType)
        parts = get_args(declared) if union else (declared,)
        rules = [rule for p in parts if get_origin(p) is Annotated for rule in p.__metadata__]
        if declared is bool:
            checks[field.name] = functools.partial(_one_of, (True, False))
        elif all(part is NoneType or get_origin(part) is Literal for part in parts):
            values = [value for part in parts for value in get_args(part) or (None,)]
            checks[field.name] = functools.partial(_one_of, values)
        elif rules:
            checks[field.name] = functools.partial(_good, rules, NoneType in parts)
    return checks


def _one_of(allowed: Sequence[Any], value: Any, option: str) -> None:
    good = any(type(value) is type(choice) and value == choice for choice in allowed)
    require(good, option, either(allowed), value)


def _good(checks: Sequence[Check], or_none: bool, value: Any, option: str) -> None:
    for check in () if or_none and value is None else checks:
        check(value, option)


@contextmanager
def in_our_words(name: str, options: Mapping[str, Any]) -> Iterator[None]:
    """Where options are looked at: what Python or a library says of an odd one becomes our error."""
    try:
        yield
    except (ArithmeticError, AttributeError, TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, TrainpipesError):
            raise
        given = ", ".join(f"{option}={shown(value)}" for option, value in options.items())
        raise ConfigError(
            f"{name}() must have options that it can use, got {given}: {cut(str(error))}; its docstring "
            "says what they are"
        ) from error


def either(values: Sequence[Any]) -> str:
    """``"a", "b" or "c"``; None goes without saying where there are several."""
    said = [
        f'"{value}"' if isinstance(value, str) else str(value)
        for value in values
        if value is not None
    ]
    if len(said) == 1:
        return f"{said[0]} or None"
    return f"{', '.join(said[:-1])} or {said[-1]}"


def same(a: Any, b: Any) -> bool:
    """Equality of options, also of arrays, tensors and stages."""
    if a is b:
        return True
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, functools.partial) and isinstance(b, functools.partial):
        return same((a.func, a.args, a.keywords), (b.func, b.args, b.keywords))
    if isinstance(a, float) and isinstance(b, float) and a != a:
        return b != b
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return type(a) is type(b) and np.array_equal(a, b)
    equals = getattr(a, "equals", None)
    return bool(equals(b) if callable(equals) and type(a) is type(b) else a == b)


def show(value: Any) -> str:
    """An option's short form for ``repr``: functions by name, file and line."""
    if isinstance(value, functools.partial):
        return _show_partial(value)
    code = getattr(value, "__code__", None)
    if code is not None:
        name = getattr(value, "__qualname__", "?").replace("<locals>.", "")
        return f"{name} ({code.co_filename.rsplit('/', 1)[-1]}:{code.co_firstlineno})"
    if getattr(type(value), "__repr__", None) is object.__repr__:
        return f"{type(value).__qualname__}()".replace("<locals>.", "")
    try:
        text = hidden(written(value) if isinstance(value, pa.Schema) else repr(value))
    except Exception:  # of an object within it, or of a number of many digits
        text = shown(value)
    return text if len(text) <= 80 else f"{text[:60]}… ({type(value).__name__})"


def _show_partial(value: functools.partial[Any]) -> str:
    names = argument_names(value)
    given = [show_named(name, argument) for name, argument in zip(names, value.args, strict=False)]
    given += [f"{name}={show_named(name, argument)}" for name, argument in value.keywords.items()]
    return f"partial({', '.join([show(value.func), *given])})"


def argument_names(value: Any) -> list[str]:
    """Names of a partial's positional arguments; "" if unknown."""
    try:
        names = [
            name
            for name, parameter in inspect.signature(value.func).parameters.items()
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        ]
    except (TypeError, ValueError):  # of some functions in C
        names = []
    return [*names, *[""] * len(value.args)][: len(value.args)]


def show_named(name: str, value: Any) -> str:
    """``show``, but nothing of an option that may be a credential."""
    return "'…'" if is_secret(name) and isinstance(value, str | bytes) else show(value)


def identify_named(name: str, value: Any) -> Any:
    """``identify``, but a digest of an option that may be a credential."""
    identity = identify(value)
    return stand_in(identity) if isinstance(identity, str) and is_secret(name) else identity


def identify(value: Any) -> Any:
    """An option in a fingerprint: plain values as they are, functions by module and qualified name,
    arrays and bytes by content, other objects by ``fingerprint()``, else by type.
    """
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return _identify_text(value)
    if isinstance(value, Mapping):
        return {str(k): identify(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [identify(v) for v in value]
    if isinstance(value, set | frozenset):
        return sorted((identify(v) for v in value), key=repr)
    if isinstance(value, bytes):
        return f"sha256:{hashlib.sha256(value).hexdigest()[:16]}"
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        content = np.ascontiguousarray(value).tobytes()
        if value.dtype.hasobject:  # else by where its objects lie in memory
            content = repr([identify(part) for part in value.reshape(-1).tolist()]).encode()
        digest = hashlib.sha256(content).hexdigest()[:16]
        return f"{value.dtype}{list(value.shape)}:{digest}"
    if isinstance(value, torch.Tensor) and value.numel() > 1000:  # its text leaves some out
        return f"{value.dtype}{list(value.shape)}:{tensor_digest(value)[:16]}"
    if isinstance(value, pa.Table):
        return f"table[{len(value)}]:{table_digest(value)[:16]}"
    if hasattr(value, "fingerprint"):
        return json.loads(json.dumps(value.fingerprint()))
    qualified = getattr(value, "__qualname__", None)
    if qualified is not None:
        return f"{getattr(value, '__module__', '?')}.{qualified}"
    inner = getattr(value, "func", None)  # functools.partial
    if inner is not None:
        given = zip(argument_names(value), value.args, strict=False)
        named = {str(k): identify_named(str(k), part) for k, part in value.keywords.items()}
        arguments = [[identify_named(name, part) for name, part in given], named]
        return {"function": identify(inner), "arguments": arguments}
    return _identify_text(
        f"{type(value).__module__}.{type(value).__qualname__}: {stable_text(value)}"
    )


def _identify_text(text: str) -> str:
    """A text, or its digest where a URL in it may hold a secret."""
    if "://" not in text or without_url_secrets(text) == text:
        return text
    if "://…@" in (shown := without_url_secrets(text)) or any(map(str.isspace, text)):
        return stand_in(text)
    name = known_name(text)
    return name if name == shown.partition("?")[0] else stand_in(name)


def stable_text(value: Any) -> str:
    """``str`` of a value whose class defines one (a dtype, an expression), else nothing."""
    named = any({"__repr__", "__str__"} & vars(c).keys() for c in type(value).__mro__[:-1])
    with suppress(Exception):  # of one that fails, the type alone
        return str(value) if named else ""
    return ""
