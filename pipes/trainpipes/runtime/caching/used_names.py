"""Which global names a function reads, and what of the user's own code is behind them."""

from __future__ import annotations

import dis
import importlib
import importlib.util
import sys
import sysconfig
from collections.abc import Iterator
from functools import cache
from types import CodeType, FunctionType, ModuleType
from typing import Any

__all__ = ["is_installed", "used_by"]

#: Operations that read a global name, that set one, and that import a module.
READS = ("LOAD_GLOBAL", "LOAD_NAME")
SETS = ("STORE_GLOBAL", "DELETE_GLOBAL")
#: Folders of packages that were installed.
INSTALLED = ("site-packages", "dist-packages")


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
        try:
            spec = getattr(found, "__spec__", None) or importlib.util.find_spec(top)
        except (ImportError, ValueError):
            return False
        file = None if spec is None else spec.origin
        if file in ("built-in", "frozen"):
            return True
    if file is None:
        return False
    parts = file.replace("\\", "/").split("/")
    if any(part in INSTALLED for part in parts):
        return True
    return any(file.startswith(sysconfig.get_paths()[kind]) for kind in ("stdlib", "platstdlib"))


def used_by(function: FunctionType) -> dict[str, Any]:
    """What the global names that a function reads stand for, by name; of modules of the user's own, what
    it uses of them. Names that it sets itself are left out: they count calls, or keep results."""
    reads, sets, imports = _names(function.__code__)
    attributes = _attributes(function.__code__)
    found: dict[str, Any] = {}
    modules = []
    for name in sorted(reads - sets):
        if name not in function.__globals__:
            continue
        value = function.__globals__[name]
        if isinstance(value, ModuleType):
            modules.append((name, value))
        else:
            found[name] = value
    for name, level, wanted in sorted(imports):
        module = _imported(name, level, wanted, function.__globals__)
        modules += [] if module is None else [(name, module)]
    seen: set[int] = set()
    for name, module in modules:
        found.update(_parts(name, module, attributes, seen))
    return found


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
) -> ModuleType | None:
    """A module that a function imports when it is called; None if it is not the user's own.

    It is imported here, as the function would: what it holds cannot be told otherwise.
    """
    if not level and is_installed(name):
        return None
    try:
        whole = importlib.util.resolve_name("." * level + name, space.get("__package__"))
        module = importlib.import_module(whole)
        for inner in wanted:
            if not hasattr(module, inner):
                importlib.import_module(f"{whole}.{inner}")
    except Exception:  # it raises for the function, too, which may be ready for it
        return None
    return module if wanted else sys.modules.get(whole.partition(".")[0])


def _names(code: CodeType) -> tuple[set[str], set[str], set[tuple[str, int, tuple[str, ...]]]]:
    """Global names that code reads, those that it sets, and modules that it imports: name, level and what
    is wanted of each."""
    reads: set[str] = set()
    sets: set[str] = set()
    imports: set[tuple[str, int, tuple[str, ...]]] = set()
    level, wanted = None, None  # what the last two instructions put on the stack
    for step in dis.get_instructions(code):
        if step.opname in READS:
            reads.add(step.argval)
        elif step.opname in SETS:
            sets.add(step.argval)
        elif step.opname == "IMPORT_NAME":
            imports.add((step.argval, int(level or 0), tuple(wanted or ())))
        level, wanted = wanted, step.argval
    for inner in _inner(code):
        more = _names(inner)
        reads, sets, imports = reads | more[0], sets | more[1], imports | more[2]
    return reads, sets, imports


def _attributes(code: CodeType) -> set[str]:
    return set(code.co_names).union(*map(_attributes, _inner(code)))


def _inner(code: CodeType) -> list[CodeType]:
    return [constant for constant in code.co_consts if isinstance(constant, CodeType)]
