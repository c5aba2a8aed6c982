"""A lock that a forked process does not inherit locked."""

from __future__ import annotations

import os
import threading

from trainpipes._internal.living import Living


class ForkLock:
    """A reentrant lock that is new in a forked child."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        _all.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


_all: Living[ForkLock] = Living()


def _renew() -> None:
    for lock in list(_all):
        lock._lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)
