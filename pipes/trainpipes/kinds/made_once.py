"""What a stage makes of its options, once in each process."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

T = TypeVar("T")

#: One for all: what is made may ask for what else is.
_lock = threading.RLock()


def _renew() -> None:
    """A child's may have been taken by a thread that it has not."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_renew)


class made_once(Generic[T]):
    """A property that is made when it is first asked for, once, whichever threads ask. Unlike
    ``functools.cached_property``, which several threads may make at once from Python 3.12 on."""

    def __init__(self, make: Callable[[Any], T]) -> None:
        self._make = make
        self.__doc__ = make.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, one: None, owner: type) -> made_once[T]: ...
    @overload
    def __get__(self, one: object, owner: type) -> T: ...
    def __get__(self, one: Any, owner: type) -> made_once[T] | T:
        if one is None:
            return self
        with _lock:
            values = vars(one)
            if self._name not in values:
                values[self._name] = self._make(one)
            found: T = values[self._name]
        return found
