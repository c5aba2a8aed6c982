"""What a pickle says, without importing or calling anything that it names.

``torch.distributed.checkpoint`` keeps the index of a folder as a pickle. Each object in it becomes an
``Inert``: the class's name, what it would be called with, and what it would hold. A hostile pickle can
waste no more than its own size in memory.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

__all__ = ["Inert", "read_inert"]


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


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return type("Inert", (Inert,), {"name": f"{module}.{name}"})

    def persistent_load(self, pid: Any) -> Any:
        return Inert(pid)


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
