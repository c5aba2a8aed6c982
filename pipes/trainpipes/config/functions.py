"""Functions and classes by name: ``package.module:function``, imported only where that is allowed."""

from __future__ import annotations

import functools
import importlib
import re
import sys
from types import BuiltinFunctionType, FunctionType
from typing import Any

__all__ = ["REFUSED", "imported", "is_name", "name_of"]

_NAME = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*:[^\W\d]\w*(?:\.[^\W\d]\w*)*")

#: What is said where nothing may be imported.
REFUSED = (
    "names {name}, and a config imports nothing by itself: if you trust it, "
    "tp.load(path, allow_imports=True), or --allow-imports in the shell"
)


def is_name(text: str) -> bool:
    """Whether a text is ``package.module:function``.

    >>> is_name("mypackage.clean:clean"), is_name("os.system"), is_name("data/*.parquet")
    (True, False, False)
    """
    return _NAME.fullmatch(text) is not None


def imported(name: str) -> Any:
    """What a name stands for.

    Args:
        name: ``package.module:function``.

    Raises:
        ValueError: there is none; says why.
    """
    if not is_name(name):
        raise ValueError(f"a function is named package.module:function, got {name!r}")
    module_name, _, path = name.partition(":")
    if module_name == "__main__":
        raise ValueError(
            f"{name} is defined in the script that runs, and other programs cannot import it from "
            f"there: put it into a module"
        )
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise ValueError(
            f"{module_name} cannot be imported ({type(error).__name__}: {error}); it must be installed, or "
            "its folder be on PYTHONPATH"
        ) from error
    try:
        return functools.reduce(getattr, path.split("."), module)
    except AttributeError as error:
        raise ValueError(f"{name} is not there: {error}") from error


def name_of(value: Any) -> str:
    """The name by which ``imported`` finds a function or a class.

    Raises:
        ValueError: it finds another, or none; says why.

    >>> import json
    >>> name_of(json.dumps)
    'json:dumps'
    """
    module, path = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    own = getattr(value, "__self__", None)
    if isinstance(value, BuiltinFunctionType) and module is None and own is None:
        module = "builtins"
    if module is None and (owner := getattr(value, "__objclass__", None)) is not None:
        module = owner.__module__  # a method of a class that is written in C
    if not isinstance(module, str) or not isinstance(path, str):
        raise ValueError(
            f"an object of {type(value).__module__}.{type(value).__qualname__} has no name"
        )
    if "<lambda>" in path:
        raise ValueError("a lambda has no name")
    if "<locals>" in path:
        raise ValueError(f"{path.replace('<locals>.', '')} is made within a function")
    if module == "__main__":
        raise ValueError(
            f"{path} is defined in the script that runs, and other programs cannot "
            f"import it from there"
        )
    try:
        found = functools.reduce(getattr, path.split("."), sys.modules[module])
    except (AttributeError, KeyError):
        raise ValueError(f"{module}:{path} is not there") from None
    same = found is value or (not isinstance(value, FunctionType | type) and found == value)
    if not same:
        raise ValueError(f"{module}:{path} is another object")
    return f"{module}:{path}"
