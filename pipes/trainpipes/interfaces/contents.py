"""Digests of functions and objects: the same in every process, and different after an edit.

A function is its code, defaults, closure and globals; an object its class and pickled state; an installed
package its names and version.
"""

from __future__ import annotations

import copyreg
import dis
import hashlib
import importlib.util
import json
import mmap
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from types import CodeType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from trainpipes.columns.content import table_digest, tensor_digest
from trainpipes.errors import ConfigError
from trainpipes.filesystems.systems import listed_as
from trainpipes.interfaces.options import ADDRESS, identify, show
from trainpipes.interfaces.stage import Stage, is_ours
from trainpipes.version import __version__

#: Operations that read a global name, and that set it.
READS = ("LOAD_GLOBAL", "LOAD_NAME")
SETS = ("STORE_GLOBAL", "DELETE_GLOBAL")
#: Folders of packages that were installed.
INSTALLED = {"site-packages", "dist-packages"}
#: Types whose values are their text.
PLAIN = {bool, int, float, complex, str, bytes, type(None), type(...), type(NotImplemented)}
#: Modules of types that hold no values of their own: locks, and weak references.
HOLD_NOTHING = {"_thread", "threading", "weakref", "_weakrefset"}
#: Wrappers that keep the wrapped function in an attribute.
WRAPPED = ("__wrapped__", "__func__", "func", "fget", "fset", "fdel")


@cache
def is_installed(module: str) -> bool:
    """Whether a module comes with Python or an installed package."""
    top = module.partition(".")[0]
    if top == "trainpipes" or top in sys.stdlib_module_names:
        return True
    file = getattr(sys.modules.get(module) or sys.modules.get(top), "__file__", None)
    if file is None and top not in ("", "__main__", "__mp_main__"):
        with suppress(ImportError, ValueError):
            spec = importlib.util.find_spec(top)
            file = None if spec is None else spec.origin
    return file is not None and bool(INSTALLED & {*Path(file).parts})


@cache
def _distributed(top: str, by_name: bool) -> str:
    """The version of the distribution of an installed package, looked for by the package's name or in all."""
    if by_name:
        with suppress(metadata.PackageNotFoundError):
            return metadata.version(top)
        return ""
    names = sorted({*metadata.packages_distributions().get(top, ())})  # which may take a second
    return " ".join(f"{name} {metadata.version(name)}" for name in names)


def _release(module: str, imported: bool = True) -> str:
    """The version of a module's package; by its distribution alone where it may be ``imported`` or not."""
    top = module.partition(".")[0]
    version = str(getattr(sys.modules.get(top), "__version__", "")) if imported else ""
    if not _is_package(module):
        return version
    return _distributed(top, True) or version or _distributed(top, False)


def _is_package(module: str) -> bool:
    """Whether a module is of an installed package."""
    top = module.partition(".")[0]
    return is_installed(module) and top != "trainpipes" and top not in sys.stdlib_module_names


def used_by(function: FunctionType) -> dict[str, Any]:
    """The values of the global names that a function reads, but for those that it sets itself, and the
    versions of packages that it imports.
    """
    space = function.__globals__
    steps = [step for code in _codes(function.__code__) for step in dis.get_instructions(code)]
    parts: dict[str, Any] = {}
    for level, _, step in zip(steps, steps[1:], steps[2:], strict=False):
        if step.opname == "IMPORT_NAME":
            if level.argval or not is_installed(step.argval):
                raise _UnknownError(f"the module {step.argval!r}, imported when it is called")
            if release := _release(step.argval, imported=False):
                parts[f"import {step.argval}"] = release
    sets = {step.argval for step in steps if step.opname in SETS}
    reads = {step.argval for step in steps if step.opname in READS} - sets
    attributes = {name for code in _codes(function.__code__) for name in code.co_names}
    for name in sorted(reads & space.keys()):
        parts.update(_parts(name, space[name], attributes, set()))
    return parts


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _parts(
    path: str, value: Any, attributes: set[str], seen: set[int]
) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, ModuleType) or _is_package(value.__name__):
        yield path, value
    elif id(value) not in seen and not is_installed(value.__name__):
        seen.add(id(value))
        for name in sorted(attributes & vars(value).keys()):
            yield from _parts(f"{path}.{name}", vars(value)[name], attributes, seen)


