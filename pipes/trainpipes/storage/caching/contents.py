"""What functions and objects do and hold, as a digest: the same in every process, another one after an edit.

A function is its code, its defaults, what it closes over, and what its global names stand for: values,
functions, classes, objects, and what it uses of modules of the user's own. An object is its class and its
state, as it would be pickled. Of installed packages and of what is made in C, names count. Called by the
thread that plans; a ``Contents`` keeps the digests of one chain.
"""

from __future__ import annotations

import copyreg
import functools
import hashlib
import json
import types
import warnings
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from trainpipes.columns.content import table_digest, tensor_digest
from trainpipes.errors import ConfigError
from trainpipes.kinds.options import identify, show
from trainpipes.storage.caching.used_names import is_installed, used_by

#: Types whose values are their text.
PLAIN = {bool, int, float, complex, str, bytes, type(None), type(...), type(NotImplemented)}
#: Packages of what keeps others out, or leads to the outside world: known by its type.
OUTSIDE = {
    "_asyncio", "_contextvars", "_io", "_queue", "_socket", "_ssl", "_thread", "_weakref", "asyncio",
    "concurrent", "io", "logging", "multiprocessing", "queue", "select", "socket", "ssl", "subprocess",
    "tempfile", "threading", "weakref",
}  # fmt: skip
#: Python's own types of the kind.
OUTSIDE_TYPES = (types.FrameType, types.TracebackType)
#: Wrappers that keep what they wrap in an attribute.
WRAPPED = ("__wrapped__", "__func__", "fget", "func")


class _UntoldError(Exception):
    """An object that does not say what it holds."""


