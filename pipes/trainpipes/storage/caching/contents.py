"""What functions and objects do and hold, as a digest: the same in every process, another one after an edit.

A function is its code, its defaults, what it closes over, and what its global names stand for: values,
functions, classes, objects, and what it uses of modules of the user's own. An object is its class and its
state, as it would be pickled. Of installed packages and of what is made in C, names count. Called by the
thread that plans; a ``Contents`` keeps the digests of one chain.
"""

from __future__ import annotations

import copyreg
import dis
import functools
import hashlib
import importlib
import importlib.util
import json
import re
import sys
import sysconfig
import types
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from trainpipes.columns.content import table_digest, tensor_digest
from trainpipes.errors import ConfigError
from trainpipes.kinds.options import identify, show
from trainpipes.kinds.stage import Stage, is_ours

#: Operations that read a global name, and that set one.
READS = ("LOAD_GLOBAL", "LOAD_NAME")
SETS = ("STORE_GLOBAL", "DELETE_GLOBAL")
#: Folders of packages that were installed.
INSTALLED = {"site-packages", "dist-packages"}


@cache
def is_installed(module: str) -> bool:
    """Whether a module comes with Python or an installed package, and not from a script, a notebook or
    a folder of one's own."""
    top = module.partition(".")[0]
    if top == "trainpipes" or top in sys.builtin_module_names:
        return True
    if top in ("__main__", "__mp_main__", ""):
        return False
    found = sys.modules.get(module) or sys.modules.get(top)
    file = getattr(found, "__file__", None)
    if file is None:
        with suppress(ImportError, ValueError):
            spec = getattr(found, "__spec__", None) or importlib.util.find_spec(top)
            file = None if spec is None else spec.origin
    if file is None or file in ("built-in", "frozen"):
        return file is not None
    folders = (sysconfig.get_paths()[kind] for kind in ("stdlib", "platstdlib"))
    return bool(INSTALLED & {*file.replace("\\", "/").split("/")}) or file.startswith(
        tuple(folders)
    )


def used_by(function: FunctionType) -> dict[str, Any]:
    """What the global names that a function reads stand for, by name; of modules of the user's own, what
    it uses of them. Names that it sets itself are left out: they count calls, or keep results."""
    space = function.__globals__
    codes = list(_codes(function.__code__))
    attributes = {name for code in codes for name in code.co_names}
    reads: set[str] = set()
    sets: set[str] = set()
    imports: set[tuple[str, int, tuple[str, ...]]] = set()
    for code in codes:
        level, wanted = None, None  # what the last two instructions put on the stack
        for step in dis.get_instructions(code):
            if step.opname in READS:
                reads.add(step.argval)
            elif step.opname in SETS:
                sets.add(step.argval)
            elif step.opname == "IMPORT_NAME":
                imports.add((step.argval, int(level or 0), tuple(wanted or ())))
            level, wanted = wanted, step.argval
    found = {name: space[name] for name in sorted(reads - sets) if name in space}
    modules = [(name, value) for name, value in found.items() if isinstance(value, ModuleType)]
    for name, _ in modules:
        del found[name]
    for name, level, wanted in sorted(imports):
        modules += [(name, module) for module in _imported(name, level, wanted, space)]
    seen: set[int] = set()
    for name, module in modules:
        found.update(_parts(name, module, attributes, seen))
    return found


def _codes(code: CodeType) -> Iterator[CodeType]:
    """The code of a function, and of those within it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _parts(
    path: str, module: ModuleType, attributes: set[str], seen: set[int]
) -> Iterator[tuple[str, Any]]:
    """What names of a user's module, and of modules within it, stand for."""
    if id(module) in seen or is_installed(module.__name__):
        return
    seen.add(id(module))
    for name in sorted(attributes & vars(module).keys()):
        value = vars(module)[name]
        if isinstance(value, ModuleType):
            yield from _parts(f"{path}.{name}", value, attributes, seen)
        else:
            yield f"{path}.{name}", value


def _imported(
    name: str, level: int, wanted: tuple[str, ...], space: dict[str, Any]
) -> Iterator[ModuleType]:
    """The module that a function imports when it is called, if it is the user's own.

    It is imported here, as the function would: what it holds cannot be told otherwise.
    """
    if not level and is_installed(name):
        return
    with suppress(Exception):  # it raises for the function, too, which may be ready for it
        whole = importlib.util.resolve_name("." * level + name, space.get("__package__"))
        module = importlib.import_module(whole)
        for inner in wanted:
            if not hasattr(module, inner):
                importlib.import_module(f"{whole}.{inner}")
        yield module if wanted else sys.modules[whole.partition(".")[0]]


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


def digest_of(*parts: Any) -> str:
    """A SHA-256 digest of values of JSON types, in hexadecimal."""
    # The script that was started is a module of another name in processes that it spawns, and objects
    # lie elsewhere in each.
    text = json.dumps(parts).replace("__mp_main__.", "__main__.")
    text = re.sub(r" at 0x[0-9a-fA-F]+", "", text)
    return hashlib.sha256(text.encode()).hexdigest()


def cache_key(stages: Sequence[Stage], asker: str, *, strict: bool = True) -> list[Any]:
    """What identifies stages and what they do, of JSON types.

    More careful than a state's fingerprint, which goes by names: lambdas share theirs, and a function
    that was edited keeps it. See ``Contents`` for what a function is known by; with ``version=`` it is
    known by that. A stage of the user's own is known by its class, too.

    Args:
        stages: first one first.
        asker: who keeps their rows, for messages.
        strict: whether it is refused that a function uses what cannot be told from others.

    Raises:
        ConfigError: one does.
    """
    try:
        release = version("trainpipes")
    except PackageNotFoundError:  # run from its sources
        release = ""
    contents = Contents(asker, strict)
    return [release, [[stage.identity(), _done_by(stage, contents)] for stage in stages]]


def _done_by(stage: Stage, contents: Contents) -> dict[str, str]:
    """What a class of the user's own does, and each option that is known by its name or text only."""
    identity = stage.identity()
    found = {
        name: contents.digest(value, f"{stage.name}({name})")
        for name, value in sorted(stage.options.items())
        if name in identity and identity[name] in (identify(value), str(value))
    }
    if not is_ours(type(stage)):
        found["class"] = contents.digest(type(stage), stage.name)
    return found
