"""What the rows that stages make of data are known by: a digest of the stages, functions included."""

from __future__ import annotations

import hashlib
import inspect
import json
import re
from collections.abc import Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from types import CodeType, FunctionType
from typing import Any

import torch

from trainpipes.runtime.stage import Stage, identify

__all__ = ["digest_of", "stages_key"]

#: How far it is followed what functions and objects hold: they may hold each other.
DEPTH = 4


def digest_of(*parts: Any) -> str:
    """A SHA-256 digest of values of JSON types, in hexadecimal."""
    # The script that was started is a module of another name in processes that it spawns, and objects
    # lie elsewhere in each.
    text = json.dumps(parts).replace("__mp_main__.", "__main__.")
    text = re.sub(r" at 0x[0-9a-fA-F]+", "", text)
    return hashlib.sha256(text.encode()).hexdigest()


def stages_key(stages: Sequence[Stage]) -> list[Any]:
    """What identifies stages and what they do, of JSON types.

    More careful than a state's fingerprint, which goes by names: lambdas share theirs, and a function
    that was edited keeps it. A function is known by its name, its code, its default arguments, what it
    closes over, the functions of its own package that it calls, and constants (in capitals) that it uses;
    not by other globals, which may change from call to call. With ``version=`` it is known by that.
    """
    try:
        release = version("trainpipes")
    except PackageNotFoundError:  # run from its sources
        release = ""
    return [
        release,
        [[identity, _codes(s, identity)] for s in stages for identity in [s.identity()]],
    ]


def _codes(stage: Stage, identity: dict[str, Any]) -> dict[str, Any]:
    """Of each option that is a function and known by its name only, what it does."""
    by_name = {
        k: v for k, v in stage.options.items() if callable(v) and identity.get(k) == identify(v)
    }
    return {name: _code_of(value, DEPTH) for name, value in sorted(by_name.items())}


def _code_of(value: Any, depth: int) -> Any:
    """What a function does, as far as it can be told; None for what is no function."""
    if depth == 0:
        return None
    held = partial(_held, depth=depth - 1)
    if isinstance(value, partial):
        return [_code_of(value.func, depth - 1), held(value.args), held(value.keywords)]
    if inspect.ismethod(value):
        return [_code_of(value.__func__, depth - 1), held(value.__self__)]
    if inspect.isfunction(value):
        cells = [cell.cell_contents for cell in value.__closure__ or () if _filled(cell)]
        return [
            _parts(value.__code__),
            held(value.__defaults__),
            held(value.__kwdefaults__),
            held(cells),
            held(_used(value)),
        ]
    call = getattr(type(value), "__call__", None)  # noqa: B004  (the class's, to see its code)
    if inspect.isfunction(call) and not hasattr(value, "fingerprint"):
        return [_parts(call.__code__), held(getattr(value, "__dict__", None))]
    return None


def _used(function: FunctionType) -> dict[str, Any]:
    """Functions of its own package and constants that a function uses."""
    package = function.__module__.split(".")[0] if function.__module__ else ""
    found = {}
    for name in _names(function.__code__):
        value = function.__globals__.get(name)
        ours = inspect.isfunction(value) and (value.__module__ or "").split(".")[0] == package
        if ours or (name.isupper() and value is not None and not inspect.ismodule(value)):
            found[name] = value
    return found


def _names(code: CodeType) -> set[str]:
    inner = [_names(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*inner)


def _filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018  (raises where the variable has no value yet)
    except ValueError:
        return False
    return True


def _held(value: Any, depth: int) -> Any:
    """A value that a function holds: what identifies it, and what it holds in turn."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().numpy()
    if isinstance(value, dict):
        return {str(name): _held(inner, depth) for name, inner in sorted(value.items(), key=str)}
    if isinstance(value, list | tuple):
        return [_held(inner, depth) for inner in value]
    found = [identify(value)]
    if depth and not (
        inspect.isclass(value) or inspect.ismodule(value) or hasattr(value, "fingerprint")
    ):
        code = _code_of(value, depth)
        if code is not None:
            found.append(code)
        elif hasattr(value, "__dict__"):
            found.append(_held(vars(value), depth - 1))
    return found


def _parts(code: CodeType) -> list[Any]:
    constants = [_parts(c) if isinstance(c, CodeType) else _constant(c) for c in code.co_consts]
    digest = hashlib.sha256(code.co_code).hexdigest()[:16]
    return [digest, constants, list(code.co_names), list(code.co_varnames), list(code.co_freevars)]


def _constant(value: Any) -> str:
    if isinstance(value, frozenset):  # in an order of its own in every process
        return repr(sorted(map(repr, value)))
    return repr(value)