class _UnknownError(Exception):
    """A value that has no digest, as nothing distinguishes it from others."""


class Contents:
    """Makes digests of values that hold each other; an error names the place in them."""

    def __init__(self, caller: str, strict: bool) -> None:
        self._asker = caller
        self._strict = strict
        self._done: dict[int, tuple[Any, str]] = {}  # the values too, so that no other has their id
        self._open: dict[int, int] = {}
        self._where: list[str] = []

    def digest(self, value: Any, name: str) -> str:
        self._where = [name]
        try:
            with warnings.catch_warnings():  # of objects that soon can no more be pickled
                warnings.simplefilter(
                    "ignore", DeprecationWarning
                )  # not what other threads warn of
                return self.of(value)
        except Exception as error:  # looking at an object may call code of its class
            if not self._strict:
                return _hash(_kind(value))
            unseen = (
                str(error) if isinstance(error, _UnknownError) else f"what raises {error!r:.200}"
            )
            raise ConfigError(
                f"{self._asker}: rows are kept until a function changes, and whether {show(value)} changes "
                f"cannot be seen: it uses {unseen} ({', '.join(self._where)}). Give its version, by "
                'version="..." of its stage'
            ) from error

    def of(self, value: Any) -> str:
        if type(value) in PLAIN:
            return _hash(f"{type(value).__name__} {value!r}")
        key = id(value)
        if key in self._done:
            return self._done[key][1]
        if key in self._open:  # it holds itself
            return f"up {len(self._open) - self._open[key]}"
        self._open[key] = len(self._open)
        try:
            digest = _hash(json.dumps(self._said_of(value)))
        finally:
            del self._open[key]
        self._done[key] = value, digest
        return digest

    def _each(self, values: Mapping[str, Any]) -> list[Any]:
        pairs = []
        for name, value in values.items():
            self._where.append(name)
            pairs.append([name, self.of(value)])
            self._where.pop()
        return pairs

    # Kinds of values

    def _said_of(self, value: Any) -> list[Any]:
        kind = type(value)
        if kind in (list, tuple):
            if PLAIN.issuperset(map(type, value)):
                return [kind.__name__, repr(value)]
            return [kind.__name__, [self.of(inner) for inner in value]]
        if kind in (set, frozenset):
            return [kind.__name__, sorted(self.of(inner) for inner in value)]
        if kind in (dict, MappingProxyType):
            return ["dict", self._said_of([*value, *value.values()])]
        if isinstance(value, CodeType):
            return self._code(value)
        if isinstance(value, FunctionType):
            return self._function(value)
        if isinstance(value, ModuleType):
            return ["module", value.__name__, _release(value.__name__)]
        if isinstance(value, type):
            return self._class(value)
        if isinstance(value, MethodType):
            return ["method", self.of(value.__func__), self.of(value.__self__)]
        if isinstance(value, np.memmap) and value.filename and isinstance(value.base, mmap.mmap):
            said = os.stat(value.filename)  # the file may be larger than memory
            form = str(value.dtype.descr), value.shape, value.offset
            return ["map", str(value.filename), said.st_size, said.st_mtime_ns, *form]
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            content = hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()
            return ["array", str(value.dtype.descr), value.shape, content]
        if isinstance(value, pa.Table):
            return ["table", table_digest(value)]
        if kind in (torch.Tensor, torch.nn.Parameter):
            with suppress(RuntimeError, TypeError):  # sparse: as it is pickled
                return ["tensor", tensor_digest(value)]
        if kind.__module__ in HOLD_NOTHING:
            return ["holds nothing", _name(kind)]
        if kind.__module__ == "builtins" and hasattr(value, "__objclass__"):  # str.upper, a slot
            return ["slot", _name(value.__objclass__), value.__name__]
        if callable(getattr(kind, "fingerprint", None)):
            return ["fingerprint", json.dumps(identify(value))]
        wrapped = {name: getattr(value, name, None) for name in WRAPPED}
        wrapped = {name: inner for name, inner in wrapped.items() if callable(inner)}
        if wrapped and is_installed(kind.__module__) and kind is not partial:
            return ["wrapper", self.of(kind), self._each(wrapped)]
        return ["object", self.of(kind), self._state(value)]

    def _code(self, code: CodeType) -> list[Any]:
        content = code.co_code + getattr(code, "co_exceptiontable", b"")
        counts = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags
        names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
        return [hashlib.sha256(content).hexdigest(), counts, names, self.of(code.co_consts)]

    def _function(self, function: FunctionType) -> list[Any]:
        held: dict[str, Any] = {}
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        for name, cell in cells:
            with suppress(ValueError):  # a variable without a value yet
                held[name] = cell.cell_contents
        parts = [_name(function), self._each(held), self._each(vars(function))]
        if is_installed(function.__globals__.get("__name__") or ""):
            return ["function", *parts]
        code = function.__code__, function.__defaults__, function.__kwdefaults__
        return ["function", *parts, *map(self.of, code), self._each(used_by(function))]

    def _class(self, kind: type) -> list[Any]:
        if is_installed(kind.__module__ or ""):
            return ["class", _name(kind)]
        methods = (FunctionType, staticmethod, classmethod, property)
        members = {
            name: value
            for name, value in vars(kind).items()
            if isinstance(value, methods) or not (name.startswith("__") or name == "_abc_impl")
        }
        return ["class", _name(kind), [self.of(b) for b in kind.__bases__], self._each(members)]

    def _state(self, value: Any) -> Any:
        reduce = copyreg.dispatch_table.get(type(value))
        try:
            reduced = value.__reduce_ex__(4) if reduce is None else reduce(value)
        except Exception as error:
            raise _UnknownError(_kind(value)) from error
        if isinstance(reduced, str):
            return ["global", _name(value), reduced]
        make, args, state, items, pairs, setter = [*reduced, None, None, None, None][:6]
        named = type(state) is dict and all(type(name) is str for name in state)
        self._where.append(f"state of {_kind(value)}")
        rest = [make, args, list(items or ()), list(pairs or ()), setter]
        said = [self._each(state) if named else self.of(state), *map(self.of, rest)]
        self._where.pop()
        return said


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _name(value: Any) -> str:
    """Module and qualified name, and the version of an installed package. A spawned process has the started
    script under another name.
    """
    module = getattr(value, "__module__", None) or ""
    module = "__main__" if module == "__mp_main__" else module
    return f"{module}.{getattr(value, '__qualname__', '')} {_release(module)}"


def _kind(value: Any) -> str:
    return f"a {type(value).__module__}.{type(value).__qualname__}"


def digest_of(*parts: Any) -> str:
    # The script that was started is a module of another name in processes that it spawns, and objects
    # lie elsewhere in each.
    text = json.dumps(parts).replace("__mp_main__.", "__main__.")
    return hashlib.sha256(ADDRESS.sub("", text).encode()).hexdigest()


def cache_key(stages: Sequence[Stage], caller: str, *, strict: bool = True) -> list[Any]:
    contents = Contents(caller, strict)
    return [__version__, [[stage.identity(), _done_by(stage, contents)] for stage in stages]]


def _done_by(stage: Stage, contents: Contents) -> dict[str, str]:
    identity = stage.identity()
    digests = {
        name: contents.digest(value, f"{stage.name}({name})")
        for name, value in sorted(stage.options.items())
        if name in identity and identity[name] in (identify(value), str(value))
    }
    # States are free of it, as a folder may move; of what is kept, another one holds other files.
    if "folder" in stage.free and (folder := stage.options["folder"]) is not None:
        digests["folder"] = listed_as(os.fspath(folder))
    if not is_ours(type(stage)):
        digests["class"] = contents.digest(type(stage), stage.name)
    return digests