class Contents:
    """Digests of values, each of which is looked at once.

    Args:
        asker: for messages.
        strict: whether an object that does not say what it holds is refused; else its type stands for it.
    """

    def __init__(self, asker: str, strict: bool) -> None:
        self._asker = asker
        self._strict = strict
        self._done: dict[int, tuple[Any, str]] = {}  # the values too, so that no other has their id
        self._open: dict[int, int] = {}
        self._where: list[str] = []
        self._packages: set[str] = set()

    def digest(self, value: Any, name: str) -> str:
        """The digest of an option of a stage.

        Args:
            value: a function, or any other value.
            name: of the option.

        Raises:
            ConfigError: it cannot be told what the value does.
        """
        self._where = [name]
        self._packages.add(_package(value))
        try:
            with warnings.catch_warnings():  # of what can soon no more be pickled
                warnings.simplefilter("ignore")
                return self.of(value)
        except Exception as error:  # looking at an object may call code of its class
            if not self._strict and not isinstance(error, RecursionError):
                return _hash(_kind(value))
            what = str(error) if isinstance(error, _UntoldError) else f"what raises {error!r:.200}"
            raise ConfigError(
                f"{self._asker}: rows are kept until a function changes, and whether {show(value)} "
                f"changes cannot be told: it uses {what} ({', '.join(self._where)}). Give its "
                "version, by version="
                '"..." of its stage'
            ) from error

    def of(self, value: Any) -> str:
        """A digest of 32 hexadecimal digits."""
        if type(value) in PLAIN:
            return _hash(f"{type(value).__name__} {value!r}")
        key = id(value)
        if key in self._done:
            return self._done[key][1]
        if key in self._open:  # it holds itself
            return f"up {len(self._open) - self._open[key]}"
        self._open[key] = len(self._open)
        try:
            found = _hash(json.dumps(self._parts(value)))
        finally:
            del self._open[key]
        self._done[key] = value, found
        return found

    def _each(self, values: Mapping[str, Any]) -> list[Any]:
        """The digests of named values. If one fails, its name is left in ``_where``."""
        found = []
        for name, value in values.items():
            self._where.append(name)
            found.append([name, self.of(value)])
            self._where.pop()
        return found

    # Kinds of values

    def _parts(self, value: Any) -> list[Any]:
        kind = type(value)
        if kind in (list, tuple):
            if PLAIN.issuperset(map(type, value)):
                return [kind.__name__, repr(value)]
            return [kind.__name__, [self.of(inner) for inner in value]]
        if kind in (set, frozenset):
            return [kind.__name__, sorted(self.of(inner) for inner in value)]
        if kind in (dict, types.MappingProxyType):
            return ["dict", self._parts([*value, *value.values()])]
        if isinstance(value, types.CodeType):
            return self._code(value)
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, types.ModuleType):
            return ["module", value.__name__]
        if isinstance(value, type):
            return self._class(value)
        if isinstance(value, types.MethodType):
            return ["method", self.of(value.__func__), self.of(value.__self__)]
        if kind is functools.partial:
            return ["partial", self.of(value.func), self.of(value.args), self.of(value.keywords)]
        if isinstance(value, np.ndarray | np.generic):
            array = np.asarray(value)
            if array.dtype.hasobject:
                return ["objects", array.shape, self.of(array.ravel().tolist())]
            content = hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
            return ["array", str(array.dtype.descr), array.shape, content]
        if isinstance(value, pa.Array | pa.ChunkedArray):
            value = pa.table({"": value})
        if isinstance(value, pa.RecordBatch):
            value = pa.Table.from_batches([value])
        if isinstance(value, pa.Table):
            return ["table", table_digest(value)]
        if kind in (torch.Tensor, torch.nn.Parameter):
            with suppress(RuntimeError, TypeError):  # sparse: as it is pickled
                return ["tensor", tensor_digest(value)]
        return self._object(value)

    def _code(self, code: types.CodeType) -> list[Any]:
        content = code.co_code + getattr(code, "co_exceptiontable", b"")
        counts = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags
        names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
        return [hashlib.sha256(content).hexdigest(), counts, names, self.of(code.co_consts)]

    def _function(self, function: types.FunctionType) -> list[Any]:
        home = function.__globals__.get("__name__") or ""
        followed = self._is_followed(home)
        # A decorator of a package stands around a function of one's own.
        around = function.__module__ != home or "<locals>" in function.__qualname__
        if not followed and not around:
            return ["function", _name(function)]
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        used = used_by(function) if followed else {}
        if is_installed(home):  # of its globals, functions count
            names = {k: v for k, v in used.items() if isinstance(v, types.FunctionType)}
            used = {k: v for k, v in names.items() if self._is_followed(v.__module__ or "")}
        return [
            "function",
            _name(function),
            self.of(function.__code__),
            self.of(function.__defaults__),
            self.of(function.__kwdefaults__),
            self._each({name: cell.cell_contents for name, cell in cells if _is_filled(cell)}),
            self._each(used),
            self._each(vars(function)),
        ]

    def _is_followed(self, module: str) -> bool:
        """Whether what is in a module is looked at: the user's own, or of the package of what was given."""
        return not is_installed(module) or module.partition(".")[0] in self._packages

    def _class(self, kind: type) -> list[Any]:
        if is_installed(kind.__module__ or ""):
            return ["class", _name(kind)]
        methods = (types.FunctionType, staticmethod, classmethod, property)
        own = {
            name: value
            for name, value in vars(kind).items()
            if isinstance(value, methods) or not (name.startswith("__") or name == "_abc_impl")
        }
        return ["class", _name(kind), [self.of(b) for b in kind.__bases__], self._each(own)]

    def _object(self, value: Any) -> list[Any]:
        kind = type(value)
        if callable(getattr(kind, "fingerprint", None)):
            return ["fingerprint", json.dumps(identify(value))]
        about: list[Any] = ["object", self.of(kind)]
        if isinstance(value, types.BuiltinFunctionType | types.MethodWrapperType):
            owner = value.__self__
            module = owner is None or isinstance(owner, types.ModuleType)
            return [*about, _name(value), None if module else self.of(owner)]
        if kind.__module__ == "builtins" and hasattr(value, "__objclass__"):  # str.upper, a slot
            return [*about, _name(value.__objclass__), value.__name__]
        packages = {(base.__module__ or "").partition(".")[0] for base in kind.__mro__}
        if isinstance(value, OUTSIDE_TYPES) or packages & OUTSIDE:
            return [*about, "outside"]
        inner = {name: getattr(value, name, None) for name in WRAPPED}
        inner = {name: one for name, one in inner.items() if callable(one)}
        if isinstance(value, property):
            inner |= {"fset": value.fset, "fdel": value.fdel}
        if inner and is_installed(kind.__module__):
            return [*about, self._each(inner)]
        return [*about, self._state(value)]

    def _state(self, value: Any) -> Any:
        """What an object would be pickled as; else what it holds."""
        found: Any = None
        with suppress(Exception):
            own = copyreg.dispatch_table.get(type(value))
            found = value.__reduce_ex__(4) if own is None else own(value)
        if isinstance(found, str):
            return ["global", found]
        if isinstance(found, tuple):
            rest: list[Any] = [*found, None, None, None, None]
            make, args, state, items, pairs, setter = rest[:6]
            named = type(state) is dict and all(type(name) is str for name in state)
            self._where.append(f"state of {_kind(value)}")
            rest = [make, args, list(items or ()), list(pairs or ()), setter]
            said = [self._each(state) if named else self.of(state), *map(self.of, rest)]
            self._where.pop()
            return said
        held = getattr(value, "__dict__", None)
        if held or (held is not None and not is_installed(type(value).__module__)):
            return self._each(held)
        if self._strict:
            raise _UntoldError(_kind(value))
        return "untold"


def _is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018  (raises where the variable has no value yet)
    except ValueError:
        return False
    return True


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _name(value: Any) -> str:
    """Module and qualified name; the script that was started is a module of another name in processes that
    it spawns."""
    module = getattr(value, "__module__", None) or ""
    module = "__main__" if module == "__mp_main__" else module
    return f"{module}.{getattr(value, '__qualname__', '')}"


def _kind(value: Any) -> str:
    return f"a {type(value).__module__}.{type(value).__qualname__}"


def _package(value: Any) -> str:
    """The package that a function, or the class of an object, is of."""
    while isinstance(value, functools.partial | types.MethodType):
        value = value.func if isinstance(value, functools.partial) else value.__func__
    named = value if hasattr(value, "__qualname__") else type(value)
    return (getattr(named, "__module__", None) or "").partition(".")[0]
