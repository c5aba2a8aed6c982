"""What a pickle says, without importing or calling anything that it names.

``torch.distributed.checkpoint`` keeps the index of a folder as a pickle. Each object in it becomes an
``Inert``: the class's name, what it would be called with, and what it would hold. A hostile pickle can
waste no more than its own size in memory.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any, ClassVar

__all__ = ["Inert", "read_inert"]


#: Values in one key of a dict, or in a member of a set.
MOST_IN_KEY = 1000


class Inert:
    """What stands in place of an object.

    Attributes:
        name: of its class or function, as "module.name".
        arguments: what that would be called with.
        held: what it would hold, by name, if that is a dict.
    """

    name = ""

    def __new__(cls, *arguments: Any, **_: Any) -> Inert:
        self = super().__new__(cls)
        self.arguments = arguments
        self.held = {}
        return self

    def __init__(self, *_: Any, **__: Any) -> None:
        self.arguments: tuple[Any, ...]
        self.held: dict[str, Any]

    def __call__(self, *arguments: Any, **_: Any) -> Inert:
        return Inert(*arguments)

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, tuple) and state and isinstance(state[0], dict):
            state = state[0]
        if isinstance(state, dict):
            self.held = {str(key): value for key, value in state.items()}

    # Of subclasses of collections.
    def append(self, _: Any) -> None: ...

    def extend(self, _: Any) -> None: ...

    def add(self, _: Any) -> None: ...

    def __setitem__(self, key: Any, value: Any) -> None:
        self.held[str(key)] = value


class _Unpickler(
    pickle._Unpickler
):  # in Python: the one in C makes room for as many values as a file says
    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)

    def find_class(self, module: str, name: str) -> Any:
        return type("Inert", (Inert,), {"name": f"{module}.{name}"})

    def persistent_load(self, pid: Any) -> Any:
        return Inert(pid)


def _checking(operation: Callable[[Any], None], keys: Callable[[Any], list[Any]]) -> Any:
    """An operation that hashes values: nested tuples that share their parts would take for ever."""

    def checked(unpickler: Any) -> None:
        if any(map(_is_costly, keys(unpickler))):
            raise pickle.UnpicklingError("a key of tuples in tuples without end")
        operation(unpickler)

    return checked


def _is_costly(key: Any) -> bool:
    waiting, seen = [key], 0
    while waiting and seen < MOST_IN_KEY:
        one = waiting.pop()
        seen += 1
        if isinstance(one, tuple | frozenset):
            waiting += one
    return bool(waiting)


def _refuse(_: Any) -> None:
    raise pickle.UnpicklingError("a bytearray")


_OPERATIONS = _Unpickler.dispatch
for _code, _keys in (
    (pickle.SETITEM, lambda unpickler: unpickler.stack[-2:-1]),
    (pickle.SETITEMS, lambda unpickler: unpickler.stack[::2]),
    (pickle.DICT, lambda unpickler: unpickler.stack[::2]),
    (pickle.ADDITEMS, lambda unpickler: unpickler.stack),
    (pickle.FROZENSET, lambda unpickler: unpickler.stack),
):
    _OPERATIONS[_code[0]] = _checking(_OPERATIONS[_code[0]], _keys)
_OPERATIONS[pickle.BYTEARRAY8[0]] = _refuse  # for which room would be made, too


def read_inert(content: bytes) -> Any:
    """The value of a pickle, of dicts, lists, tuples, sets, texts, numbers and ``Inert``.

    Raises:
        ValueError: it is no pickle, or cut short.

    >>> import datetime, pickle
    >>> found = read_inert(pickle.dumps({"when": datetime.date(2020, 1, 2)}))
    >>> found["when"].name, found["when"].arguments
    ('datetime.date', (b'\\x07\\xe4\\x01\\x02',))
    """
    try:
        return _Unpickler(io.BytesIO(content)).load()
    except (RecursionError, MemoryError):
        raise
    except Exception as error:
        raise ValueError(f"no pickle: {error or type(error).__name__}") from error
