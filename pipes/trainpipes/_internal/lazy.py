"""``cached_property`` without the lock that it has in Python 3.11."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING or sys.version_info >= (3, 12):
    from functools import cached_property
else:
    from contextlib import suppress

    from trainpipes._internal.locks import ForkLock

    #: Python 3.11 makes the dict of an object's attributes when it is first asked for. It collects garbage
    #: meanwhile, and so may run Python code, in which another thread makes one, too: both hold the same
    #: values, and free them twice. So only one thread asks at a time.
    _making_dicts = ForkLock()
    #: Seconds until a thread asks in any case: what garbage collection runs may wait for it.
    _PATIENCE = 1.0

    class cached_property:
        """A property that is made when it is first asked for. Where several threads ask, it may be made
        several times, and all get the same one. A process that is forked while a thread makes it would
        inherit a lock that nobody releases.
        """

        def __init__(self, make):
            self._make, self.__doc__ = make, make.__doc__

        def __set_name__(self, owner, name):
            self._name = name

        def __get__(self, one, owner=None):
            if one is None:
                return self
            values = _dict_of(one)
            if self._name not in values:
                values.setdefault(self._name, self._make(one))
            return values[self._name]

    def _dict_of(one):
        try:
            _making_dicts.acquire(timeout=_PATIENCE)
            return vars(one)
        finally:
            with suppress(RuntimeError):  # it was not acquired
                _making_dicts.release()


__all__ = ["cached_property"]
