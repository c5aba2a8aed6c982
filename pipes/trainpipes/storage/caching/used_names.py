"""Which global names a function reads, and what of the user's own code is behind them.

Called by the thread that plans. Keeps which modules are installed, and nothing else.
"""

from __future__ import annotations

import dis
import importlib
import importlib.util
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from types import CodeType, FunctionType, ModuleType
from typing import Any

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
